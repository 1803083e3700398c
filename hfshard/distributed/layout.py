"""Each rank's part of a tensor: intervals per dimension, computed from the mesh and the placements alone."""

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
"""Indices of one dimension; the second bound is exclusive."""
Box = tuple[tuple[Interval, ...], ...]
"""Per dimension, the intervals that a rank has, ascending: its local tensor has them one after another."""
Coordinate = tuple[int, ...]
"""A rank's position in a mesh: one index per dimension of the mesh."""

_CACHED_LAYOUTS: Final = 1024
"""Pairs of a shape and a layout: a model has a few dozen, whatever its depth."""

_FSDP_MARKS_FUSED_WEIGHTS = torch.__version__ >= "2.13"
"""True if `fully_shard` marks its splits of several fused weights in the placement; torch 2.11 uses `Shard`."""


class Placement(NamedTuple):
    """The effect of one mesh dimension on a tensor."""

    dim: int | None
    """The tensor dimension that it splits; None: every rank along it has the same values."""
    groups: int = 1
    """If more than one, the split factor of torch's `_StridedShard`."""


@dataclass(frozen=True, slots=True)
class MeshLayout:
    """The spread of a tensor over ranks. Equal layouts spread every shape alike."""

    shape: tuple[int, ...]
    """Of the mesh."""
    ranks: tuple[int, ...]
    """The mesh's global ranks, in row-major order."""
    placements: tuple[Placement, ...]
    """One per dimension of the mesh."""

    def coordinates(self) -> Iterator[tuple[int, Coordinate]]:
        """Iterate over the mesh's global ranks, with their coordinates."""
        return zip(self.ranks, product(*map(range, self.shape)), strict=True)


def mesh_layout_of(tensor: DTensor, name: str) -> MeshLayout:
    """Describe how a DTensor is spread.

    Args:
        tensor: On any device; its values are not read, and no other rank is contacted.
        name: For errors.

    Raises:
        UnstorableTensorError: It has a placement under which ranks do not have parts of the values, or a mesh whose
            ranks do not ascend along a dimension that splits it.
    """
    mesh = _mesh_of(tensor.device_mesh)
    _check_order(tensor, name)
    layout = MeshLayout(mesh.shape, mesh.ranks, tuple(_placement(one, tensor, name) for one in tensor.placements))
    _check_ascending(mesh, layout, name)
    if not _FSDP_MARKS_FUSED_WEIGHTS:
        _check_fused(layout, tensor, name)
    return layout


def held_box(shape: tuple[int, ...], layout: MeshLayout, coordinate: Coordinate) -> Box:
    """Compute the part of a tensor that the rank at a coordinate has.

    Args:
        shape: Of the whole tensor.
        layout: How it is spread.
        coordinate: In the layout's mesh.

    Example:
        >>> rows = MeshLayout((2,), (0, 1), (Placement(0),))
        >>> held_box((5, 4), rows, (1,))
        (((3, 5),), ((0, 4),))

    Source: torch's `Shard` cuts a dimension as `torch.chunk` does: all parts are as long as the first, except the last
    ones, which may be shorter or empty.
    """
    return tuple(
        _held_intervals(size, tuple((layout.shape[axis], groups, coordinate[axis]) for axis, groups in splits))
        for size, splits in zip(shape, _splits(layout.shape, layout.placements, len(shape)), strict=True)
    )


@lru_cache(_CACHED_LAYOUTS)
def ranks_by_box(shape: tuple[int, ...], layout: MeshLayout) -> dict[Box, tuple[int, ...]]:
    """Group the ranks of a mesh by the part of a tensor that they have: the ranks of a group have copies.

    Args:
        shape: Of the whole tensor.
        layout: How it is spread.

    Returns:
        Box -> global ranks, without those that have nothing. All boxes have the same number of copies, and the ranks at
        one position are a copy of the tensor. Do not modify it: it is cached for the next tensor.
    """
    groups: dict[Box, list[int]] = {}
    for rank, coordinate in layout.coordinates():
        box = held_box(shape, layout, coordinate)
        if all(box):
            groups.setdefault(box, []).append(rank)
    return {box: tuple(ranks) for box, ranks in groups.items()}


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box of a rank that has the complete tensor."""
    return tuple(((0, size),) if size else () for size in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    """Return the shape of the local tensor for a box."""
    return tuple(sum(stop - start for start, stop in intervals) for intervals in box)


def box_elements(box: Box) -> int:
    """Return the number of elements in a box."""
    return prod(box_shape(box))


def single_run(shape: Sequence[int], box: Box) -> Interval | None:
    """Return the elements of a box as one interval of the tensor's row-major elements; None if they are not contiguous.

    Args:
        shape: Of the whole tensor.
        box: The part of it that a rank has.

    Example:
        >>> single_run((4, 3), (((2, 4),), ((0, 3),)))
        (6, 12)
        >>> single_run((4, 3), (((2, 4),), ((0, 1),)))
    """
    first = 0
    is_split = False
    for size, intervals in zip(shape, box, strict=True):
        if len(intervals) != 1 or (is_split and intervals[0] != (0, size)):
            return None
        start, stop = intervals[0]
        first = first * size + start
        is_split = is_split or stop - start > 1
    return first, first + box_elements(box)


def clip_box(box: Box, window: Sequence[Interval]) -> Box:
    """Return the part of a box within a rectangle, in coordinates of the rectangle.

    Args:
        box: The part of a tensor that a rank has.
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
    """Return the slices of a box's local tensor that contain the part of the box within a rectangle."""
    return tuple(
        slice(held_before(intervals, first), held_before(intervals, last))
        for intervals, (first, last) in zip(box, window, strict=True)
    )


def held_before(intervals: tuple[Interval, ...], index: int) -> int:
    """Count the indices of the intervals that are less than one index."""
    return sum(max(0, min(stop, index) - start) for start, stop in intervals)


def section(intervals: Sequence[Interval], begin: int, end: int) -> list[Interval]:
    """Return the elements from `begin` to `end` of the intervals, counted across all of them."""
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
    """List, per dimension of a tensor, the (mesh dimension, groups) that split it, in order."""
    splits: list[list[tuple[int, int]]] = [[] for _ in range(dimensions)]
    for axis in reversed(range(len(placements))):
        dim, groups = placements[axis]
        if dim is not None:
            _add_split(splits[dim], axis, groups, mesh_shape)
    return tuple(map(tuple, splits))


def _add_split(order: list[tuple[int, int]], axis: int, groups: int, mesh_shape: tuple[int, ...]) -> None:
    """Insert a mesh dimension among the later ones that split the same tensor dimension.

    1. Normally an earlier one comes first: it splits the full dimension, and the later ones split each part.
    2. Under FSDP over tensor parallelism the later one came first. torch marks this by a `_StridedShard` whose split
       factor is the number of parts that existed already.
    3. If no later ones produce that number, the tensor is several weights in one (gate and up, or query, key and
       value): each of that many groups is split by itself.

    `fully_shard` over such a weight gives two factors, and the earlier one is that of case 2. For `distribute_tensor`,
    the same two would mean case 3 twice; but `_StridedShard` is not public, and nobody is expected to use it so.
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
    """Split one dimension by each (parts, groups, index of the part) in order, and keep that part each time."""
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
    """Return the part that `torch.chunk` returns, or an empty one if it returns fewer parts."""
    length = -(-size // parts)
    return min(index * length, size), min((index + 1) * length, size)


def _merged(intervals: list[Interval]) -> tuple[Interval, ...]:
    merged: list[Interval] = []
    for start, stop in intervals:
        if merged and merged[-1][1] == start:
            start = merged.pop()[0]
        merged.append((start, stop))
    return tuple(merged)


class _Mesh(NamedTuple):
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    is_ascending: tuple[bool, ...]
    """Per dimension, whether all ranks ascend along it."""


_MESHES: WeakKeyDictionary[DeviceMesh, _Mesh] = WeakKeyDictionary()
"""torch computes the ranks of a mesh on each access, and a model needs them tensor by tensor."""


def _mesh_of(mesh: DeviceMesh) -> _Mesh:
    found = _MESHES.get(mesh)
    if found is None:
        ranks = mesh.mesh
        is_ascending = tuple(bool((ranks.diff(dim=dim) > 0).all()) for dim in range(ranks.dim()))
        found = _MESHES[mesh] = _Mesh(tuple(ranks.shape), tuple(ranks.flatten().tolist()), is_ascending)
    return found


def _placement(placement: Any, tensor: DTensor, name: str) -> Placement:
    """Convert one of torch's placements; `_StridedShard` is not public, and is recognized by its split factor."""
    if placement.is_replicate():
        return Placement(None)
    if placement.is_partial():
        raise UnstorableTensorError(
            f"Cannot store {name!r}: its ranks have summands of it, not parts ({placement!r}). Sum them first: "
            "tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim).",
            fqn=name,
        )
    kind = type(placement).__name__
    if kind not in ("Shard", "_StridedShard"):
        raise UnstorableTensorError(
            f"Cannot store {name!r}: hfshard does not know which part a rank has under the placement {placement!r}. "
            "Change it to Shard and Replicate first: tensor.redistribute(placements=...).",
            fqn=name,
        )
    dim = placement.dim + tensor.dim() if placement.dim < 0 else placement.dim
    return Placement(dim, int(getattr(placement, "split_factor", 1)))


def _check_order(tensor: DTensor, name: str) -> None:
    """Reject a DTensor whose shards were cut in an order that its placements do not show.

    torch keeps that order in the spec, which is not public. No public function creates such a tensor.
    """
    for entry in getattr(tensor._spec, "shard_order", None) or ():
        if list(entry.mesh_dims) != sorted(entry.mesh_dims):
            raise UnstorableTensorError(
                f"Cannot store {name!r}: dimension {entry.tensor_dim} was split by the mesh's dimensions "
                f"{list(entry.mesh_dims)} in this order, but hfshard supports only the ascending one. Gather it "
                "first: tensor.full_tensor(), on every rank.",
                fqn=name,
            )


def _check_ascending(mesh: _Mesh, layout: MeshLayout, name: str) -> None:
    """Reject a mesh of which torch does not say with one voice which part a rank has.

    Collectives, and FSDP, go by the rank's place in a group, whose ranks torch sorts; `redistribute`, and the sizes of
    uneven parts, by its index in the mesh.
    """
    for dim, placement in enumerate(layout.placements):
        if placement.dim is not None and not mesh.is_ascending[dim]:
            raise UnstorableTensorError(
                f"Cannot store {name!r}: its mesh of shape {list(mesh.shape)} has the ranks {list(mesh.ranks)}, which "
                f"do not ascend along dimension {dim}, and torch's operations disagree about the order of their parts. "
                "Create the DeviceMesh with ascending ranks.",
                fqn=name,
            )


def _check_fused(layout: MeshLayout, tensor: DTensor, name: str) -> None:
    """Reject fused weights if this torch does not show whether FSDP or tensor parallelism came first."""
    for splits in _splits(layout.shape, layout.placements, tensor.dim()):
        fused = [axis for axis, groups in splits if groups > 1]
        if fused and min(axis for axis, _ in splits) < max(fused):
            raise UnstorableTensorError(
                f"Cannot store {name!r}: it fuses several weights, and torch {torch.__version__} gives it the same "
                f"placements {tensor.placements} whichever mesh dimension came first. Use torch 2.13 or newer.",
                fqn=name,
            )
