"""Names of a model that have memory in common: what would be lost if they were given different tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

from hfshard.state_dicts.dtensors import is_dtensor
from hfshard.state_dicts.tied import find_shared_tensors, has_memory
from hfshard.state_dicts.wrappers import without_wrappers, wrapped_prefixes

_ALIGNMENT: Final = 16
"""Bytes of the largest element: a copy of a part of a storage begins at a multiple, so that any dtype can view it."""


def find_merged_names(tensors: Mapping[str, Any], model_state: Mapping[str, Any]) -> tuple[str, str] | None:
    """Find two names whose memory in the model is the same, at least in part, and for which the tensors differ.

    Args:
        tensors: What is to be assigned, by the model's names.
        model_state: The model's own tensors. Neither is changed.

    Returns:
        The name whose tensor would be lost, and the one that would be kept in its place; None where all fit.
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
        tensors: As for `find_merged_names`; they may have no values yet.
        model_state: The model's own tensors.
    """
    tied = find_shared_tensors(model_state)
    separate = {name: model_state[name] for name in tensors if name in model_state and name not in tied}
    groups = [[name, other] for name, other in tied.items() if name in tensors and other in tensors]
    groups += [list(group) for group in _overlapping(separate)]
    return {name for group in groups if len({id(tensors[name]) for name in group}) > 1 for name in group}


def find_expanded_names(model: nn.Module) -> list[str]:
    """Find the names of expanded tensors: several of their elements are one in memory, and torch can't assign to them.

    Those of modules with a `_load_from_state_dict` of their own are left out: what it assigns to is not known.
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
    """Whether two tensors are the same, bit for bit, when they are cast to a dtype."""
    if first is second:
        return True
    return torch.equal(*(_bytes_of(tensor.to(dtype)) for tensor in (first, second)))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).cpu().view(torch.uint8)


def _overlapping(tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Group the tensors whose stretches of memory overlap. DTensors are left out."""
    by_storage: dict[tuple[torch.device, int], dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if is_dtensor(tensor):  # its address is 0, or an offset where this rank's part is a view
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
    """The address after the tensor's last element."""
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
