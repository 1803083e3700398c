"""Which ranks hold which bytes of every tensor, found from what all ranks say of theirs."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from typing import NamedTuple, Self

from hfshard.distributed.exchange.listing import Listing, RankGroup, TensorEntry
from hfshard.distributed.layout import (
    Box,
    Interval,
    MeshLayout,
    Placement,
    clip_box,
    ranks_by_box,
    whole_box,
)
from hfshard.distributed.runs import BoxRuns, Runs
from hfshard.distributed.spread_tensor import window_sizes
from hfshard.errors import InvalidArgumentError
from hfshard.tensors.stored_tensor import TensorLayout

_Way = tuple[str, int]
"""How some ranks spread a tensor: the digest of their listing, and the number of a mesh in it."""
_Source = tuple[tuple[int, ...], int, tuple[Interval, ...] | None, tuple[Placement, ...]]
"""What a tensor is stored from: the source's shape, bytes of an element, the rectangle, placements."""


class Part(NamedTuple):
    """Some of a tensor's bytes, and the ranks that have all of them."""

    ranks: tuple[int, ...]
    runs: BoxRuns


class Parts:
    """The parts of a tensor, which cover its bytes exactly."""

    def __init__(self, parts: Iterable[Part]) -> None:
        found = sorted((*_bounds(part.runs), part) for part in parts)
        self._parts = tuple(part for _, _, part in found)
        self._starts = [start for start, _, _ in found]
        self._stops = [stop for _, stop, _ in found]
        self._totals = [part.runs.total for part in self._parts]
        self._is_ascending = self._stops == sorted(self._stops)
        self._by_rank = {rank: number for number, part in enumerate(self._parts) for rank in part.ranks}

    def __iter__(self) -> Iterator[Part]:
        return iter(self._parts)

    def between(self, start: int, stop: int) -> Sequence[int]:
        """The numbers of those that may have bytes in a range."""
        if self._is_ascending:
            return range(bisect_right(self._stops, start), bisect_left(self._starts, stop))
        bounds = zip(self._starts, self._stops, strict=True)
        return [number for number, (first, last) in enumerate(bounds) if first < stop and last > start]

    def count_between(self, number: int, start: int, stop: int) -> int:
        """About how many bytes a part has in a range: of one with gaps, its share of the bytes."""
        first = self._starts[number]
        last = self._stops[number]
        overlap = min(last, stop) - max(first, start)
        return overlap * self._totals[number] // (last - first)

    def number_of(self, rank: int) -> int | None:
        """The number of the part that a rank has; None: it has none."""
        return self._by_rank.get(rank)

    def clip(self, number: int, start: int, stop: int) -> Runs | None:
        """The runs of a part in a range of the tensor's bytes; None: there are none."""
        if self._starts[number] >= stop or self._stops[number] <= start:
            return None
        runs = self._parts[number].runs.clip(start, stop)
        return runs if len(runs.offsets) else None

    def source(self, number: int, owner: int) -> int:
        """The rank that gives a part to the owner of a file: itself, if it has it; else each owner asks another one."""
        ranks = self._parts[number].ranks
        return owner if self._by_rank.get(owner) == number else ranks[(owner + number) % len(ranks)]


class Holders:
    """All tensors of all ranks.

    Attributes:
        layouts: Name -> how the tensor is stored, in the order in which names are stored.
        tied_names, undeclared_ties, separate_names: As in `SaveRequest`, of all ranks together.
    """

    def __init__(
        self,
        layouts: Mapping[str, TensorLayout],
        parts: Mapping[str, Parts],
        tied_names: Mapping[str, str],
        undeclared_ties: Sequence[str],
        separate_names: Iterable[str],
    ) -> None:
        self.layouts = dict(layouts)
        self._parts = dict(parts)
        self.tied_names = dict(tied_names)
        self.undeclared_ties = tuple(undeclared_ties)
        self.separate_names = frozenset(separate_names)

    @classmethod
    def unite(
        cls, groups: Sequence[RankGroup], listings: Mapping[str, Listing], name_order: Sequence[str] = ()
    ) -> Self:
        """Unite what the ranks say: names are stored in rank order.

        Args:
            groups: Every rank is in one.
            listings: Digest -> listing.
            name_order: Names that come first, in this order.

        Raises:
            InvalidArgumentError: Ranks disagree about a tensor, or have not all of it.
        """
        groups = sorted(groups, key=lambda group: group.ranks[0])
        first_group: dict[str, RankGroup] = {}
        for group in groups:
            first_group.setdefault(group.digest, group)
        entries: dict[str, TensorEntry] = {}
        ways: dict[str, tuple[_Way, ...]] = {}
        whole_on: dict[str, int] = {}
        for digest, group in first_group.items():
            for name, entry in listings[digest].entries.items():
                _check_agreement(name, entries.setdefault(name, entry), entry, group.ranks[0])
                if entry.mesh is None:
                    whole_on[name] = min(group.ranks[0], whole_on.get(name, group.ranks[0]))
                else:
                    ways[name] = (*ways.get(name, ()), (digest, entry.mesh))
        order = [name for name in name_order if name in entries]
        listed = set(order)
        order += [name for name in entries if name not in listed]
        finder = _PartsFinder(groups)
        parts = {
            name: finder.spread(name, entries[name], ways[name])
            if name in ways
            else finder.whole(entries[name].layout.nbytes, whole_on[name])
            for name in order
        }
        united = [listings[digest] for digest in first_group]
        return cls(
            {name: entries[name].layout for name in order},
            parts,
            _united_ties(united, entries),
            tuple(dict.fromkeys(chain.from_iterable(listing.undeclared_ties for listing in united))),
            chain.from_iterable(listing.separate_names for listing in united),
        )

    def parts_of(self, name: str) -> Parts:
        """The parts of a tensor."""
        return self._parts[name]


def _check_agreement(name: str, known: TensorEntry, entry: TensorEntry, rank: int) -> None:
    if known._replace(mesh=None) == entry._replace(mesh=None) and (known.mesh is None) == (entry.mesh is None):
        return
    raise InvalidArgumentError(
        f"The ranks disagree about '{name}': rank {rank} has {_in_words(entry)}, and one before it has "
        f"{_in_words(known)}. Give the tensors of different ranks different names, or shard them alike.",
        fqn=name,
        expected=known,
        actual=entry,
    )


def _in_words(entry: TensorEntry) -> str:
    how = "whole" if entry.mesh is None else f"spread by {[tuple(one) for one in entry.placements]}"
    return f"a {entry.layout.dtype} of shape {list(entry.layout.shape)}, {how}"


def _united_ties(listings: Sequence[Listing], stored: Mapping[str, TensorEntry]) -> dict[str, str]:
    """The ties of all ranks; a name that some rank stores, and another one ties, is an error."""
    ties: dict[str, str] = {}
    for listing in listings:
        for name, kept in listing.tied_names.items():
            if name in stored or ties.setdefault(name, kept) != kept:
                raise InvalidArgumentError(
                    f"The ranks disagree about '{name}': one has a tensor of its own, and on another it shares that of "
                    f"'{kept}'. Tie it on all ranks, or on none.",
                    fqn=name,
                )
    return ties


class _PartsFinder:
    """Finds the parts of tensors: once for all that are spread alike, which are a few dozen, or as many as experts."""

    def __init__(self, groups: Sequence[RankGroup]) -> None:
        self._groups = groups
        self._whole: dict[tuple[int, int], Parts] = {}
        self._spread: dict[tuple[_Source, tuple[_Way, ...]], Parts | None] = {}

    def whole(self, nbytes: int, rank: int) -> Parts:
        """The parts of a tensor that a rank has all of."""
        if (nbytes, rank) not in self._whole:
            runs = BoxRuns((nbytes,), 1, whole_box((nbytes,)))
            self._whole[nbytes, rank] = Parts([Part((rank,), runs)] if nbytes else [])
        return self._whole[nbytes, rank]

    def spread(self, name: str, entry: TensorEntry, ways: tuple[_Way, ...]) -> Parts:
        """The parts of a tensor that is spread over the meshes of these listings.

        Raises:
            InvalidArgumentError: They don't cover it exactly.
        """
        source = entry.source_shape, entry.itemsize, entry.window, entry.placements
        if (source, ways) not in self._spread:
            parts = _spread_parts(source, self._layouts_of(entry, ways))
            holders = {rank for part in parts or () for rank in part.ranks}
            self._spread[source, ways] = parts if holders <= self._those_who_list(ways) else None
        found = self._spread[source, ways]
        if found is None:
            raise InvalidArgumentError(
                f"The ranks do not have all of '{name}', or have some of it twice: it is spread over "
                f"{[list(layout.ranks) for layout in self._layouts_of(entry, ways)]}. Every rank that has a part must "
                "save it, under one name.",
                fqn=name,
            )
        if prod(window_sizes(entry.source_shape, entry.window)) * entry.itemsize != entry.layout.nbytes:
            raise InvalidArgumentError(
                f"'{name}' of shape {list(entry.layout.shape)} is not the rectangle {entry.window} of its source.",
                fqn=name,
            )
        return found

    def _those_who_list(self, ways: tuple[_Way, ...]) -> set[int]:
        """The ranks that have the names of these listings: a mesh may have more, under other names."""
        digests = {digest for digest, _ in ways}
        return {rank for group in self._groups if group.digest in digests for rank in group.ranks}

    def _layouts_of(self, entry: TensorEntry, ways: tuple[_Way, ...]) -> list[MeshLayout]:
        """How the ranks of these listings have a tensor, each way once."""
        found = {
            group.meshes[mesh].layout(entry.placements)
            for digest, mesh in ways
            for group in self._groups
            if group.digest == digest
        }
        return sorted(found, key=lambda layout: layout.ranks)


def _spread_parts(source: _Source, layouts: Sequence[MeshLayout]) -> Parts | None:
    """The parts of a tensor that is spread over meshes; None where they don't cover it exactly."""
    source_shape, itemsize, window, _ = source
    sizes = window_sizes(source_shape, window)
    ranks_of: dict[Box, set[int]] = {}
    for layout in layouts:
        boxes = ranks_by_box(source_shape, layout)
        for box, ranks in boxes.items() if window is None else _boxes_within(boxes, window):
            ranks_of.setdefault(box, set()).update(ranks)
    holders = [rank for ranks in ranks_of.values() for rank in ranks]
    if not _covers(sizes, list(ranks_of)) or len(holders) != len(set(holders)):
        return None
    return Parts([Part(tuple(sorted(ranks)), BoxRuns(sizes, itemsize, box)) for box, ranks in ranks_of.items()])


def _boxes_within(
    boxes: Mapping[Box, tuple[int, ...]], window: Sequence[Interval]
) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """The boxes that have elements in a rectangle, clipped, with their ranks: `clip_box` for a thousand of them.

    A box is a combination of what each dimension is cut into, which is little: so each dimension is clipped first.
    """
    clipped = [
        {cut: clip_box((cut,), (interval,))[0] for cut in {box[dim] for box in boxes}}
        for dim, interval in enumerate(window)
    ]
    for box, ranks in boxes.items():
        held = tuple(cuts[cut] for cuts, cut in zip(clipped, box))
        if all(held):
            yield held, ranks


def _covers(sizes: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Whether the boxes have every element once: they are all combinations of what each dimension is cut into."""
    if not prod(sizes):
        return not boxes
    cuts = [{box[dim] for box in boxes} for dim in range(len(sizes))]
    if len(boxes) != prod(map(len, cuts)):
        return False
    return all(_covers_dimension(size, cut) for size, cut in zip(sizes, cuts, strict=True))


def _covers_dimension(size: int, cuts: Iterable[tuple[Interval, ...]]) -> bool:
    passed = 0
    for start, stop in sorted(chain.from_iterable(cuts)):
        if start != passed:
            return False
        passed = stop
    return passed == size


def _bounds(runs: BoxRuns) -> tuple[int, int]:
    """The first byte that a part has, and the one after the last."""
    first = last = 0
    stride = runs.itemsize
    for dim in range(len(runs.shape) - 1, -1, -1):
        first += runs.box[dim][0][0] * stride
        last += (runs.box[dim][-1][1] - 1) * stride
        stride *= runs.shape[dim]
    return first, last + runs.itemsize
