"""torch's DTensors, of which each rank has a part: which values are some, and the part that this rank has."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether it is a DTensor. Where torch's module of them was never imported, which takes a while, nothing is."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """This rank's part: not a copy, and empty where it has none. What a collective still fills is waited for."""
    with torch.no_grad():
        local = tensor.to_local()
    wait = getattr(local, "wait", None)
    return (local if wait is None else wait()).detach()
