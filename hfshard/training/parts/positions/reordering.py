"""Puts lists with an entry for each group of an optimizer into the order in which the groups stand now."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hfshard.errors import StateDictMismatchError
from hfshard.training.parts.nested_types import ObjectState
from hfshard.training.parts.positions.entries import entry_of, is_same, is_sequence, moved, with_items

PER_GROUP: Final = frozenset(
    {"base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums", "_init_lrs"}
)
"""Lists in the schedulers of torch and transformers that have one entry for each group of the optimizer."""

_NOT_PER_GROUP: Final = frozenset({"_milestones", "_schedule_phases", "_streaming_avg"})
"""Those that may have as many entries by chance (SequentialLR, OneCycleLR, transformers' GreedyLR)."""

_SCHEDULERS: Final = "_schedulers"
"""Those of a chained or sequential scheduler: each has such lists of its own."""


@dataclass(frozen=True, slots=True)
class Reordering:
    """The entries of an object's lists, one for each group of an optimizer, say, that stood in another order."""

    part: str
    """The object's name in the training state, for messages."""
    owners: str
    """What has an entry each, for messages: "groups of 'optimizer'"."""
    path: str
    """The checkpoint's."""
    positions: tuple[int, ...] | None
    """For each owner of now the position that it had; None where they are not the same owners."""
    counts: frozenset[int]
    """How many owners there are, and were."""
    known: frozenset[str] = PER_GROUP
    """Lists that are known to have one entry each."""

    def apply(self, saved: Any, fresh: Any, at: str = "", key: object = None) -> Any:
        """Return a saved value with its entries in the order of now.

        Args:
            saved: Any value. Its lists, tuples, dicts of numbers, tensors and arrays with one entry for each owner are
                put in order where it is known that this is what they are: by their key, or as the object that was
                built has the same entries in the new order.
            fresh: The value in the object that was built.
            at: Where it is, for messages.
            key: The last part of that.

        Raises:
            StateDictMismatchError: A value has as many entries as there are owners, and may or may not be theirs.
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
            raise self._unknown(at, self._size(saved, axis))
        return with_items(saved, lambda name, item: self.apply(item, entry_of(fresh, name), f"{at}.{name}", name))

    def _known(self, saved: Any, at: str) -> Any:
        if self.positions is not None and len(saved) == len(self.positions):
            return moved(saved, self.positions, 0)
        is_any_order = len(saved) in self.counts and is_same(moved(saved, self._order(saved, 0), 0), saved)
        if is_any_order and self.positions is None and max(self.counts) == min(self.counts):
            return saved
        raise self._unknown(at, len(saved))

    def _order(self, value: Any, axis: int) -> Sequence[int]:
        """The positions; where they are not known, those that change every value whose entries are not all the same."""
        if self.positions is not None:
            return self.positions
        size = self._size(value, axis)
        return [*range(1, size), 0]

    def _axes(self, value: Any) -> list[int]:
        """The dimensions of a value that have one entry for each owner."""
        shape = [len(value)] if is_sequence(value) else list(getattr(value, "shape", ()))
        return [axis for axis, size in enumerate(shape) if size > 1 and size in self.counts]

    def _size(self, value: Any, axis: int) -> int:
        return len(value) if is_sequence(value) else int(value.shape[axis])

    def _unknown(self, at: str, size: int) -> StateDictMismatchError:
        place = at.removeprefix(".")
        how = "are other ones" if self.positions is None else "stand in another order"
        return StateDictMismatchError(
            f"'{place}' of '{self.part}' has {size} entries in the checkpoint '{self.path}', maybe one for each of the "
            f"{self.owners}, which {how} now: it is not known which entry is whose. Build them as in the run that was "
            f"saved, in the same order, or pass strict=False to leave '{self.part}' as it was built.",
            path=self.path,
        )


def matched_positions(now: Sequence[Collection[str]], before: Sequence[Collection[str]]) -> tuple[int, ...] | None:
    """Find each group of parameters among those of before: the position of the one with the same names.

    Returns:
        None unless they are the same groups, in whatever order.

    Example:
        assert matched_positions([["b"], ["a", "c"]], [["c", "a"], ["b"]]) == (1, 0)
    """
    left: dict[frozenset[str], deque[int]] = {}
    for number, group in enumerate(before):
        left.setdefault(frozenset(group), deque()).append(number)
    found = [numbers.popleft() for group in now if (numbers := left.get(frozenset(group)))]
    return tuple(found) if len(found) == len(now) == len(before) else None


def related_positions(now: Sequence[Collection[str]], before: Sequence[Collection[str]]) -> tuple[int, ...] | None:
    """Find each group among those of before, as `matched_positions` does, though some have more or fewer parameters.

    Returns:
        None unless each group has parameters of one of before, and no two of the same.

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
