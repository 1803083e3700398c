"""Ranks of a gloo group as Accelerate and Trainer see them, on a machine without GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Never
from unittest.mock import patch

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType


@contextmanager
def as_launched(rank: int, world_size: int) -> Iterator[None]:
    """What `torchrun` tells a rank, for Accelerate to find; afterwards, all that Accelerate keeps is gone."""
    launched = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29500,  # nobody listens: the group is there already
    }
    with patch.dict(os.environ, {name: str(value) for name, value in launched.items()}):
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


def count_as_gpus() -> None:
    """Let Accelerate do on the CPU what it does on GPUs, by the same code.

    Otherwise it takes FSDP2 for DistributedDataParallel there, and refuses tensor parallel models.
    """
    state: dict[str, Any] = PartialState(cpu=True)._shared_state
    assert state["device"].type == "cpu" and state["distributed_type"] == DistributedType.MULTI_CPU
    state["distributed_type"] = DistributedType.MULTI_GPU


def refuse_whole_state(*args: object, **kwargs: object) -> Never:
    """Takes the place of `Accelerator.get_state_dict`, which gathers the whole model on each rank."""
    raise AssertionError("a whole state dict was asked for")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
