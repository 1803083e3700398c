"""A checkpoint's directory and, next to it, the truth: the living model's tensors at the moment of the save."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

from tests.foreign.producers.models import own_name


def checkpoint_of(place: Path) -> Path:
    """Where a producer saves."""
    return place / "checkpoint"


def write_truth(place: Path, tensors: Mapping[str, torch.Tensor], name: str = "truth") -> None:
    """Write what a load must return; of names that share a tensor, each has a copy."""
    copies = {key: tensor.detach().cpu().clone().contiguous() for key, tensor in tensors.items()}
    save_file(copies, place / f"{name}.safetensors")


def read_truth(place: Path, name: str = "truth") -> dict[str, torch.Tensor]:
    """Read what was written for a checkpoint: the "truth", the optimizer's "states", or the model "resumed"."""
    return load_file(place / f"{name}.safetensors")


def gathered(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gather DTensors; every rank must call."""
    return {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()}


def write_optimizer(place: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write an optimizer's state by name, as the ranks have it; every rank must call."""
    own = {}
    for name, parameter in model.named_parameters():
        for slot, value in optimizer.state.get(parameter, {}).items():
            own[f"{own_name(name)}/{slot}"] = value.full_tensor() if isinstance(value, DTensor) else value
    is_cut = not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    parts: list[Any] = [own]
    if is_cut and dist.is_initialized() and dist.get_world_size() > 1:  # FSDP1: each rank has elements of its own
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, own)
    names = {name: None for part in parts for name in part}
    found = {name: [part[name] for part in parts if name in part] for name in names}
    joined = {name: torch.cat(ones) if ones[0].dim() and len(ones) > 1 else ones[0] for name, ones in found.items()}
    if not dist.is_initialized() or dist.get_rank() == 0:
        write_truth(place, joined, "states")
