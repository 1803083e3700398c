"""Names that share memory: find them, choose the stored one, and detect loads that would lose values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from hfshard.tensors.flat_tensor import PartOfTensor
from hfshard.tensors.parameter_names import without_wrappers, wrapped_prefixes
from hfshard.tensors.state_dict import is_dtensor, local_tensor
from hfshard.tensors.stored_tensor import check_initialized, is_torch_tensor_type, storage_id

Place = tuple[nn.Module, str]
"""A module, and the name that it has for one of its parameters or buffers."""


def find_shared_tensors(state_dict: Mapping[str, Any], *, droppable_patterns: Iterable[str] = ()) -> dict[str, str]:
    """Find the names whose tensor is the same as another name's, by storage identity.

    Two names are tied when they view the same bytes in the same way: device, address, dtype, shape and strides (except
    the strides of dimensions of size 1). Other views of one storage, disjoint or overlapping, are separate tensors.
    Empty tensors are never tied. Names of one `PartOfTensor` are tied. Meta tensors and DTensors have no address: those
    of one storage are compared by their offsets in it, so that ranks agree about DTensors, of which one rank may have
    an empty part.

    Args:
        state_dict: FQN -> tensor, any device; not mutated. Values that are not tensors are never tied.
        droppable_patterns: Regular expressions of names that need not be stored when they are tied, such as
            transformers' `_tied_weights_keys`; within a group, a name that matches none of them is preferred.

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
    """Find the few names to compare further: their tensors begin at the same address as another one. In order."""
    first: dict[int | tuple[int, int], str] = {}
    shared: set[str] = set()
    for name, tensor in state_dict.items():
        if isinstance(tensor, PartOfTensor) or (isinstance(tensor, Tensor) and has_memory(tensor)):
            other = first.setdefault(_address(tensor), name)
            if other is not name:
                shared.update((other, name))
    return [name for name in state_dict if name in shared]


def has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor has elements at an address, or would have them if it were not a meta tensor."""
    return not (tensor.is_nested or tensor.layout != torch.strided) and tensor.numel() > 0


def _address(tensor: Tensor | PartOfTensor) -> int | tuple[int, int]:
    if isinstance(tensor, PartOfTensor):
        return id(tensor), 0
    if is_torch_tensor_type(tensor) and not tensor.is_meta:
        return tensor.data_ptr()
    if is_dtensor(tensor):
        return _storage_and_offset(local_tensor(tensor))
    return _storage_and_offset(tensor) if tensor.is_meta else tensor.data_ptr()


def _storage_and_offset(tensor: Tensor) -> tuple[int, int]:
    return storage_id(tensor), int(tensor.storage_offset())


def _identity(tensor: Tensor | PartOfTensor) -> tuple[Any, ...]:
    if isinstance(tensor, PartOfTensor):
        return (_address(tensor),)
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
    """Make two names of a model share the tensor of one of them.

    If one is a parameter and the other a buffer, each stays what it is, and they share their memory: torch would turn
    the buffer into a parameter when it is assigned one, and rejects a buffer in place of a parameter.

    Args:
        target: The name that gets the other's tensor, of the same shape; changed.
        origin: The name that has it; not changed.
    """
    old, tensor = getattr(*target), getattr(*origin)
    if isinstance(old, nn.Parameter) == isinstance(tensor, nn.Parameter):
        setattr(*target, tensor)
    elif isinstance(old, nn.Parameter):
        old.data = tensor
    else:
        setattr(*target, tensor.detach())


# Names that share memory in a model: values that would be lost if they were assigned different tensors.


_ALIGNMENT: Final = 16
"""Bytes of the largest element: a copy of part of a storage begins at a multiple, so that any dtype can view it."""


def find_merged_names(tensors: Mapping[str, Any], model_state: Mapping[str, Any]) -> tuple[str, str] | None:
    """Find two names that share memory in the model, at least partly, and for which the tensors differ.

    Args:
        tensors: The tensors to assign, by the model's names.
        model_state: The model's own tensors. Neither is changed.

    Returns:
        The name whose tensor would be lost, and the one that would be kept in its place; None if all fit.
    """
    given = {
        name: tensor
        for name, tensor in tensors.items()
        if isinstance(tensor, torch.Tensor) and tensor.shape == getattr(model_state.get(name), "shape", None)
    }
    tied = find_shared_tensors(model_state)
    for name, other in tied.items():
        if name in given and other in given and not _same(given[name], given[other], model_state[name].dtype):
            return name, other
    separate = {name: model_state[name] for name in given if name not in tied}
    return next((pair for group in _overlapping(separate) if (pair := _lost(group, given)) is not None), None)


def names_to_compare(tensors: Mapping[str, Any], model_state: Mapping[str, Any]) -> set[str]:
    """Find the names whose values `find_merged_names` compares: they share memory in the model, and differ as objects.

    Args:
        tensors: The tensors to assign, by the model's names; they need not have values yet.
        model_state: The model's own tensors.
    """
    tied = find_shared_tensors(model_state)
    separate = {name: model_state[name] for name in tensors if name in model_state and name not in tied}
    groups = [[name, other] for name, other in tied.items() if name in tensors and other in tensors]
    groups += [list(group) for group in _overlapping(separate)]
    return {name for group in groups if len({id(tensors[name]) for name in group}) > 1 for name in group}


def find_expanded_names(model: nn.Module) -> list[str]:
    """Find the names of expanded tensors: some of their elements are one in memory, and torch cannot assign to them.

    Those of modules with their own `_load_from_state_dict` are left out: what it assigns to is not known.
    """
    found = []
    wrapped = wrapped_prefixes(model)
    for path, module in model.named_modules():
        if type(module)._load_from_state_dict is nn.Module._load_from_state_dict:
            own = [*module.named_parameters(path, recurse=False), *module.named_buffers(path, recurse=False)]
            found += [without_wrappers(name, wrapped) for name, tensor in own if _is_expanded(tensor)]
    return found


def _is_expanded(tensor: torch.Tensor) -> bool:
    if not has_memory(tensor) or tensor.is_meta:
        return False
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _same(first: torch.Tensor, second: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether two tensors, or this rank's parts, are the same, bit for bit, when they are cast to a dtype."""
    if first is second:
        return True
    parts = (local_tensor(one) if is_dtensor(one) else one for one in (first, second))
    return torch.equal(*(_bytes_of(part.to(dtype)) for part in parts))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).cpu().view(torch.uint8)


def _overlapping(tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Group the tensors whose memory ranges overlap. Parts of tensors are left out."""
    by_storage: dict[tuple[torch.device, int], dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, PartOfTensor) or is_dtensor(tensor):  # its address is 0, or an offset within its storage
            continue
        if has_memory(tensor) and not tensor.is_meta and tensor.data_ptr():
            by_storage.setdefault((tensor.device, tensor.untyped_storage().data_ptr()), {})[name] = tensor
    for views in by_storage.values():
        if len(views) > 1:
            yield from _groups(views)


def _groups(views: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    group: dict[str, torch.Tensor] = {}
    end = 0
    for name in sorted(views, key=lambda name: views[name].data_ptr()):
        if group and views[name].data_ptr() >= end:
            if len(group) > 1:
                yield group
            group = {}
        group[name] = views[name]
        end = max(end, _end(views[name]))
    if len(group) > 1:
        yield group


def _end(tensor: torch.Tensor) -> int:
    steps = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (sum(steps) + 1) * tensor.element_size()


def _lost(group: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]) -> tuple[str, str] | None:
    """Assign the tensors to a copy of the memory that a group shares, and find one that a later one overwrote."""
    start = min(tensor.data_ptr() for tensor in group.values()) // _ALIGNMENT * _ALIGNMENT
    memory = torch.zeros(max(map(_end, group.values())) - start + _ALIGNMENT, dtype=torch.uint8)
    copies = {}
    for name, tensor in group.items():
        size = tensor.element_size()
        offset, whole = (tensor.data_ptr() - start) // size, memory[: len(memory) // size * size]
        copies[name] = whole.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), offset)
        copies[name].copy_(given[name])
    lost = [name for name, copy in copies.items() if not _same(copy, given[name], copy.dtype)]
    return (lost[0], next(name for name in reversed(copies) if name != lost[0])) if lost else None
