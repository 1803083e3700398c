"""torch's DTensors, of which each rank has a part, and the ShardedTensors before them: which values are some."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from hfshard.errors import UnstorableTensorError

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


def is_sharded_tensor(value: object) -> bool:
    """Whether it is a ShardedTensor of FSDP1, which `fully_shard` has replaced. The class is not public."""
    return type(value).__name__ == "ShardedTensor"


def refuse_sharded_tensors(tensors: Mapping[str, Any]) -> None:
    """Refuse to store ShardedTensors.

    Raises:
        UnstorableTensorError: There is one.
    """
    name = next((name for name, value in tensors.items() if is_sharded_tensor(value)), None)
    if name is not None:
        raise UnstorableTensorError(
            f"Can't store {name!r}: it is a ShardedTensor of FSDP1. Shard the model by fully_shard instead, or gather "
            "it first, on every rank: torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True)).",
            fqn=name,
        )
