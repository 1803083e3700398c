"""The entries of lists, tuples, dicts of positions, tensors and arrays: counted, compared and put in order."""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hfshard.training.parts.nested_types import NotStored, ObjectState


def is_sequence(value: Any) -> bool:
    """Whether a value's entries have positions: a list, a tuple, a deque, or a dict with the keys 0, 1, 2 and so on."""
    if isinstance(value, dict):
        return len(value) > 0 and not isinstance(value, Counter) and set(value) == set(range(len(value)))
    return isinstance(value, list | tuple | deque)


def entries_of(value: Any) -> Iterator[tuple[Any, Any]]:
    """The entries of a value with their keys or positions; none of a value that is no container."""
    if isinstance(value, ObjectState):
        value = value.attributes
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list | tuple | deque):
        yield from enumerate(value)


def entry_of(value: Any, name: Any) -> Any:
    """An entry of a value; None where it has none."""
    if isinstance(value, dict):
        return value.get(name)
    is_there = isinstance(value, list | tuple | deque) and isinstance(name, int) and name < len(value)
    return value[name] if is_there else None


def with_items(value: Any, change: Callable[[Any, Any], Any]) -> Any:
    """A container of the same kind with changed entries; any other value as it is."""
    if isinstance(value, tuple):
        return type(value)([change(number, item) for number, item in enumerate(value)])
    if not isinstance(value, list | deque | dict):
        return value
    changed = copy.copy(value)
    for name, item in entries_of(value):
        changed[name] = change(name, item)
    return changed


def moved(value: Any, order: Sequence[int], axis: int) -> Any:
    """A value with its entries in another order."""
    if isinstance(value, torch.Tensor):
        return value.index_select(axis, torch.tensor(order, device=value.device))
    if hasattr(value, "shape"):
        return value.take(order, axis)
    return with_items(value, lambda number, item: value[order[number]])


def is_same(one: Any, other: Any) -> bool:
    """Whether a saved value equals another, bit for bit; what was not stored (a function) equals any such object."""
    if isinstance(one, NotStored):
        return isinstance(other, NotStored) or callable(other) or hasattr(other, "__dict__")
    if isinstance(one, ObjectState):
        attributes = other.attributes if isinstance(other, ObjectState) else getattr(other, "__dict__", None)
        return is_same(one.attributes, attributes)
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
    if hasattr(one, "shape"):
        return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(item, other[name]) for name, item in one.items())
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other or (one != one and other != other))  # NaN
