"""Which part of a tensor each rank holds: intervals per dimension, from the mesh and the placements alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import torch

from hfshard.errors import UnstorableTensorError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

Interval = tuple[int, int]
"""Indices of one dimension, from the first to before the second."""
Box = tuple[tuple[Interval, ...], ...]
"""Per dimension the intervals that a rank holds, ascending: its local tensor has them one after another."""
Coordinate = tuple[int, ...]
"""Where a rank stands in a mesh: one index per dimension of the mesh."""

_CACHED_LAYOUTS: Final = 1024
"""Pairs of a shape and a layout: a model has a few dozen, whatever its depth."""

_FSDP_MARKS_FUSED_WEIGHTS = torch.__version__ >= "2.13"
"""Whether `fully_shard` says so where it splits parts of several weights in one; torch 2.11 says `Shard`."""


class Placement(NamedTuple):
    """What one dimension of the mesh does to a tensor."""

    dim: int | None
    """The tensor's dimension that it splits; None: every rank along it has the same."""
    groups: int = 1
    """More than one: torch's `_StridedShard`, whose split factor this is."""


@dataclass(frozen=True, slots=True)
class MeshLayout:
    """How a tensor is spread over ranks. Two that are equal spread every shape alike."""

    shape: tuple[int, ...]
    """Of the mesh."""
    ranks: tuple[int, ...]
    """The mesh's global ranks, in row-major order."""
    placements: tuple[Placement, ...]
    """One per dimension of the mesh."""

    def coordinates(self) -> Iterator[tuple[int, Coordinate]]:
        """Each global rank of the mesh, and where it stands."""
        return zip(self.ranks, product(*map(range, self.shape)), strict=True)


def mesh_layout_of(tensor: DTensor, name: str) -> MeshLayout:
    """Describe how a DTensor is spread.

    Args:
        tensor: On any device; neither its values nor any other rank are asked.
        name: For errors.

    Raises:
        UnstorableTensorError: It has a placement whose ranks do not hold parts of the values.
    """
    shape, ranks = _mesh_of(tensor.device_mesh)
    _check_order(tensor, name)
    layout = MeshLayout(shape, ranks, tuple(_placement(one, tensor, name) for one in tensor.placements))
    if not _FSDP_MARKS_FUSED_WEIGHTS:
        _check_fused(layout, tensor, name)
    return layout


def held_box(shape: tuple[int, ...], layout: MeshLayout, coordinate: Coordinate) -> Box:
    """Find what the rank at a coordinate holds of a tensor.

    Args:
        shape: Of the whole tensor.
        layout: How it is spread.
        coordinate: In the layout's mesh.

    Example:
        >>> rows = MeshLayout((2,), (0, 1), (Placement(0),))
        >>> held_box((5, 4), rows, (1,))
        (((3, 5),), ((0, 4),))

    Source: torch's `Shard` cuts a dimension as `torch.chunk` does: all parts are as long as the first, but the last
    ones, which may be empty.
    """
    return tuple(
        _held_intervals(size, tuple((layout.shape[axis], groups, coordinate[axis]) for axis, groups in splits))
        for size, splits in zip(shape, _splits(layout.shape, layout.placements, len(shape)), strict=True)
    )


@lru_cache(_CACHED_LAYOUTS)
def ranks_by_box(shape: tuple[int, ...], layout: MeshLayout) -> dict[Box, tuple[int, ...]]:
    """Group the ranks of a mesh by what they hold of a tensor: those of one group are copies of each other.

    Args:
        shape: Of the whole tensor.
        layout: How it is spread.

    Returns:
        Box -> global ranks, ascending; without the ranks that hold nothing. Not to be changed: it is kept for the next
        tensor.
    """
    groups: dict[Box, list[int]] = {}
    for rank, coordinate in layout.coordinates():
        box = held_box(shape, layout, coordinate)
        if all(box):
            groups.setdefault(box, []).append(rank)
    return {box: tuple(sorted(ranks)) for box, ranks in groups.items()}


def whole_box(shape: Sequence[int]) -> Box:
    """The box of a rank that holds all."""
    return tuple(((0, size),) if size else () for size in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    """The shape of the local tensor that holds a box."""
    return tuple(sum(stop - start for start, stop in intervals) for intervals in box)


def box_elements(box: Box) -> int:
    """How many elements a box has."""
    return prod(box_shape(box))


def clip_box(box: Box, window: Sequence[Interval]) -> Box:
    """The part of a box that lies within a rectangle, in coordinates of the rectangle.

    Args:
        box: What a rank holds of a tensor.
        window: One interval per dimension of that tensor.

    Example:
        >>> clip_box((((0, 2), (4, 6)), ((0, 3),)), ((1, 5), (2, 3)))
        (((0, 1), (3, 4)), ((0, 1),))
    """
    return tuple(
        tuple(
            (max(start, first) - first, min(stop, last) - first)
            for start, stop in intervals
            if max(start, first) < min(stop, last)
        )
        for intervals, (first, last) in zip(box, window, strict=True)
    )


def local_slices(box: Box, window: Sequence[Interval]) -> tuple[slice, ...]:
    """Where the local tensor that holds a box has the part of it within a rectangle."""
    return tuple(
        slice(_held_before(intervals, first), _held_before(intervals, last))
        for intervals, (first, last) in zip(box, window, strict=True)
    )


def _held_before(intervals: tuple[Interval, ...], index: int) -> int:
    return sum(max(0, min(stop, index) - start) for start, stop in intervals)


def section(intervals: Sequence[Interval], begin: int, end: int) -> list[Interval]:
    """The elements from `begin` to `end` of the intervals, counted through all of them."""
    found = []
    passed = 0
    for start, stop in intervals:
        first = max(begin, passed)
        last = min(end, passed + stop - start)
        if first < last:
            found.append((start + first - passed, start + last - passed))
        passed += stop - start
    return found


@lru_cache(_CACHED_LAYOUTS)
def _splits(
    mesh_shape: tuple[int, ...], placements: tuple[Placement, ...], dimensions: int
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Per dimension of a tensor: (dimension of the mesh, groups) in the order in which they split it."""
    splits: list[list[tuple[int, int]]] = [[] for _ in range(dimensions)]
    for axis in reversed(range(len(placements))):
        dim, groups = placements[axis]
        if dim is not None:
            _add_split(splits[dim], axis, groups, mesh_shape)
    return tuple(map(tuple, splits))


def _add_split(order: list[tuple[int, int]], axis: int, groups: int, mesh_shape: tuple[int, ...]) -> None:
    """Put a dimension of the mesh among the later ones that split the same dimension of the tensor.

    1. As a rule an earlier one comes first: it splits the whole, and each part is split by the later ones.
    2. Under FSDP over tensor parallelism the later one came first; torch says so by a `_StridedShard` whose split
       factor is the number of parts that there were already.
    3. Where no later ones make that number, the tensor is several weights in one (gate and up, or query, key and
       value): each of that many groups is split by itself.

    `fully_shard` over such a weight gives two factors, and the earlier one is that of 2. For `distribute_tensor` the
    same two mean 3, twice; but `_StridedShard` is not public, and nobody is expected to ask for that.
    """
    parts = 1
    for position in range(len(order) + 1):
        if parts == groups:
            order.insert(position, (axis, 1))
            return
        if position < len(order):
            parts *= mesh_shape[order[position][0]]
    order.insert(0, (axis, groups))


@lru_cache(_CACHED_LAYOUTS * 64)
def _held_intervals(size: int, splits: tuple[tuple[int, int, int], ...]) -> tuple[Interval, ...]:
    """Split one dimension several times, and keep one part each time.

    Args:
        size: Of the dimension.
        splits: (parts, groups, which part), in order.
    """
    held: list[Interval] = [(0, size)] if size else []
    for parts, groups, index in splits:
        total = sum(stop - start for start, stop in held)
        kept: list[Interval] = []
        for group in range(groups):
            begin, end = _chunk(total, groups, group)
            start, stop = _chunk(end - begin, parts, index)
            kept += section(held, begin + start, begin + stop)
        held = kept
    return _merged(held)


def _chunk(size: int, parts: int, index: int) -> Interval:
    """The part that `torch.chunk` gives, or an empty one where it gives fewer."""
    length = -(-size // parts)
    return min(index * length, size), min((index + 1) * length, size)


def _merged(intervals: list[Interval]) -> tuple[Interval, ...]:
    merged: list[Interval] = []
    for start, stop in intervals:
        if merged and merged[-1][1] == start:
            start = merged.pop()[0]
        merged.append((start, stop))
    return tuple(merged)


_MESHES: WeakKeyDictionary[DeviceMesh, tuple[tuple[int, ...], tuple[int, ...]]] = WeakKeyDictionary()
"""torch computes the ranks of a mesh each time, and a model asks for them tensor by tensor."""


def _mesh_of(mesh: DeviceMesh) -> tuple[tuple[int, ...], tuple[int, ...]]:
    found = _MESHES.get(mesh)
    if found is None:
        found = _MESHES[mesh] = (tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist()))
    return found


def _placement(placement: Any, tensor: DTensor, name: str) -> Placement:
    """One of torch's placements; `_StridedShard` is not public, and is known by its split factor."""
    if placement.is_replicate():
        return Placement(None)
    if placement.is_partial():
        raise UnstorableTensorError(
            f"Can't store {name!r}: its ranks hold summands of it, not parts ({placement!r}). Sum them up first: "
            "tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim).",
            fqn=name,
        )
    kind = type(placement).__name__
    if kind not in ("Shard", "_StridedShard"):
        raise UnstorableTensorError(
            f"Can't store {name!r}: which part a rank holds under the placement {placement!r} is not known to hfshard. "
            "Change it to Shard and Replicate first: tensor.redistribute(placements=...).",
            fqn=name,
        )
    dim = placement.dim + tensor.dim() if placement.dim < 0 else placement.dim
    return Placement(dim, int(getattr(placement, "split_factor", 1)))


def _check_order(tensor: DTensor, name: str) -> None:
    """Refuse a DTensor whose shards were cut in an order that its placements do not tell.

    torch keeps that order in the spec, which is not public. No public function makes such a tensor.
    """
    for entry in getattr(tensor._spec, "shard_order", None) or ():
        if list(entry.mesh_dims) != sorted(entry.mesh_dims):
            raise UnstorableTensorError(
                f"Can't store {name!r}: dimension {entry.tensor_dim} was split by the mesh's dimensions "
                f"{list(entry.mesh_dims)} in this order, and hfshard knows the ascending one only. "
                "Gather it first: tensor.full_tensor(), on every rank.",
                fqn=name,
            )


def _check_fused(layout: MeshLayout, tensor: DTensor, name: str) -> None:
    """Refuse several weights in one where this torch does not say whether FSDP or tensor parallelism came first."""
    for splits in _splits(layout.shape, layout.placements, tensor.dim()):
        fused = [axis for axis, groups in splits if groups > 1]
        if fused and min(axis for axis, _ in splits) < max(fused):
            raise UnstorableTensorError(
                f"Can't store {name!r}: it is several weights in one, and torch {torch.__version__} gives it the same "
                f"placements {tensor.placements} whichever of the mesh's dimensions came first. "
                "Use torch 2.13 or newer.",
                fqn=name,
            )
