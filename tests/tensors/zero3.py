"""Modules as DeepSpeed ZeRO-3 leaves them, without DeepSpeed; and the calls of hfshard that read or fill a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import hfshard
from hfshard.training import CheckpointManager, TrainingState

Calls = dict[str, Callable[[], object]]


class ZeroParamStatus(Enum):
    """As DeepSpeed's."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class Net(hfshard.ShardedModelMixin, nn.Module):
    """Two layers and a buffer; three of the four parameters are too large to be kept whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.second = nn.Linear(3, 1)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x))


class OwnSave(Net):
    """A class with a `_save_pretrained` of its own."""

    def _save_pretrained(self, save_directory: Path) -> None:
        super()._save_pretrained(save_directory)


def partition(model: nn.Module, most_whole: int = 1) -> None:
    """Take the data of each parameter away as DeepSpeed does, but for those of at most `most_whole` elements."""
    for number, parameter in enumerate(model.parameters()):
        given: Any = parameter
        given.ds_id = number
        given.ds_shape = parameter.shape
        given.ds_numel = parameter.numel()
        given.ds_persist = parameter.numel() <= most_whole
        given.ds_tensor = parameter.detach().flatten().clone()
        given.ds_status = ZeroParamStatus.AVAILABLE
        if not given.ds_persist:
            _free(given)


@contextmanager
def gathered(model: nn.Module, modifier_rank: int | None = None) -> Iterator[None]:
    """Give the parameters their data for the block, as `deepspeed.zero.GatheredParameters(model.parameters())` does."""
    parameters: list[Any] = list(model.parameters())
    for parameter in parameters:
        parameter.data = parameter.ds_tensor.view(parameter.ds_shape).clone()
        parameter.ds_status = ZeroParamStatus.AVAILABLE
    try:
        yield
    finally:
        for parameter in parameters:
            if modifier_rank is not None:
                parameter.ds_tensor = parameter.detach().flatten().clone()
            _free(parameter)


def _free(parameter: Any) -> None:
    parameter.data = torch.empty(0, dtype=parameter.dtype)
    parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE


def saves(model: Any, out: Path) -> Calls:
    """Save a module."""
    return {
        "save_model": lambda: hfshard.save_model(model, out),
        "save_model of a wrapper": lambda: hfshard.save_model(nn.DataParallel(model), out),
        "save_model, collective": lambda: hfshard.save_model(model, out, collective=True),
        "save_pretrained": lambda: model.save_pretrained(out),
        "push_to_hub": lambda: model.push_to_hub(out / "hub"),
        "save_state_dict, keep_vars": lambda: hfshard.save_state_dict(model.state_dict(keep_vars=True), out),
    }


def saves_of_copies(model: nn.Module, out: Path) -> Calls:
    """Save what `state_dict()` returns, whose tensors have none of DeepSpeed's attributes."""
    writer = hfshard.distributed.StorageWriter(out)
    whole = model.state_dict()
    clones = {name: tensor.clone() for name, tensor in whole.items()}
    dcp_save: Any = dcp.save  # type: ignore[attr-defined]
    return {
        "save_state_dict": lambda: hfshard.save_state_dict(whole, out),
        "save_model with a state_dict": lambda: hfshard.save_model(model, out, state_dict=whole),
        "clones": lambda: hfshard.save_state_dict(clones, out),
        "renamed": lambda: hfshard.save_state_dict({f"{name}_": tensor for name, tensor in whole.items()}, out),
        "with a prefix": lambda: hfshard.save_state_dict({f"net.{name}": one for name, one in clones.items()}, out),
        "of a child": lambda: hfshard.save_state_dict(
            {name: tensor.clone() for name, tensor in model.get_submodule("first").state_dict().items()}, out
        ),
        "dcp.save": lambda: dcp_save(whole, storage_writer=writer, no_dist=True),
        "dcp.save, nested": lambda: dcp_save({"model": clones}, storage_writer=writer, no_dist=True),
    }


def loads(model: nn.Module, saved: Path) -> Calls:
    """Load into a module."""
    return {
        "load_model": lambda: hfshard.load_model(model, saved),
        "load_model of a wrapper": lambda: hfshard.load_model(nn.DataParallel(model), saved),
        "load_model, not strict": lambda: hfshard.load_model(model, saved, strict=False),
        "load_state_dict, like": lambda: hfshard.load_state_dict(saved, like=model.state_dict(keep_vars=True)),
    }


def saves_of_runs(model: nn.Module, out: Path) -> Calls:
    """Save a run."""
    manager = CheckpointManager(out)
    return {
        "save": lambda: manager.save(1, TrainingState(model=model)),
        "save in the background": lambda: manager.save(1, TrainingState(model=model), blocking=False),
        "save of another part": lambda: manager.save(1, TrainingState(teacher=model)),
    }


def restores(model: nn.Module, run: Path, old_file: Path) -> Calls:
    """Restore a run, which `run` holds, or a file of torch.save."""
    manager = CheckpointManager(run)
    return {
        "restore": lambda: manager.restore(TrainingState(model=model)),
        "restore, not strict": lambda: manager.restore(TrainingState(model=model), strict=False),
        "restore_latest": lambda: manager.restore_latest(TrainingState(model=model)),
        "restore of a file": lambda: manager.restore(TrainingState(model=model), old_file),
    }
