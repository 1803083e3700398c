"""What a file of torch.save lacks, has of another kind, or leaves open, is refused or reported; nothing is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Adamax, RAdam, lr_scheduler
from torch.utils.data import TensorDataset

from hfshard.errors import CheckpointNotFoundError, InvalidArgumentError
from hfshard.training import CheckpointManager, Gradients, ResumableDataLoader, TrainingState
from hfshard.training.interop.convert_run import convert_foreign
from tests.training.interop.programs import adamw, net, save_of, stepped, train, two_groups
from tests.training.interop.refusing import refused


@pytest.fixture
def manager(tmp_path: Path) -> CheckpointManager:
    return CheckpointManager(tmp_path / "run")


def tutorial(tmp_path: Path, *left_out: str, **more: Any) -> str:
    """What a run with SGD and StepLR has saved after three steps."""
    torch.manual_seed(1)
    parts = stepped(net())
    train(parts, 0, 3)
    value = save_of(parts, model="model", optimizer="optimizer", scheduler="scheduler") | {"step": 3} | more
    path = tmp_path / "old.pt"
    torch.save({key: one for key, one in value.items() if key not in left_out}, path)
    return str(path)


def test_half_a_dict_is_refused_and_its_half_restored(tmp_path: Path, manager: CheckpointManager) -> None:
    path = tutorial(tmp_path, "optimizer", "scheduler")
    parts = stepped(net())
    state = TrainingState(**parts.named)

    refused(manager, state, path, r"has no 'optimizer'.*has no 'scheduler'.*Nothing was restored")
    restored = manager.restore(state, path, strict=False)

    assert ["no 'optimizer'" in one or "no 'scheduler'" in one for one in restored.differences] == [True, True]
    assert torch.equal(parts.model[0].weight, torch.load(path)["model"]["0.weight"])
    assert parts.optimizer.param_groups[0]["lr"] == 0.1


def test_parts_that_the_state_lacks_are_refused(tmp_path: Path, manager: CheckpointManager) -> None:
    path = tutorial(tmp_path, ema=net().state_dict(), teacher={"state_dict": net().state_dict()}, best=0.5)
    model = net()

    words = r"state of 'optimizer'.*'scheduler'.*'ema', which the TrainingState lacks.*'teacher'"
    refused(manager, TrainingState(model), path, words)
    restored = manager.restore(TrainingState(model), path, strict=False)

    assert len(restored.differences) == 4
    assert restored.extra == {"step": 3, "best": 0.5}


def test_weights_alone_are_a_model(tmp_path: Path, manager: CheckpointManager) -> None:
    torch.save(net().state_dict(), tmp_path / "weights.pth")
    model = net()
    restored = manager.restore(TrainingState(model), tmp_path / "weights.pth")
    assert (restored, restored.extra) == (0, {})
    assert "the number of steps (0 is taken)" in restored.lacking


def test_several_candidates_are_listed(tmp_path: Path, manager: CheckpointManager) -> None:
    path = tutorial(tmp_path, "model", net=net().state_dict(), state_dict=net().state_dict(), ema={"a": 1})
    parts = stepped(net())
    state = TrainingState(**parts.named)
    refused(manager, state, path, r"'model' may be one of several entries.*'state_dict', 'net'.*keys=\{'model'")

    refused(manager, state, path, "which the TrainingState lacks", keys={"model": "net"})
    restored = manager.restore(state, path, keys={"model": "net"}, strict=False)

    assert "'state_dict', which" in restored.differences[0]
    assert torch.equal(parts.model[0].weight, torch.load(path)["net"]["0.weight"])


def test_a_name_of_an_architecture_is_no_model(tmp_path: Path, manager: CheckpointManager) -> None:
    path = tutorial(tmp_path, model="resnet18", state_dict=net().state_dict())
    restored = manager.restore(TrainingState(**stepped(net()).named), path)
    assert restored.extra["model"] == "resnet18"


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda model: SGD(model[0].parameters(), lr=0.1, momentum=0.9), r"had \[6\] parameters.*and have \[2\]"),
        (lambda model: two_groups(model).optimizer, r"is an AdamW.*another optimizer's: it lacks 'amsgrad', 'betas'"),
        (lambda model: Adam(model.parameters()), r"is an Adam.*has 'dampening', 'momentum', 'nesterov'"),
        (
            lambda model: SGD([*model.parameters()][::-1], lr=0.1, momentum=0.9),
            r"'momentum_buffer' of '2.bias' has the shape \[3, 4\].*and the parameter \[2\]",
        ),
    ],
    ids=["fewer", "another class in other groups", "another class", "another order"],
)
def test_other_optimizers_are_refused(build: Any, match: str, tmp_path: Path, manager: CheckpointManager) -> None:
    path = tutorial(tmp_path, "scheduler")
    model = net()
    optimizer = build(model)

    refused(manager, TrainingState(model, optimizer), path, match)
    restored = manager.restore(TrainingState(model, optimizer), path, strict=False)

    assert len(restored.differences) == 1
    assert optimizer.state_dict()["state"] == {}


def test_another_scheduler_is_refused(tmp_path: Path, manager: CheckpointManager) -> None:
    path = tutorial(tmp_path)
    for make, match in (
        (lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5), "is an ExponentialLR.*it has 'step_size'"),
        (lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5), "it lacks 'T_max', 'eta_min', and it has"),
    ):
        parts = stepped(net())
        state = TrainingState(parts.model, parts.optimizer, make(parts.optimizer))
        refused(manager, state, path, match)


def test_what_a_file_never_holds_is_reported(tmp_path: Path, manager: CheckpointManager) -> None:
    path = tutorial(tmp_path)
    parts = stepped(net())
    data = TensorDataset(torch.arange(8))
    loader: Any = ResumableDataLoader(data, batch_size=2, seed=1)
    position = loader.state_dict()
    torch.manual_seed(5)

    restored = manager.restore(TrainingState(**parts.named, loader=loader, held=Gradients(parts.model)), path)

    assert [one.split(" (")[0] for one in restored.lacking] == [
        "the random number generators",
        "the state of 'loader'",
        "the state of 'held'",
    ]
    assert loader.state_dict() == position
    assert torch.initial_seed() == 5


@pytest.mark.parametrize("key", ["rng_state", "torch_rng_state", "cuda_rng_state_all", "random_state", "RNG", "rng"])
def test_generators_that_a_file_holds_are_reported_too(key: str, tmp_path: Path, manager: CheckpointManager) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    torch.rand(1)
    path = tutorial(tmp_path, **{key: {"torch": before}})
    torch.manual_seed(5)

    restored = manager.restore(TrainingState(**stepped(net()).named), path)

    assert restored.lacking == (
        "the random number generators (dropout and shuffling go on from those of this process; the file holds "
        f"'{key}', left in restored.extra and not set)",
    )
    assert torch.equal(restored.extra[key]["torch"], before)


def test_ours_lack_nothing_and_know_no_keys(tmp_path: Path, manager: CheckpointManager) -> None:
    state = TrainingState(net())
    manager.save(1, state)
    assert manager.restore(state, 1).lacking == ()
    with pytest.raises(InvalidArgumentError, match="keys is for what other programs have saved"):
        manager.restore(state, 1, keys={"model": "ema"})
    with pytest.raises(InvalidArgumentError, match="keys names 'ema', which is no part of the TrainingState: model"):
        manager.restore(state, tutorial(tmp_path), keys={"ema": "ema"})
    with pytest.raises(CheckpointNotFoundError):
        manager.restore(state, tmp_path)


def test_a_restored_run_does_not_hold_the_file(tmp_path: Path, manager: CheckpointManager) -> None:
    path = tutorial(tmp_path)
    parts = adamw(net())
    parts = stepped(parts.model)
    manager.restore(TrainingState(**parts.named), path)
    Path(path).write_bytes(b"")  # which ends a process that has it mapped, at the next look

    train(parts, 3, 4)
    assert manager.save(4, TrainingState(**parts.named))


def test_weights_sorted_by_name_do_not_tell_the_order(tmp_path: Path, manager: CheckpointManager) -> None:
    model = nn.LayerNorm(2)
    path = tmp_path / "old.pt"
    value = {"model": dict(sorted(model.state_dict().items())), "optimizer": Adam(model.parameters()).state_dict()}
    torch.save(value, path)
    with pytest.raises(InvalidArgumentError, match="its weights were sorted by name"):
        convert_foreign(str(path), tmp_path / "new")


def test_names_of_a_part_of_the_model_are_found(tmp_path: Path, manager: CheckpointManager) -> None:
    parts: dict[str, Any] = {"model": net(), "other": net()}
    for name in ("model", "other"):
        parts[f"of_{name}"] = Adam(parts[name].named_parameters(), lr=0.1 if name == "model" else 0.2)
    path = tmp_path / "old.pt"
    torch.save({name: part.state_dict() for name, part in parts.items()}, path)
    before = {name: repr(part.state_dict()) for name, part in parts.items()}

    manager.restore(TrainingState(**parts), path)

    assert before == {name: repr(part.state_dict()) for name, part in parts.items()}
    with pytest.raises(InvalidArgumentError, match="there are several optimizers and models"):
        convert_foreign(str(path), tmp_path / "new")


def test_the_state_of_a_like_class_is_refused(tmp_path: Path, manager: CheckpointManager) -> None:
    model = net()
    optimizer = Adam(model.parameters())

    def sequence(optimizer: Any, then: Any) -> Any:
        return lr_scheduler.SequentialLR(optimizer, [lr_scheduler.ConstantLR(optimizer), then(optimizer)], [2])

    scheduler = sequence(optimizer, lambda one: lr_scheduler.StepLR(one, 2))
    path = str(tmp_path / "old.pt")
    value = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save(value, path)
    for kind in (RAdam, Adamax):
        of_it = kind(model.parameters())
        of_step = sequence(of_it, lambda one: lr_scheduler.StepLR(one, 2))
        refused(manager, TrainingState(model, of_it, of_step), path, rf"{kind.__name__}, and .* it has 'amsgrad'")
    built = sequence(optimizer, lambda one: lr_scheduler.ExponentialLR(one, 0.9))
    refused(manager, TrainingState(model, optimizer, built), path, r"is an ExponentialLR, .* it has 'step_size'")
