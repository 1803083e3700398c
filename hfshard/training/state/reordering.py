"""State that depends on the order of parameters or groups: found, compared, and put into the current order."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hfshard.errors import StateDictMismatchError
from hfshard.pickles.plain_values import NotStored
from hfshard.training.state.nested import ObjectState, entries_of, find_in


def is_sequence(value: Any) -> bool:
    """Return whether entries have positions: a list, a tuple, a deque, or a dict with the keys 0, 1, 2 and so on."""
    if isinstance(value, dict):
        return len(value) > 0 and not isinstance(value, Counter) and set(value) == set(range(len(value)))
    return isinstance(value, list | tuple | deque)


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of a tensor or an array, or the length of a sequence; empty if it has neither."""
    return (len(value),) if is_sequence(value) else tuple(getattr(value, "shape", ()))


def get_entry(value: Any, name: Any) -> Any:
    """Return an entry of a value; None if it has none."""
    if isinstance(value, dict):
        return value.get(name)
    is_there = isinstance(value, list | tuple | deque) and isinstance(name, int) and name < len(value)
    return value[name] if is_there else None


def with_items(value: Any, change: Callable[[Any, Any], Any]) -> Any:
    """Return a container of the same kind with changed entries; any other value unchanged."""
    if isinstance(value, tuple):
        return type(value)([change(number, item) for number, item in enumerate(value)])
    if not isinstance(value, list | deque | dict):
        return value
    changed = copy.copy(value)
    for name, item in entries_of(value):
        changed[name] = change(name, item)
    return changed


def moved(value: Any, order: Sequence[int], axis: int) -> Any:
    """Return a value with its entries in another order."""
    if isinstance(value, torch.Tensor):
        return value.index_select(axis, torch.tensor(order, device=value.device))
    if hasattr(value, "shape"):
        return value.take(order, axis)
    return with_items(value, lambda number, item: value[order[number]])


def is_same(one: Any, other: Any) -> bool:
    """Return whether a saved value equals another, bit for bit; one not stored (a function) equals any such object."""
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


# Optimizers of an object, and a digest of the orders that positions in its state may refer to.


Names = Mapping[int, str]
"""id of a parameter -> its name."""

_MOST_ENTRIES: Final = 1000
"""Lists that are longer than this contain no optimizers, but data (a replay buffer), and are not searched."""

_DIGEST_CHARACTERS: Final = 32
"""128 bits of an order's sha256."""


def held_optimizers(part: object) -> list[Optimizer]:
    """Find the optimizers in an object: in its attributes, in lists and dicts, or in its schedulers.

    Optimizers that Accelerate has wrapped are returned unwrapped.
    """
    found: dict[int, Optimizer] = {}
    seen: set[int] = set()

    def look(value: object) -> None:
        if isinstance(value, Optimizer):
            inner = vars(value).get("optimizer")
            one = inner if isinstance(inner, Optimizer) else value
            found[id(one)] = one
        elif id(value) not in seen:
            seen.add(id(value))
            for item in _held(value, part):
                look(item)

    look(part)
    return list(found.values())


def _held(value: object, part: object) -> Iterable[object]:
    if isinstance(value, list | tuple | dict):
        items = list(value.values()) if isinstance(value, dict) else value
        return items if len(items) <= _MOST_ENTRIES else ()
    is_looked_into = value is part or isinstance(value, LRScheduler | ReduceLROnPlateau)
    return list(vars(value).values()) if is_looked_into and hasattr(value, "__dict__") else ()


def order_digest(part: object, names: Names, modules: Mapping[str, nn.Module] | None = None) -> str | None:
    """Digest the orders that positions in an object's state may refer to.

    Args:
        part: The object; the groups of its optimizers count.
        names: The names of parameters.
        modules: Their parameters count, too. Without them it is the state of a scheduler, for which the order within a
            group makes no difference.

    Returns:
        Hexadecimal digits; None if there are neither optimizers nor modules.
    """
    groups = [
        [[names.get(id(one), str(list(one.shape))) for one in group["params"]] for group in optimizer.param_groups]
        for optimizer in held_optimizers(part)
    ]
    if modules is None:
        groups = [[sorted(group) for group in one] for one in groups]
    orders = [[names[id(one)] for one in modules[name].parameters()] for name in sorted(modules)] if modules else []
    if not groups and not orders:
        return None
    return hashlib.sha256(json.dumps([groups, orders]).encode()).hexdigest()[:_DIGEST_CHARACTERS]


# Search for state that depends on the order of parameters: vectors and lists of all of them.


def is_per_parameter(parameters: Collection[torch.Tensor]) -> Callable[[Any], bool]:
    """Build a test of whether a value may have an entry for each of some parameters, or for each of their elements.

    Such a value is a list (or tuple, or dict of positions) of tensors that have the shapes of parameters, or one vector
    of all of them.
    """
    shapes = {tuple(one.shape) for one in parameters}
    trained = [one for one in parameters if one.requires_grad]
    totals = {sum(one.numel() for one in some) for some in (parameters, trained) if len(some) > 1}

    def has_shape(value: Any) -> bool:
        return find_in(value, lambda one: hasattr(one, "shape") and tuple(one.shape) in shapes) is not None

    def is_one_each(value: Any) -> bool:
        if hasattr(value, "shape"):
            return len(value.shape) == 1 and value.shape[0] in totals
        if not (is_sequence(value) or _has_numbers(value)) or len(value) < 2:
            return False
        return all(has_shape(item) for _, item in entries_of(value))

    return is_one_each


def _has_numbers(value: Any) -> bool:
    """Return whether a dict has numbers as keys, as in an optimizer's state_dict: some parameters may have no state."""
    return isinstance(value, dict) and all(type(key) is int for key in value)


def find_ordered_state(saved: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]) -> str | None:
    """Find state that depends on the order of an optimizer's parameters or groups, and return its place.

    Args:
        saved: What `encode_optimizer` returned, decoded.
        parameters: All of the optimizer's parameters, by name.
    """
    groups = [[parameters[name] for name in group["params"]] for group in saved["groups"]]
    counts = {len(parameters), len(groups), *map(len, groups)} - {0, 1}
    is_shared = len(saved["state"]) == 1 < len(parameters)  # the first parameter's state is for all, as in LBFGS

    def counts_entries(value: Any) -> bool:
        return not counts.isdisjoint(shape_of(value))

    is_one_of = [is_per_parameter(some) for some in (list(parameters.values()), *groups)]

    def is_of_all(value: Any) -> bool:
        return counts_entries(value) or any(is_one_each(value) for is_one_each in is_one_of)

    for name, slots in saved["state"].items():
        own = parameters[name]

        def is_of_others(value: Any, own: torch.Tensor = own) -> bool:
            shape = getattr(value, "shape", None)
            if is_shared and shape != own.shape and counts_entries(value):
                return True
            if shape is None or all(size == 1 or size in own.shape for size in shape):
                return False  # its own, or built from its dimensions: Adafactor's rows, Shampoo's matrices
            return int(math.prod(shape)) > (2 * own.numel() if own.is_complex() else own.numel())

        if (place := find_in(slots, is_of_others, f"state.{name}")) is not None:
            return place
    for part in ("others", "more"):
        if (place := find_in(saved[part], is_of_all, part)) is not None:
            return place
    return None


# Reordering: lists with an entry for each group of an optimizer are put into the groups' current order.


PER_GROUP: Final = frozenset(
    {"base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums", "_init_lrs"}
)
"""Lists in the schedulers of torch and transformers that have one entry for each group of the optimizer."""

_NOT_PER_GROUP: Final = frozenset({"_milestones", "_schedule_phases", "_streaming_avg"})
"""Lists that may have as many entries by coincidence (SequentialLR, OneCycleLR, transformers' GreedyLR)."""

_SCHEDULERS: Final = "_schedulers"
"""The schedulers of a chained or sequential one; each has its own such lists."""


@dataclass(frozen=True, slots=True)
class Reordering:
    """A change of order for an object's lists that have one entry for each owner, such as an optimizer's group."""

    part: str
    """The object's name in the training state, for messages."""
    owners: str
    """The owners of one entry each, for messages: "groups of 'optimizer'"."""
    path: str
    """The checkpoint's path."""
    positions: tuple[int, ...] | None
    """The old position of each current owner; None if they are not the same owners."""
    counts: frozenset[int]
    """The numbers of owners, now and when saved."""
    known: frozenset[str] = PER_GROUP
    """Lists that are known to have one entry for each owner."""

    def apply(self, saved: Any, fresh: Any, at: str = "", key: object = None) -> Any:
        """Return a saved value with its entries in the current order.

        Args:
            saved: Any value. Its lists, tuples, dicts of numbers, tensors and arrays with one entry for each owner are
                reordered if it is certain that they are such: by their key, or because the object that was built has
                the same entries in the new order.
            fresh: The value in the object that was built.
            at: Its place, for messages.
            key: The last part of that place.

        Raises:
            StateDictMismatchError: A value has as many entries as there are owners, and it is unknown whether each
                owner has one.
        """
        if isinstance(saved, ObjectState):
            attributes = self.apply(saved.attributes, getattr(fresh, "__dict__", fresh), at, key)
            return ObjectState(saved.class_name, attributes)
        if key in _NOT_PER_GROUP or isinstance(saved, Counter | str | bytes):  # MultiStepLR.milestones is a Counter
            return saved
        if key in self.known and isinstance(saved, list | tuple):
            return self._known(saved, at)
        for axis in self._axes(saved) if key != _SCHEDULERS else ():
            in_order = moved(saved, self._order(saved, axis), axis)
            if is_same(in_order, saved):
                continue
            if self.positions is not None and is_same(in_order, fresh):
                return in_order
            raise self._unknown(at, shape_of(saved)[axis])
        return with_items(saved, lambda name, item: self.apply(item, get_entry(fresh, name), f"{at}.{name}", name))

    def _known(self, saved: Any, at: str) -> Any:
        if self.positions is not None and len(saved) == len(self.positions):
            return moved(saved, self.positions, 0)
        is_any_order = len(saved) in self.counts and is_same(moved(saved, self._order(saved, 0), 0), saved)
        if is_any_order and self.positions is None and max(self.counts) == min(self.counts):
            return saved
        raise self._unknown(at, len(saved))

    def _order(self, value: Any, axis: int) -> Sequence[int]:
        """Return the positions; if unknown, positions that change every value whose entries are not all the same."""
        if self.positions is not None:
            return self.positions
        return [*range(1, shape_of(value)[axis]), 0]

    def _axes(self, value: Any) -> list[int]:
        """Return the dimensions of a value that have one entry for each owner."""
        return [axis for axis, size in enumerate(shape_of(value)) if size > 1 and size in self.counts]

    def _unknown(self, at: str, size: int) -> StateDictMismatchError:
        place = at.removeprefix(".")
        how = "are other ones" if self.positions is None else "are in another order"
        return StateDictMismatchError(
            f"'{place}' of '{self.part}' has {size} entries in the checkpoint '{self.path}', perhaps one for each of "
            f"the {self.owners}, which {how} now: the entries cannot be matched. Build them as in the saved run, in "
            f"the same order, or pass strict=False to leave '{self.part}' as built.",
            path=self.path,
        )


def matched_positions(now: Sequence[Collection[str]], before: Sequence[Collection[str]]) -> tuple[int, ...] | None:
    """Find each group of parameters among the old ones: the position of the one with the same names.

    Returns:
        The positions; None unless they are the same groups, in any order.

    Example:
        assert matched_positions([["b"], ["a", "c"]], [["c", "a"], ["b"]]) == (1, 0)
    """
    left: dict[frozenset[str], deque[int]] = {}
    for number, group in enumerate(before):
        left.setdefault(frozenset(group), deque()).append(number)
    found = [numbers.popleft() for group in now if (numbers := left.get(frozenset(group)))]
    return tuple(found) if len(found) == len(now) == len(before) else None


def related_positions(now: Sequence[Collection[str]], before: Sequence[Collection[str]]) -> tuple[int, ...] | None:
    """Find each group among the old ones, like `matched_positions`, even if some have more or fewer parameters.

    Returns:
        The positions; None unless each group has parameters of one old group, and no two of the same.

    Example:
        assert related_positions([["b"], ["a", "new"]], [["a", "gone"], ["b"]]) == (1, 0)
    """
    if (exact := matched_positions(now, before)) is not None:
        return exact
    places = {name: number for number, group in enumerate(before) for name in group}
    found = [{places[name] for name in group if name in places} for group in now]
    positions = tuple(number for numbers in found for number in numbers)
    is_one_each = len(now) == len(before) == len(positions) == len(set(positions)) and all(found)
    return positions if is_one_each else None
