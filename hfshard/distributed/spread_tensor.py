"""A tensor that is spread over ranks, as one of them sees it; and its part's byte positions in the full tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from hfshard.distributed.layout import (
    Box,
    Coordinate,
    Interval,
    MeshLayout,
    Placement,
    box_elements,
    box_shape,
    clip_box,
    held_before,
    held_box,
    local_slices,
    mesh_layout_of,
    single_run,
)
from hfshard.errors import UnstorableTensorError
from hfshard.tensors.flat_tensor import FlatTensor, PartOfTensor
from hfshard.tensors.state_dict import is_spread_tensor, local_tensor, reject_sharded_tensors
from hfshard.tensors.stored_tensor import check_storable

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True, eq=False)
class SpreadTensor(PartOfTensor):
    """A tensor to store, of which this rank has a part, a copy, or nothing.

    It may be a rectangle of the tensor that the ranks have, such as one expert in a parameter of all experts. Then its
    bytes are those of the rectangle, and its shape may lack dimensions in which the rectangle has one element. It may
    also be an interval of a flat tensor of one dimension, whose ranks have intervals that end anywhere in a row.
    """

    shape: tuple[int, ...]
    """Of what is stored."""
    dtype: torch.dtype
    mesh: MeshLayout
    """The spread of the source."""
    source_shape: tuple[int, ...]
    """Of the full tensor that the ranks have."""
    window: tuple[Interval, ...] | None
    """The rectangle of the source that is stored, an interval per dimension; None: all of it."""
    coordinate: Coordinate | None
    """This rank's position in the mesh; None: it has no part."""
    local: torch.Tensor
    """This rank's part of the source, on its device; it shares the model's memory."""
    is_own: bool = False
    """True if `local` has only what is stored: of a flat source, or in memory of its own; see `with_part`."""

    @classmethod
    def of(cls, tensor: DTensor | FlatTensor, name: str) -> Self:
        """Describe a DTensor or a `FlatTensor`, without contacting another rank.

        Args:
            tensor: On any device.
            name: For errors.

        Raises:
            UnstorableTensorError: Its placements or its local tensor cannot be stored.
        """
        shape = source_shape = tuple(tensor.shape)
        window: tuple[Interval, ...] | None = None
        if isinstance(tensor, FlatTensor):
            flat = tensor.flat
            mesh = MeshLayout((len(flat.ranks),), flat.ranks, (Placement(0 if flat.is_cut else None),))
            coordinate = dict(mesh.coordinates()).get(dist.get_rank())
            source_shape = (flat.elements,)
            window = ((flat.first, flat.first + prod(shape)),)
        else:
            mesh = mesh_layout_of(tensor, name)
            found = tensor.device_mesh.get_coordinate()
            coordinate = None if found is None else tuple(found)
        local = local_tensor(tensor)
        spread = cls(shape, tensor.dtype, mesh, source_shape, window, coordinate, local, is_own=window is not None)
        spread._check(name)
        return spread

    def view(self, window: Sequence[Interval], shape: tuple[int, ...]) -> Self:
        """Return a rectangle of the source, to be stored under a name of its own.

        Args:
            window: One interval per dimension of the source; of a flat source, per dimension of this tensor.
            shape: Of what is stored: the rectangle's, with or without dimensions of one element.

        Raises:
            UnstorableTensorError: The source is flat, and the rectangle is not one interval of it.
        """
        inside = source = tuple(window)
        if self.window is not None:  # the source is flat
            run = single_run(self.shape, tuple((interval,) for interval in window))
            if run is None:
                raise UnstorableTensorError(
                    f"Cannot store columns {list(window)} of a tensor of shape {list(self.shape)} by themselves: each "
                    "rank has an interval of its elements. Save with save_original_format=False."
                )
            first = self.window[0][0]
            inside, source = (run,), ((first + run[0], first + run[1]),)
        local = self.local
        if self.is_own and self.coordinate is not None and local.numel():  # an empty one may have any shape
            local = local[local_slices(self.stored_box, inside)]
        return replace(self, shape=shape, window=source, local=local)

    @property
    def stored_box(self) -> Box:
        """This rank's box within the rectangle that is stored."""
        if self.coordinate is None:
            return tuple(() for _ in self.stored_sizes)
        box = held_box(self.source_shape, self.mesh, self.coordinate)
        return box if self.window is None else clip_box(box, self.window)

    @property
    def stored_sizes(self) -> tuple[int, ...]:
        """The shape that boxes and runs refer to: that of what is stored, with all dimensions of the source.

        For a scalar that this rank lacks it is (1,), because only a box with a dimension can be empty.
        """
        if self.coordinate is None and not self.source_shape:
            return (1,)
        return window_sizes(self.source_shape, self.window)

    def runs(self) -> Runs:
        """Compute the positions of this rank's bytes among those that are stored."""
        return Runs.of_box(self.stored_sizes, self.dtype.itemsize, self.stored_box)

    def part(self) -> torch.Tensor:
        """Return this rank's part of what is stored: a view of the local tensor. An empty one may have any shape."""
        if self.is_own or self.window is None or self.coordinate is None or not self.local.numel():
            return self.local
        box = held_box(self.source_shape, self.mesh, self.coordinate)
        return self.local[local_slices(box, self.window)]

    def with_part(self, part: torch.Tensor) -> Self:
        """Return the same part of the tensor in other memory.

        Args:
            part: Of the shape of what `part` returns.
        """
        return replace(self, dtype=part.dtype, local=part, is_own=True)

    def _check(self, name: str) -> None:
        """Reject a local tensor that cannot be stored, or is not what the placements say."""
        check_storable(name, self.local)
        if self.coordinate is None:
            return
        expected = box_shape(self.stored_box)
        if tuple(self.local.shape) != expected and (self.local.numel() or prod(expected)):
            raise UnstorableTensorError(
                f"Cannot store {name!r}: this rank has a part of shape {list(self.local.shape)}, but its placements "
                f"say {list(expected)}. Create the DTensor with distribute_tensor, or pass from_local its shape and "
                "stride.",
                fqn=name,
                expected=expected,
                actual=tuple(self.local.shape),
            )


def window_sizes(source_shape: tuple[int, ...], window: Sequence[Interval] | None) -> tuple[int, ...]:
    """Return the shape that boxes and runs of a rectangle refer to; for None, the source's own."""
    return source_shape if window is None else tuple(stop - start for start, stop in window)


def with_spread_tensors(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy with a `SpreadTensor` for each DTensor and `FlatTensor`; the other values stay.

    Args:
        tensors: Not changed.

    Raises:
        UnstorableTensorError: One cannot be stored. No other rank was contacted.
    """
    reject_sharded_tensors(tensors)
    return {name: SpreadTensor.of(value, name) if is_spread_tensor(value) else value for name, value in tensors.items()}


# A box's bytes in the full tensor: contiguous runs, found for a range of bytes at a time.


Positions = NDArray[np.int64]
"""Byte positions, or numbers of bytes."""
ByteArray = NDArray[np.uint8]
"""One dimension; contiguous."""


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Contiguous ranges of a tensor's row-major bytes, ascending, and their positions in a local tensor's bytes."""

    offsets: Positions
    """The start of each in the full tensor, in bytes."""
    lengths: Positions
    """In bytes; none is 0."""
    positions: Positions
    """The start of each in the row-major bytes of the local tensor."""

    @property
    def total(self) -> int:
        """The total number of bytes."""
        return int(self.lengths.sum())

    @classmethod
    def none(cls) -> Self:
        """Return the runs of a rank that has nothing."""
        nothing = np.zeros(0, np.int64)
        return cls(nothing, nothing, nothing)

    @classmethod
    def of_box(cls, shape: tuple[int, ...], itemsize: int, box: Box) -> Self:
        """Compute all runs of a box.

        A column shard has one run per row of the tensor: for other ranks' parts, get a range at a time from `BoxRuns`.

        Args:
            shape: Of the whole tensor.
            itemsize: Bytes of an element.
            box: The part of it that a rank has.

        Example:
            >>> runs = Runs.of_box((2, 4), 2, (((0, 2),), ((1, 3),)))
            >>> runs.offsets.tolist(), runs.lengths.tolist(), runs.positions.tolist()
            ([2, 10], [4, 4], [0, 4])
        """
        if not box_elements(box):
            return cls.none()
        inner = len(shape) - 1
        while inner > 0 and box[inner] == ((0, shape[inner]),):
            inner -= 1
        stride = prod(shape[inner + 1 :]) * itemsize
        bounds = np.array(box[inner] if shape else ((0, 1),), np.int64) * stride
        offsets = bounds[:, 0]
        lengths: Positions = bounds[:, 1] - bounds[:, 0]
        for dim in range(inner - 1, -1, -1):
            stride *= shape[dim + 1]
            indices = np.concatenate([np.arange(start, stop, dtype=np.int64) for start, stop in box[dim]])
            offsets = (indices[:, None] * stride + offsets).ravel()
            lengths = np.tile(lengths, len(indices))
        return cls(offsets, lengths, np.cumsum(lengths) - lengths)

    def clip(self, start: int, stop: int) -> Self:
        """Return the runs, and parts of runs, in a range of the full tensor's bytes.

        Args:
            start: The first byte.
            stop: The byte after the last one.
        """
        if start >= stop:
            return self.none()
        ends = self.offsets + self.lengths
        some = slice(int(np.searchsorted(ends, start, "right")), int(np.searchsorted(self.offsets, stop, "left")))
        offsets: Positions = np.maximum(self.offsets[some], start)
        stops: Positions = np.minimum(ends[some], stop)
        return type(self)(offsets, stops - offsets, self.positions[some] + (offsets - self.offsets[some]))


@dataclass(frozen=True, slots=True)
class BoxRuns:
    """The runs of a box, none of which is stored: those of a thousand ranks' parts of a tensor would fill gigabytes."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    itemsize: int
    """Bytes of an element."""
    box: Box
    """The part of it that a rank has."""

    @property
    def total(self) -> int:
        """The total number of bytes."""
        return box_elements(self.box) * self.itemsize

    def clip(self, start: int, stop: int) -> Runs:
        """Return what `Runs.clip` returns, in a time that depends on the range alone.

        Args:
            start: The first byte of the whole tensor.
            stop: The byte after the last one.
        """
        stop = min(stop, prod(self.shape) * self.itemsize)
        if start >= stop or not self.total:
            return Runs.none()
        box, passed = self._narrowed(start, stop)
        runs = Runs.of_box(self.shape, self.itemsize, box)
        return Runs(runs.offsets, runs.lengths, runs.positions + passed).clip(start, stop)

    def _narrowed(self, start: int, stop: int) -> tuple[Box, int]:
        """Return the rows of the box that a range touches, and the number of the local tensor's bytes before them.

        If the range is within one row of the first dimension, the box is narrowed in the next one, too.
        """
        box = list(self.box)
        sizes = box_shape(self.box)
        stride = prod(self.shape) * self.itemsize
        passed = row_start = 0
        for dim, size in enumerate(self.shape):
            stride //= size
            first = (start - row_start) // stride
            last = -(-(stop - row_start) // stride)
            passed += held_before(box[dim], first) * prod(sizes[dim + 1 :]) * self.itemsize
            box[dim] = _within(box[dim], first, last)
            if last - first > 1:
                break
            row_start += first * stride
        return tuple(box), passed


def _within(intervals: tuple[Interval, ...], first: int, last: int) -> tuple[Interval, ...]:
    found = ((max(start, first), min(stop, last)) for start, stop in intervals)
    return tuple((start, stop) for start, stop in found if start < stop)


def gather_into(target: ByteArray, source: ByteArray, starts: Positions, lengths: Positions) -> None:
    """Copy byte ranges to the beginning of a target, one after another.

    Args:
        target: At least as long as the ranges together; changed.
        source: The bytes.
        starts: The starts of the ranges in the source.
        lengths: Of the ranges.
    """
    for begin, end, done in _regular(starts, lengths):
        rows = _rows(source, starts, lengths, begin, end)
        target[done : done + rows.size].reshape(rows.shape)[...] = rows


def scatter_into(target: ByteArray, starts: Positions, lengths: Positions, source: ByteArray) -> None:
    """Copy consecutive bytes to ranges of a target: the inverse of `gather_into`.

    Args:
        target: Changed.
        starts: The starts of the ranges in the target.
        lengths: Of the ranges.
        source: At least as long as the ranges together.
    """
    for begin, end, done in _regular(starts, lengths):
        rows = _rows(target, starts, lengths, begin, end)
        rows[...] = source[done : done + rows.size].reshape(rows.shape)


def _regular(starts: Positions, lengths: Positions) -> Iterator[tuple[int, int, int]]:
    """Group ranges that are equally long and equally far apart: numpy copies such a group at once.

    Yield the first one's number, the number after the last one's, and the bytes of all ranges before.
    """
    count = len(starts)
    if not count:
        return
    before = (np.cumsum(lengths) - lengths).tolist()
    is_alike = (lengths[2:] == lengths[1:-1]) & (lengths[1:-1] == lengths[:-2]) & (np.diff(starts, 2) == 0)
    begin = 0
    for end in [*(np.flatnonzero(~is_alike) + 2).tolist(), count]:  # numbers of the ranges unlike the two before them
        while end - begin > (0 if end == count else 1):
            group_end = end if end - begin > 2 else begin + 1
            yield begin, group_end, before[begin]
            begin = group_end


def _rows(memory: ByteArray, starts: Positions, lengths: Positions, begin: int, end: int) -> ByteArray:
    """Return a group of ranges as the rows of a matrix, which is a view of the memory."""
    start = int(starts[begin])
    length = int(lengths[begin])
    if end - begin == 1:
        return memory[start : start + length].reshape(1, length)
    step = int(starts[begin + 1]) - start
    last = start + (end - begin - 1) * step + length
    view: Any = np.lib.stride_tricks.as_strided(memory[start:last], (end - begin, length), (step, 1))
    return view  # type: ignore[no-any-return]
