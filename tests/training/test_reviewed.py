"""What a review found: states that would have come back wrong, or not at all."""

from __future__ import annotations

import enum
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from hfshard.errors import StateDictMismatchError, UnstorableTensorError
from hfshard.training import CheckpointManager, TrainingState


class Phase(enum.Enum):
    WARM = "warm"
    DECAY = "decay"


class Holds(LRScheduler):
    """A scheduler that holds an object."""

    def __init__(self, optimizer: Any, held: object) -> None:
        self.held = held
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        return self.base_lrs


class Counted(dict[str, int]):
    """More than its attributes."""


@pytest.mark.parametrize("held", [Phase.WARM, random.Random(0), Counted(a=7)], ids=["enum", "random", "dict"])
def test_an_object_that_is_more_than_its_attributes_is_refused_in_a_scheduler(tmp_path: Path, held: object) -> None:
    model = nn.Linear(2, 2)
    scheduler = Holds(torch.optim.SGD(model.parameters(), lr=0.1), held)
    with pytest.raises(UnstorableTensorError, match="'scheduler/held' is a "):
        CheckpointManager(tmp_path).save(1, TrainingState(model=model, scheduler=scheduler))
    assert list(tmp_path.iterdir()) == []


class Wrapper(torch.Tensor):
    """Its values lie in another tensor, and it has no memory of its own."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.held = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].held)
        raise NotImplementedError(func)


class Keeps:
    """Any object with one tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        self.tensor = state_dict["tensor"]


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("tensor", [Wrapper(torch.ones(4)), torch.eye(3).to_sparse()], ids=["wrapper", "sparse"])
def test_a_tensor_without_bytes_is_refused_before_it_is_copied(
    tmp_path: Path, tensor: torch.Tensor, blocking: bool
) -> None:
    with pytest.raises(UnstorableTensorError, match="Can't store 'keeps/tensor'"):
        CheckpointManager(tmp_path).save(1, TrainingState(keeps=Keeps(tensor)), blocking=blocking)
    assert list(tmp_path.iterdir()) == []


def test_another_default_device_is_none_of_a_saves(tmp_path: Path) -> None:
    keeps = Keeps(torch.arange(5.0))
    with CheckpointManager(tmp_path) as manager:
        with torch.device("meta"):
            manager.save(1, TrainingState(keeps=keeps), blocking=False)
        manager.wait_until_finished()
        keeps.tensor = torch.zeros(5)
        manager.restore_latest(TrainingState(keeps=keeps))
    assert keeps.tensor.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_small_file_may_be_binary(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, TrainingState(model=nn.Linear(2, 2)), files={"spiece.model": b"\x0a\x00\xff\x00"})
        assert manager.restore_latest(TrainingState(model=nn.Linear(2, 2))) == 1
        (tmp_path / "checkpoint-00000001" / "spiece.model").write_bytes(b"\x0a\x00\xff\x01")
        [problem] = manager.verify(1)[1]
    assert "spiece.model' is not the file that was saved: its sha256 is " in str(problem)


class Refuses(Holds):
    """A scheduler that refuses its state."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        raise ValueError("I am another one")


def test_a_scheduler_that_refuses_leaves_all_as_it_was(tmp_path: Path) -> None:
    def build(kind: type[Holds]) -> dict[str, Any]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return {"model": model, "optimizer": optimizer, "scheduler": kind(optimizer, None)}

    saved, built = build(Refuses), build(Refuses)
    saved["model"](torch.ones(1, 2)).sum().backward()
    saved["optimizer"].step()
    saved["scheduler"].step()
    weights = {name: one.clone() for name, one in built["model"].state_dict().items()}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, TrainingState(**saved))
        with pytest.raises(StateDictMismatchError, match=r"'scheduler' refused its state .*Nothing was restored"):
            manager.restore_latest(TrainingState(**built))
    assert built["scheduler"].last_epoch == 0
    assert not built["optimizer"].state
    assert all(torch.equal(one, weights[name]) for name, one in built["model"].state_dict().items())


def test_frozen_weights_between_trained_ones_have_files_of_their_own_that_are_linked(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(6)))
    for layer in list(model)[::2]:
        layer.requires_grad_(False)
    with CheckpointManager(tmp_path, max_shard_size=10_000) as manager:
        first = Path(manager.save(1, TrainingState(model=model)))
        with torch.no_grad():
            model.get_parameter("1.weight").add_(1)
        second = Path(manager.save(2, TrainingState(model=model)))
    names = sorted(path.name for path in second.glob("model-*.safetensors"))
    assert names == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    # The trained ones come first, and the frozen ones lie in the other file.
    assert [(first / name).stat().st_ino == (second / name).stat().st_ino for name in names] == [False, True]


def test_a_tie_that_the_checkpoint_does_not_have_is_refused(tmp_path: Path) -> None:
    saved, tied = (nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "ab"}) for _ in range(2))
    tied["b"].weight = tied["a"].weight
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, TrainingState(model=saved))
        with pytest.raises(StateDictMismatchError, match="are one tensor, and two different ones in the checkpoint"):
            manager.restore_latest(TrainingState(model=tied))


def test_gradients_of_before_are_none_of_the_resumed_step(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, TrainingState(model=model))
        (model(torch.ones(1, 2)).sum() * float("nan")).backward()
        manager.restore_latest(TrainingState(model=model))
    assert model.weight.grad is None


def test_a_scaler_that_was_on_is_refused_where_it_is_off(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, TrainingState(scaler=torch.amp.GradScaler("cpu")))
        with pytest.raises(StateDictMismatchError, match="'scaler' is a GradScaler that is off"):
            manager.restore_latest(TrainingState(scaler=torch.amp.GradScaler("cpu", enabled=False)))


def test_what_is_saved_and_restored_in_inference_mode_can_be_trained(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    optimizer = torch.optim.Adam(model.parameters())
    state = TrainingState(model=model, optimizer=optimizer)
    with CheckpointManager(tmp_path) as manager:
        for step in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            with torch.inference_mode(step == 0):
                manager.save(step, state, blocking=False)
                manager.wait_until_finished()
                manager.restore_latest(state)
    assert all(int(one["step"]) == 2 for one in optimizer.state.values())
