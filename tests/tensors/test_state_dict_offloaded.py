"""Weights that accelerate has offloaded are saved from where they are, and nothing is loaded past them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import nn

import hfshard
from hfshard.errors import InvalidArgumentError, UnstorableTensorError
from hfshard.training import CheckpointManager, TrainingState
from tests.helpers.tiny_bert import Bert, bert, value_of


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
