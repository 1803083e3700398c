"""Parameters that DeepSpeed ZeRO-3 has partitioned are refused by every call that would read them or load into them."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import hfshard
from hfshard.errors import HfshardError, InvalidArgumentError, UnstorableTensorError
from hfshard.training import CheckpointManager, TrainingState
from tests.tensors import zero3
from tests.tensors.zero3 import Net, OwnSave, ZeroParamStatus, gathered, partition

NAMES = ["first.weight", "first.bias", "second.weight", "second.bias"]
PLACE = Path()


@pytest.fixture
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has imported DeepSpeed: only there are copies of its parameters looked for."""
    if "deepspeed" not in sys.modules:
        monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))


def partitioned(cls: type[Net] = Net) -> Net:
    torch.manual_seed(0)
    model = cls()
    partition(model)
    return model


def files_in(place: Path) -> list[Path]:
    return [path for path in place.rglob("*") if path.is_file()]


def test_a_module_as_deepspeed_leaves_it() -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in partitioned().state_dict().items()}

    assert shapes == {
        "first.weight": (0,), "first.bias": (0,), "second.weight": (0,), "second.bias": (1,), "mean": (2,),
    }  # fmt: skip


@pytest.mark.parametrize("name", zero3.saves(Net(), PLACE))
def test_a_module_is_not_saved(name: str, tmp_path: Path) -> None:
    call = zero3.saves(partitioned(), tmp_path)[name]

    with pytest.raises(UnstorableTensorError) as caught:
        call()

    assert str(caught.value).startswith(
        "Cannot save 'first.weight' and 2 more parameters: DeepSpeed ZeRO-3 has partitioned them across the ranks, and "
        "this process has an empty tensor in place of each. Nothing was written. Gather the parameters on every rank "
        "during the save: with deepspeed.zero.GatheredParameters(list(model.parameters())): hfshard.save_model("
    )
    assert "stage3_gather_16bit_weights_on_model_save" in str(caught.value)
    assert caught.value.fqn == "first.weight"
    assert files_in(tmp_path) == []


@pytest.mark.parametrize("name", ["save_pretrained", "push_to_hub"])
def test_a_class_that_saves_by_itself_is_refused_too(name: str, tmp_path: Path) -> None:
    call = zero3.saves(partitioned(OwnSave), tmp_path)[name]

    with pytest.raises(UnstorableTensorError, match=r"Cannot save 'first\.weight' and 2 more parameters"):
        call()

    assert files_in(tmp_path) == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.usefixtures("deepspeed")
@pytest.mark.parametrize("name", zero3.saves_of_copies(Net(), PLACE))
def test_a_state_dict_is_not_saved(name: str, tmp_path: Path) -> None:
    model = partitioned()
    call = zero3.saves_of_copies(model, tmp_path)[name]
    prefix = {"with a prefix": "net.", "dcp.save, nested": "model."}.get(name, "")
    first = {"of a child": "weight", "renamed": "first.weight_"}.get(name, f"{prefix}first.weight")
    refusal = dcp.api.CheckpointException if name.startswith("dcp") else UnstorableTensorError

    with pytest.raises(refusal) as caught:
        call()

    more = "1 more parameter" if name == "of a child" else "2 more parameters"
    assert model.first.weight.shape == (0,)
    assert f"Cannot save '{first}' and {more}: DeepSpeed ZeRO-3 has partitioned them" in str(caught.value)
    assert files_in(tmp_path) == []


@pytest.fixture
def frozen() -> Iterator[Net]:
    """A partitioned model in a process that froze its objects, as training loops do to spare collections."""
    model = partitioned()
    gc.freeze()
    yield model
    gc.unfreeze()


@pytest.mark.usefixtures("deepspeed")
def test_a_state_dict_of_a_frozen_model_is_not_saved(frozen: Net, tmp_path: Path) -> None:
    state_dict = {f"renamed.{name}": tensor.clone() for name, tensor in frozen.state_dict().items()}

    with pytest.raises(UnstorableTensorError, match=r"Cannot save 'renamed\.first\.weight' and 2 more parameters"):
        hfshard.save_state_dict(state_dict, tmp_path)

    assert files_in(tmp_path) == []


@pytest.mark.usefixtures("deepspeed")
def test_other_empty_tensors_are_saved_while_a_module_is_partitioned(tmp_path: Path) -> None:
    model = partitioned()

    hfshard.save_state_dict({"nothing": torch.empty(0), "one": torch.ones(1)}, tmp_path)

    assert {name: one.shape for name, one in hfshard.load_state_dict(tmp_path).items()} == {
        "nothing": (0,),
        "one": (1,),
    }
    assert model.first.weight.shape == (0,)


@pytest.mark.parametrize("name", zero3.loads(Net(), PLACE))
def test_nothing_is_loaded_into_a_module(name: str, tmp_path: Path) -> None:
    hfshard.save_model(Net(), tmp_path)
    model = partitioned()
    model.get_buffer("mean").fill_(7)

    with pytest.raises(InvalidArgumentError) as caught:
        zero3.loads(model, tmp_path)[name]()

    assert str(caught.value).startswith("Cannot load into 'first.weight' and 2 more parameters: DeepSpeed ZeRO-3")
    assert "modifier_rank=0): hfshard.load_model(model, path)" in str(caught.value)
    assert "engine.optimizer.refresh_fp32_params()" in str(caught.value)
    assert model.get_buffer("mean").tolist() == [7, 7]


@pytest.mark.usefixtures("deepspeed")
def test_a_state_dict_is_no_like(tmp_path: Path) -> None:
    hfshard.save_model(Net(), tmp_path)
    model = partitioned()

    with pytest.raises(InvalidArgumentError, match=r"Cannot load into 'first\.weight' and 2 more parameters"):
        hfshard.load_state_dict(tmp_path, like=model.state_dict())


@pytest.mark.parametrize("name", zero3.saves_of_runs(Net(), PLACE))
def test_a_run_is_not_saved(name: str, tmp_path: Path) -> None:
    call = zero3.saves_of_runs(partitioned(), tmp_path / "run")[name]

    with pytest.raises(InvalidArgumentError, match=r"Cannot save or restore a run with 'first\.weight'") as caught:
        call()

    assert "engine.save_checkpoint(directory) and engine.load_checkpoint(directory)" in str(caught.value)
    assert files_in(tmp_path) == []


@pytest.mark.parametrize("name", zero3.restores(Net(), PLACE, PLACE))
def test_a_run_is_not_restored(name: str, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, TrainingState(model=Net()))
    torch.save({"model": Net().state_dict(), "step": 3}, tmp_path / "old.pt")
    model = partitioned()
    model.get_buffer("mean").fill_(7)

    with pytest.raises(InvalidArgumentError, match=r"Cannot save or restore a run with 'first\.weight' and 2 more"):
        zero3.restores(model, tmp_path / "run", tmp_path / "old.pt")[name]()

    assert model.get_buffer("mean").tolist() == [7, 7]


class ZeROOptimizer:
    """The base of DeepSpeed's optimizers, by its name."""

    def state_dict(self) -> dict[str, Any]:
        return {"partition_count": 2}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError(state_dict)


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """What `deepspeed.initialize` returns."""


def stepped_by_deepspeed(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that was given to DeepSpeed, after a step: it has no parameters, and a state of flat tensors."""
    optimizer = torch.optim.AdamW(model.parameters())
    flat: Any = torch.zeros(5)
    flat.ds_id = "0_3"
    optimizer.state[flat] = {"exp_avg": torch.zeros(5)}
    optimizer.param_groups[0]["params"] = []
    return optimizer


@pytest.mark.usefixtures("deepspeed")
@pytest.mark.parametrize("make", [stepped_by_deepspeed, lambda model: DeepSpeedZeroOptimizer()])
def test_an_optimizer_in_parts_is_not_saved_though_the_model_is_gathered(
    make: Callable[[nn.Module], Any], tmp_path: Path
) -> None:
    model = partitioned()
    state = TrainingState(model=model, optimizer=make(model))

    with gathered(model), pytest.raises(InvalidArgumentError, match=r"run with 'optimizer' .* partitioned its state"):
        CheckpointManager(tmp_path / "run").save(1, state)

    assert files_in(tmp_path) == []


@pytest.mark.parametrize("status", [ZeroParamStatus.NOT_AVAILABLE, ZeroParamStatus.INFLIGHT, None])
def test_only_what_is_available_can_be_read(status: ZeroParamStatus | None, tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    partition(model, most_whole=9)
    hfshard.save_model(model, tmp_path)
    bias: Any = model.bias
    bias.ds_status = status

    with pytest.raises(UnstorableTensorError, match=r"Cannot save 'bias': DeepSpeed ZeRO-3 has partitioned it across"):
        hfshard.save_model(model, tmp_path)


def test_a_gathered_module_is_saved_and_loaded_by_every_call(tmp_path: Path) -> None:
    model = partitioned()
    with gathered(model):
        for name, call in zero3.saves(model, tmp_path / "saved").items():
            call()
            place = tmp_path / "saved" / "hub" if name == "push_to_hub" else tmp_path / "saved"
            assert hfshard.load_state_dict(place)["first.weight"].shape == (3, 2), name
        zero3.saves_of_copies(model, tmp_path / "copies")["save_state_dict"]()
        zero3.saves_of_runs(model, tmp_path / "run")["save"]()
    hfshard.save_state_dict({name: torch.ones_like(one) for name, one in Net().state_dict().items()}, tmp_path / "ones")

    with gathered(model, modifier_rank=0):
        hfshard.load_model(model, tmp_path / "ones")

    with gathered(model):
        assert [float(one.detach().sum()) for one in model.parameters()] == [6, 3, 3, 1]


def test_gathered_weights_are_saved_for_a_partitioned_module(tmp_path: Path) -> None:
    model = partitioned()
    with gathered(model):
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    hfshard.save_model(model, tmp_path / "function", state_dict=weights)
    model.save_pretrained(tmp_path / "mixin", state_dict=weights)

    for place in ("function", "mixin"):
        loaded = hfshard.load_state_dict(tmp_path / place)
        assert sorted(loaded) == sorted([*NAMES, "mean"])
        assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())


def test_a_rank_that_saves_nothing_needs_no_weights(tmp_path: Path) -> None:
    assert hfshard.save_model(partitioned(), tmp_path / "out", is_main_process=False) is None
    partitioned().save_pretrained(tmp_path / "out", is_main_process=False)

    assert files_in(tmp_path) == []


def test_names_in_errors_have_no_wrappers(tmp_path: Path) -> None:
    model = partitioned()

    with pytest.raises(HfshardError, match=re.escape("Cannot save 'first.weight' and")):
        hfshard.save_model(nn.DataParallel(model), tmp_path)
