"""Each rank's part of every tensor, merged from the listings of all; and the rank that writes each file."""

from __future__ import annotations

import heapq
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any, NamedTuple, Self

import torch

from hfshard.distributed.layout import Box, Interval, MeshLayout, Placement, clip_box, ranks_by_box, whole_box
from hfshard.distributed.spread_tensor import BoxRuns, Runs, SpreadTensor, window_sizes
from hfshard.errors import InvalidArgumentError
from hfshard.saving.save_request import SaveRequest
from hfshard.tensors.stored_tensor import TensorLayout, TensorLike, check_storable, tensor_layout

LocalTensor = TensorLike | SpreadTensor
"""A rank's value for one name: a complete tensor, or a part of one."""


class ListedTensor(NamedTuple):
    """One tensor of a rank. The entry is the same on all ranks that have parts of the tensor in the same way."""

    layout: TensorLayout
    """Of what is stored."""
    itemsize: int
    """Bytes of an element."""
    source_shape: tuple[int, ...]
    """Of the full tensor that the ranks have."""
    window: tuple[Interval, ...] | None
    """The rectangle of it that is stored; None: all."""
    mesh: int | None
    """Number, among the rank's meshes, of the mesh over which it is spread; None: the rank has all of it."""
    placements: tuple[Placement, ...]

    @classmethod
    def from_json(cls, value: list[Any]) -> Self:
        """Parse an entry from its JSON value."""
        layout, itemsize, source_shape, window, mesh, placements = value
        dtype, shape, nbytes, complex_as_real = layout
        return cls(
            TensorLayout(dtype, tuple(shape), nbytes, complex_as_real),
            itemsize,
            tuple(source_shape),
            None if window is None else tuple((start, stop) for start, stop in window),
            mesh,
            tuple(Placement(*placement) for placement in placements),
        )


class Mesh(NamedTuple):
    """The ranks of a mesh, in row-major order."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    def layout(self, placements: tuple[Placement, ...]) -> MeshLayout:
        """Describe how a tensor with these placements is spread over it."""
        return MeshLayout(self.shape, self.ranks, placements)


@dataclass(frozen=True, slots=True)
class Listing:
    """The tensors of one rank, and what its request states about their names."""

    entries: dict[str, ListedTensor]
    """In the order in which the tensors are stored."""
    tied_names: dict[str, str]
    undeclared_ties: tuple[str, ...]
    separate_names: tuple[str, ...]

    def to_json(self) -> bytes:
        """Encode it; equal listings give equal bytes, whose sha256 is the listing's digest."""
        parts = list(self.entries.items()), self.tied_names, self.undeclared_ties, self.separate_names
        return json.dumps(parts, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> Self:
        """Decode another rank's listing."""
        entries, tied_names, undeclared_ties, separate_names = json.loads(raw)
        parsed = {name: ListedTensor.from_json(value) for name, value in entries}
        return cls(parsed, tied_names, tuple(undeclared_ties), tuple(separate_names))


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks with the same listing and the same meshes."""

    ranks: tuple[int, ...]
    digest: str
    """Of the listing."""
    meshes: tuple[Mesh, ...]

    @classmethod
    def from_json(cls, value: list[Any]) -> Self:
        """Parse a group from its JSON value."""
        ranks, digest, meshes = value
        return cls(tuple(ranks), digest, tuple(Mesh(tuple(shape), tuple(inside)) for shape, inside in meshes))


def list_tensors(request: SaveRequest, tensors: Mapping[str, LocalTensor]) -> tuple[Listing, tuple[Mesh, ...]]:
    """Describe the tensors of this rank.

    Args:
        request: Its ties and separate names are listed.
        tensors: To be stored, by name.

    Returns:
        The listing, and the meshes that its entries number.

    Raises:
        UnstorableTensorError: The format cannot store one.
    """
    numbers: dict[Mesh, int] = {}
    entries = {name: _entry(name, tensor, numbers) for name, tensor in tensors.items()}
    listing = Listing(
        entries,
        dict(request.tied_names),
        tuple(request.undeclared_ties),
        tuple(sorted(request.separate_names & entries.keys())),
    )
    return listing, tuple(numbers)


def _entry(name: str, tensor: LocalTensor, numbers: dict[Mesh, int]) -> ListedTensor:
    if not isinstance(tensor, SpreadTensor):
        check_storable(name, tensor)
        layout = tensor_layout(tensor)
        return ListedTensor(layout, 1, (layout.nbytes,), None, None, ())
    layout = tensor_layout(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
    mesh = Mesh(tensor.mesh.shape, tensor.mesh.ranks)
    number = numbers.setdefault(mesh, len(numbers))
    return ListedTensor(
        layout, tensor.dtype.itemsize, tensor.source_shape, tensor.window, number, tensor.mesh.placements
    )


# Parts: the bytes of every tensor that each rank has, merged from the listings of all ranks.


_Way = tuple[str, int]
"""The spread of a tensor over some ranks: the digest of their listing, and the number of a mesh in it."""
_Source = tuple[tuple[int, ...], int, tuple[Interval, ...] | None, tuple[Placement, ...]]
"""The source of a stored tensor: its shape, the bytes of an element, the rectangle, and the placements."""


class Part(NamedTuple):
    """Some of a tensor's bytes, and the ranks each of which has all of them."""

    ranks: tuple[int, ...]
    """Those at one position of all parts are a copy of the tensor, which may differ from another copy."""
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
        self._copies = {rank: copy for part in self._parts for copy, rank in enumerate(part.ranks)}

    def __iter__(self) -> Iterator[Part]:
        return iter(self._parts)

    def between(self, start: int, stop: int) -> Sequence[int]:
        """List the numbers of the parts that may have bytes in a range."""
        if self._is_ascending:
            return range(bisect_right(self._stops, start), bisect_left(self._starts, stop))
        bounds = zip(self._starts, self._stops, strict=True)
        return [number for number, (first, last) in enumerate(bounds) if first < stop and last > start]

    def count_between(self, number: int, start: int, stop: int) -> int:
        """Estimate the bytes that a part has in a range; a part with gaps counts by its density."""
        first = self._starts[number]
        last = self._stops[number]
        overlap = min(last, stop) - max(first, start)
        return overlap * self._totals[number] // (last - first)

    def number_of(self, rank: int) -> int | None:
        """Return the number of the part that a rank has; None: it has none."""
        return self._by_rank.get(rank)

    def clip(self, number: int, start: int, stop: int) -> Runs | None:
        """Return the runs of a part in a range of the tensor's bytes; None: there are none."""
        if self._starts[number] >= stop or self._stops[number] <= start:
            return None
        runs = self._parts[number].runs.clip(start, stop)
        return runs if len(runs.offsets) else None

    def source(self, number: int, owner: int) -> int:
        """Return the rank that sends a part to a file's owner: all from one copy, its own if it has a part."""
        ranks = self._parts[number].ranks
        return ranks[self._copies.get(owner, owner) % len(ranks)]


@dataclass(frozen=True, slots=True, eq=False)
class TensorOwners:
    """All tensors of all ranks.

    Attributes:
        layouts: Name -> how the tensor is stored, in the order in which names are stored.
        parts: Name -> the parts of the tensor.
        tied_names, undeclared_ties, separate_names: As in `SaveRequest`, for all ranks together.
    """

    layouts: dict[str, TensorLayout]
    parts: dict[str, Parts]
    tied_names: dict[str, str]
    undeclared_ties: tuple[str, ...]
    separate_names: frozenset[str]

    @classmethod
    def unite(
        cls, groups: Sequence[RankGroup], listings: Mapping[str, Listing], name_order: Sequence[str] = ()
    ) -> Self:
        """Merge the ranks' listings; names are stored in rank order.

        Args:
            groups: Every rank is in one.
            listings: Digest -> listing.
            name_order: Names that come first, in this order.

        Raises:
            InvalidArgumentError: Ranks disagree about a tensor, or do not have all of it.
        """
        groups = sorted(groups, key=lambda group: group.ranks[0])
        first_group: dict[str, RankGroup] = {}
        for group in groups:
            first_group.setdefault(group.digest, group)
        entries: dict[str, ListedTensor] = {}
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
            frozenset(chain.from_iterable(listing.separate_names for listing in united)),
        )


def _check_agreement(name: str, known: ListedTensor, entry: ListedTensor, rank: int) -> None:
    if known._replace(mesh=None) == entry._replace(mesh=None) and (known.mesh is None) == (entry.mesh is None):
        return
    raise InvalidArgumentError(
        f"The ranks disagree about '{name}': rank {rank} has {_in_words(entry)}, but an earlier one has "
        f"{_in_words(known)}. Give the tensors of different ranks different names, or shard them alike.",
        fqn=name,
        expected=known,
        actual=entry,
    )


def _in_words(entry: ListedTensor) -> str:
    how = "whole" if entry.mesh is None else f"spread by {[tuple(one) for one in entry.placements]}"
    return f"a {entry.layout.dtype} of shape {list(entry.layout.shape)}, {how}"


def _united_ties(listings: Sequence[Listing], stored: Mapping[str, ListedTensor]) -> dict[str, str]:
    """Merge the ties of all ranks; reject a name that one rank stores and another one ties."""
    ties: dict[str, str] = {}
    for listing in listings:
        for name, kept in listing.tied_names.items():
            if name in stored or ties.setdefault(name, kept) != kept:
                raise InvalidArgumentError(
                    f"The ranks disagree about '{name}': one has a tensor of its own, but on another it is tied to "
                    f"'{kept}'. Tie it on all ranks, or on none.",
                    fqn=name,
                )
    return ties


class _PartsFinder:
    """Finder of tensors' parts, once for all tensors that are spread alike: a few dozen kinds, or one per expert."""

    def __init__(self, groups: Sequence[RankGroup]) -> None:
        self._groups = groups
        self._whole: dict[tuple[int, int], Parts] = {}
        self._spread: dict[tuple[_Source, tuple[_Way, ...]], Parts | None] = {}

    def whole(self, nbytes: int, rank: int) -> Parts:
        if (nbytes, rank) not in self._whole:
            runs = BoxRuns((nbytes,), 1, whole_box((nbytes,)))
            self._whole[nbytes, rank] = Parts([Part((rank,), runs)] if nbytes else [])
        return self._whole[nbytes, rank]

    def spread(self, name: str, entry: ListedTensor, ways: tuple[_Way, ...]) -> Parts:
        """Find the parts of a tensor on the first mesh of these listings: they must cover it exactly.

        Each mesh has all of it, and a tensor with rows of several might be none that a rank has.
        """
        source = entry.source_shape, entry.itemsize, entry.window, entry.placements
        if (source, ways) not in self._spread:
            parts = _spread_parts(source, self._layouts_of(entry, ways)[0])
            holders = {rank for part in parts or () for rank in part.ranks}
            self._spread[source, ways] = parts if holders <= self._those_who_list(ways) else None
        found = self._spread[source, ways]
        if found is None:
            raise InvalidArgumentError(
                f"The ranks do not have all of '{name}', or have some of it twice: it is spread over "
                f"{[list(layout.ranks) for layout in self._layouts_of(entry, ways)]}. Save it on every rank that has "
                "a part, under one name.",
                fqn=name,
            )
        if prod(window_sizes(entry.source_shape, entry.window)) * entry.itemsize != entry.layout.nbytes:
            raise InvalidArgumentError(
                f"'{name}' of shape {list(entry.layout.shape)} is not the rectangle {entry.window} of its source.",
                fqn=name,
            )
        return found

    def _those_who_list(self, ways: tuple[_Way, ...]) -> set[int]:
        """Return the ranks that have these listings: a mesh may have more ranks, with other names."""
        digests = {digest for digest, _ in ways}
        return {rank for group in self._groups if group.digest in digests for rank in group.ranks}

    def _layouts_of(self, entry: ListedTensor, ways: tuple[_Way, ...]) -> list[MeshLayout]:
        """List the distinct layouts of a tensor on the ranks of these listings."""
        found = {
            group.meshes[mesh].layout(entry.placements)
            for digest, mesh in ways
            for group in self._groups
            if group.digest == digest
        }
        return sorted(found, key=lambda layout: layout.ranks)


def _spread_parts(source: _Source, layout: MeshLayout) -> Parts | None:
    """Find the parts of a tensor that is spread over a mesh; None if they do not cover it exactly."""
    source_shape, itemsize, window, _ = source
    sizes = window_sizes(source_shape, window)
    boxes = ranks_by_box(source_shape, layout)
    ranks_of = boxes if window is None else dict(_boxes_within(boxes, window))
    if not _covers(sizes, list(ranks_of)):
        return None
    return Parts([Part(ranks, BoxRuns(sizes, itemsize, box)) for box, ranks in ranks_of.items()])


def _boxes_within(
    boxes: Mapping[Box, tuple[int, ...]], window: Sequence[Interval]
) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """Clip boxes to a rectangle and yield the non-empty ones, with their ranks: a `clip_box` for a thousand of them.

    A box is a combination of the few cuts of each dimension, so each dimension is clipped first.
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
    """Return whether the boxes contain every element once: then they are all combinations of each dimension's cuts."""
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
    """Return the first byte that a part has, and the one after the last."""
    first = last = 0
    stride = runs.itemsize
    for dim in range(len(runs.shape) - 1, -1, -1):
        first += runs.box[dim][0][0] * stride
        last += (runs.box[dim][-1][1] - 1) * stride
        stride *= runs.shape[dim]
    return first, last + runs.itemsize


# The owner of each file: the rank that writes it.


def assign_owners(file_bytes: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """Assign each file to one rank: the largest first, always to the rank with the least to write so far.

    If there are fewer files than ranks, the owners are spread out, because neighbors share a machine and its network.

    Args:
        file_bytes: The size of each file.
        ranks: The ranks that may write.

    Returns:
        The rank of each file. It depends on the arguments alone, so that all ranks compute the same.

    Example:
        >>> assign_owners([5, 9, 4], [0, 1])
        [1, 0, 1]
    """
    owners = [0] * len(file_bytes)
    count = min(len(file_bytes), len(ranks))
    in_order = sorted(ranks)
    loads = [(0, in_order[number * len(ranks) // count]) for number in range(count)]
    for number in sorted(range(len(file_bytes)), key=lambda number: (-file_bytes[number], number)):
        load, rank = heapq.heappop(loads)
        owners[number] = rank
        heapq.heappush(loads, (load + file_bytes[number], rank))
    return owners
