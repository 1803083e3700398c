"""A checkpoint's directory and, next to it, the truth: the living model's tensors at the moment of the save."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor


def checkpoint_of(place: Path) -> Path:
    """Where a producer saves."""
    return place / "checkpoint"


def write_truth(place: Path, tensors: Mapping[str, torch.Tensor], name: str = "truth") -> None:
    """Write what a load must return; of names that share a tensor, each has a copy."""
    copies = {key: tensor.detach().cpu().clone().contiguous() for key, tensor in tensors.items()}
    save_file(copies, place / f"{name}.safetensors")


def read_truth(place: Path, name: str = "truth") -> dict[str, torch.Tensor]:
    """Read what was written for a checkpoint: the "truth", or the optimizer's "states"."""
    return load_file(place / f"{name}.safetensors")


def gathered(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gather DTensors; every rank must call."""
    return {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()}


def assert_same(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Compare names, dtypes, shapes and every bit."""
    assert sorted(actual) == sorted(expected)
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert actual[name].shape == tensor.shape, name
        assert _bytes(actual[name]).equal(_bytes(tensor)), name


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
