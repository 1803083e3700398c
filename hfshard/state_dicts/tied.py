"""Names that share one tensor in memory, and the one name that is stored for them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hfshard.state_dicts.dtensors import is_dtensor, local_tensor
from hfshard.storage.tensors.tensor_bytes import check_initialized, is_plain_type

Place = tuple[nn.Module, str]
"""A module, and the name that it has for one of its parameters or buffers."""


def find_shared_tensors(state_dict: Mapping[str, Any], *, droppable_patterns: Iterable[str] = ()) -> dict[str, str]:
    """Find the names that are the same tensor as another name, by storage identity.

    Two names are tied when they view the same bytes in the same way: device, address, dtype, shape and strides (except
    the strides of dimensions of size 1). Other views of one storage, disjoint or overlapping, are separate tensors.
    Empty tensors are never tied. Meta tensors and DTensors have no address: those of one storage are compared by their
    offsets in it. So ranks agree about DTensors, of which one rank may have an empty part.

    Args:
        state_dict: FQN -> tensor, any device; not mutated. Values that are not tensors are never tied.
        droppable_patterns: Regular expressions of names that need not be stored when they are tied, as transformers'
            `_tied_weights_keys`; of a group, names that match none of them are kept first.

    Returns:
        Tied name -> the name that is stored, in state dict order.

    Source: the choice of name is that of transformers' `remove_tied_weights_from_state_dict` (the last of the sorted
    names when all match a pattern, else the first that matches none) and huggingface_hub's (the first sorted name).
    """
    check_initialized(state_dict)
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name in _sharing_an_address(state_dict):
        groups.setdefault(_identity(state_dict[name]), []).append(name)
    patterns = [re.compile(pattern) for pattern in droppable_patterns]
    kept_for: dict[str, str] = {}
    for names in groups.values():
        if len(names) > 1:
            kept = _kept_name(sorted(names), patterns)
            kept_for.update((name, kept) for name in names if name != kept)
    return {name: kept_for[name] for name in state_dict if name in kept_for}


def _sharing_an_address(state_dict: Mapping[str, Any]) -> list[str]:
    """The names whose tensors begin at the same address as another one, in order: the few that need a closer look."""
    first: dict[int | tuple[int, int], str] = {}
    shared: set[str] = set()
    for name, tensor in state_dict.items():
        if isinstance(tensor, Tensor) and has_memory(tensor):
            other = first.setdefault(_address(tensor), name)
            if other is not name:
                shared.update((other, name))
    return [name for name in state_dict if name in shared]


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor has elements that lie at an address, or would if it were not a meta tensor."""
    return not (tensor.is_nested or tensor.layout != torch.strided) and tensor.numel() > 0


def _address(tensor: Tensor) -> int | tuple[int, int]:
    if is_plain_type(tensor) and not tensor.is_meta:
        return tensor.data_ptr()
    if is_dtensor(tensor):
        return _storage_and_offset(local_tensor(tensor))
    return _storage_and_offset(tensor) if tensor.is_meta else tensor.data_ptr()


def _storage_and_offset(tensor: Tensor) -> tuple[int, int]:
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())  # a storage's only identity without an address


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    return (
        tensor.device,
        _address(tensor),
        tensor.dtype,
        tuple(tensor.shape),
        tuple(stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1),
        tensor.is_conj(),
        tensor.is_neg(),
        (tensor.device_mesh, tensor.placements) if is_dtensor(tensor) else None,
    )


def _kept_name(sorted_names: list[str], patterns: list[re.Pattern[str]]) -> str:
    for name in sorted_names:
        if not any(pattern.search(name) for pattern in patterns):
            return name
    return sorted_names[-1]


def share_tensor(target: Place, origin: Place) -> None:
    """Let two names of a model share the tensor that one of them has.

    Where one is a parameter and the other a buffer, each stays what it is, and they share their memory: torch would
    make a parameter of the buffer that is given one, and refuses a buffer in the place of a parameter.

    Args:
        target: What gets the other's tensor, of the same shape; changed.
        origin: What has it; not changed.
    """
    old, tensor = getattr(*target), getattr(*origin)
    if isinstance(old, nn.Parameter) == isinstance(tensor, nn.Parameter):
        setattr(*target, tensor)
    elif isinstance(old, nn.Parameter):
        old.data = tensor
    else:
        setattr(*target, tensor.detach())
