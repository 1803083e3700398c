"""Walks through a value of nested containers that came out of a file: in any depth, and in circles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hfshard.tensors.stored_tensor import is_plain_type


def iter_leaves(value: Any) -> Iterator[Any]:
    """Find all that nested dicts, lists, tuples and sets hold, each container once; names of dicts too.

    Args:
        value: Anything that `torch.load(weights_only=True)` returns. It may contain itself.
    """
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, Mapping | list | tuple | set):
            yield one
        elif id(one) not in seen:
            seen.add(id(one))
            waiting.extend(one)
            if isinstance(one, Mapping):
                waiting.extend(one.values())


def iter_storages(value: Any) -> Iterator[torch.UntypedStorage]:
    """Find the memory of every tensor in a nested value, also of the parts of sparse ones.

    Tensors without memory, on the device meta, have none.

    Raises:
        TypeError: There is a tensor of a kind whose memory can't be told, or memory that is no tensor's; it names it.
    """
    for leaf in iter_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield from (part.untyped_storage() for part in _dense_parts(leaf) if part.device.type != "meta")
        elif isinstance(leaf, torch.UntypedStorage | torch.TypedStorage):
            raise TypeError(type(leaf).__name__)


def _dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if not is_plain_type(tensor) or tensor.is_nested:
        raise TypeError(type(tensor).__name__ if not tensor.is_nested else "nested tensor")
    if tensor.layout == torch.strided:
        return (tensor,)
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    raise TypeError(f"tensor of the layout {tensor.layout}")
