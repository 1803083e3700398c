"""Tensors are assigned as torch's own `load_state_dict` does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import nn

import hfshard
from hfshard.errors import InvalidArgumentError, UnstorableTensorError
from hfshard.tensors.state_dict import assign, may_be_divided
from hfshard.training import CheckpointManager, TrainingState
from tests.helpers.tiny_bert import Bert, bert, value_of


class Telling(nn.Module):
    """Tells in which order it was asked to load, and with what."""

    def __init__(self, told: list[tuple[str, list[str]]], version: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.told, self._version = told, version
        self.register_load_state_dict_pre_hook(self.before)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(  # type: ignore[no-untyped-call]
            lambda _, keys: told.append(("after", sorted(keys.missing_keys)))
        )

    def before(self, _: nn.Module, state_dict: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        self.told.append((f"{prefix} version {metadata.get('version')}", sorted(state_dict)))


def told_by(load: Any) -> list[tuple[str, list[str]]]:
    """What the modules of a model tell when `load` brings two of its three weights."""
    told: list[tuple[str, list[str]]] = []
    model = nn.Sequential(Telling(told, 3), nn.ModuleList([Telling(told)]))
    setattr(model, "a.b", Telling(told))
    load(model, {"0.weight": torch.ones(1), "a.b.weight": torch.ones(1)})
    assert [float(value) for value in model.state_dict().values()] == [1, 0, 1]
    return told


def test_modules_hooks_see_what_torch_would_show_them() -> None:
    assert told_by(assign) == [
        ("0. version 3", ["0.weight"]),
        ("after", []),
        ("1.0. version 1", []),
        ("after", ["1.0.weight"]),
        ("a.b. version 1", ["a.b.weight"]),
        ("after", ["1.0.weight"]),
    ]


def test_a_tensor_of_another_shape_is_refused_as_by_torch() -> None:
    with pytest.raises(RuntimeError, match=r"loading state_dict for Linear:\n\tsize mismatch for weight"):
        assign(nn.Linear(2, 2), {"weight": torch.zeros(3, 3)})


def test_a_model_that_loads_by_itself_is_asked_to() -> None:
    class Own(nn.Linear):
        given: Any = None

        def load_state_dict(self, state_dict: Any, *arguments: Any, **options: Any) -> Any:
            self.given = list(state_dict), options

    model = Own(1, 1)
    assign(model, {"weight": torch.zeros(1, 1)})
    assert model.given == (["weight"], {"strict": False, "assign": False})


class Doubled(nn.Module):
    """Is stored as twice its weight, and loads that by a method of its own, which copies in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "twice"] = self.weight.detach() * 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.weight.data.copy_(state_dict[prefix + "twice"] / 2)


def test_what_stays_on_the_meta_device_is_not_called_loaded() -> None:
    stored = {"0.twice": torch.tensor([6.0, 8.0])}
    with torch.device("meta"):
        doubled = Doubled()
        model = nn.Sequential(doubled)

    with pytest.raises(InvalidArgumentError, match=r"'0\.twice' of the model is on the meta device after it was load"):
        assign(model, stored)

    assign(model.to_empty(device="cpu"), stored)
    assert doubled.weight.tolist() == [3.0, 4.0]


def test_a_module_is_divided_only_if_a_library_has_marked_a_parameter_or_taken_one() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    assert not may_be_divided(model)

    marked: Any = model[1].weight
    for mark in ("ds_id", "_fsdp_flattened"):  # DeepSpeed's, FSDP1's
        setattr(marked, mark, 1)
        assert may_be_divided(model)
        delattr(marked, mark)
    assert not may_be_divided(model)

    parameters: dict[str, Any] = model[0]._parameters
    parameters["weight"] = torch.zeros(2, 2)  # a view of a flat parameter, during a pass of FSDP1
    assert may_be_divided(model)


# Weights that accelerate has offloaded are saved from where they are, and nothing is loaded past them.


class Net(nn.Module):
    """A parameter of its own, a buffer, and two layers of which the second is tied to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(2))
        self.register_buffer("mean", torch.rand(2))
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.layers[1].weight = self.layers[0].weight

    def forward(self, x: Any) -> Any:
        return self.layers(x * self.scale + self.get_buffer("mean"))


def _offload(model: nn.Module, where: str, folder: Path, *, buffers: bool = False) -> None:
    if where == "cpu":
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=buffers)
    else:
        accelerate.disk_offload(model, folder, execution_device=torch.device("cpu"), offload_buffers=buffers)


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_a_module_is_saved_as_if_it_were_not_offloaded(tmp_path: Path, where: str, buffers: bool) -> None:
    model = Net()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    _offload(model, where, tmp_path / "offload", buffers=buffers)
    assert model.scale.is_meta

    hfshard.save_model(model, tmp_path / "saved")
    hfshard.save_state_dict({"x": torch.ones(1)}, tmp_path / "other")

    loaded = hfshard.load_state_dict(tmp_path / "saved")
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    assert model.scale.is_meta, "it stays offloaded"


def test_a_transformers_model_is_saved_by_every_way(tmp_path: Path) -> None:
    model = bert(3)
    accelerate.disk_offload(model, tmp_path / "offload", execution_device=torch.device("cpu"))

    hfshard.save_model(model, tmp_path / "function")
    model.save_pretrained(tmp_path / "mixin")
    model.push_to_hub(tmp_path / "hub")
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, TrainingState(model=model))

    for place in ("function", "mixin", "hub", "run/checkpoint-00000001"):
        assert value_of(Bert.from_pretrained(tmp_path / place)) == 3


def test_loading_into_an_offloaded_module_is_refused(tmp_path: Path) -> None:
    hfshard.save_model(Net(), tmp_path / "saved")
    model: Any = Net()
    x = torch.ones(1, 2)
    before = model(x)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.raises(InvalidArgumentError, match="accelerate has offloaded it, and would keep the old weights"):
        hfshard.load_model(model, tmp_path / "saved")
    assert torch.equal(model(x), before)


def test_what_is_nowhere_is_still_refused(tmp_path: Path) -> None:
    with pytest.raises(UnstorableTensorError, match="on the meta device and has no data"):
        hfshard.save_model(nn.Linear(2, 2, device="meta"), tmp_path)
