"""Parameters that DeepSpeed's ranks have in partitions: tensors that are end to end in the files of several ranks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from math import prod
from typing import Final, NamedTuple

import torch

from hfshard._util.text import shorten_list
from hfshard.foreign.byte_runs import ByteRun, ForeignTensor
from hfshard.foreign.deepspeed_files import ModelStates, OptimizerStates, Shapes, TensorInFile
from hfshard.foreign.described_values import damaged
from hfshard.pickles.described_file import is_count

_ALIGNMENT: Final = 2
"""A group of ZeRO 1 and 2 is padded to a multiple of this per rank."""
_SHOWN: Final = 8
"""The most numbers in a message."""


class SplitGroups:
    """Parameters under ZeRO 1 and 2: those of a group are end to end, and cut into equal partitions."""

    def __init__(self, folder: str, groups: Sequence[Shapes], partitions: Sequence[OptimizerStates]) -> None:
        """Find where they are.

        Args:
            folder: For messages.
            groups: Parameters of each group.
            partitions: The ranks' files.
        """
        self._folder = folder
        self._groups = [_group_of(folder, number, shapes, partitions) for number, shapes in enumerate(groups)]

    def fits(self, rank: int, number: int, numel: int) -> bool:
        """Return whether a flat tensor of a rank has one value for each element, with or without padding."""
        group = self._groups[number]
        return min(max(group.total - rank * group.size, 0), group.size) <= numel <= group.size

    def join(self, flats: Sequence[Sequence[TensorInFile | None]]) -> dict[str, ForeignTensor]:
        """Join the parameters of flat tensors; of groups for which there are none, nothing.

        Args:
            flats: Per rank: a tensor of each group.
        """
        found: dict[str, ForeignTensor] = {}
        for group, pieces in zip(self._groups, zip(*flats, strict=True), strict=True):
            present = [piece for piece in pieces if piece is not None]
            if not present:
                continue
            dtype = _common_dtype(self._folder, present)
            flat = _Flat((rank * group.size, piece) for rank, piece in enumerate(present))
            for name, shape in group.shapes.items():
                found[name] = ForeignTensor(dtype, shape, tuple(flat.runs(group.begins[name], prod(shape), 0)))
        return found


class _Group(NamedTuple):
    """A group of parameters end to end."""

    shapes: Shapes
    begins: Mapping[str, int]
    """Element at which each parameter begins."""
    total: int
    """Elements, without the padding at the end."""
    size: int
    """Elements of a rank's partition."""


def _group_of(folder: str, number: int, shapes: Shapes, partitions: Sequence[OptimizerStates]) -> _Group:
    gaps = _gaps(folder, number, len(shapes), partitions)
    begins = {}
    total = 0
    for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
        begins[name] = total
        total += prod(shape) + gap
    size = _partition_size(folder, total, [one.masters[number] for one in partitions])
    for rank, one in enumerate(partitions):
        for name, (count, start) in (one.slices[number] if number < len(one.slices) else {}).items():
            begin = begins.get(name, -1)
            low = max(begin, rank * size)
            expected = min(begin + prod(shapes.get(name, ())), (rank + 1) * size) - low
            if begin < 0 or (count, start) != (expected, low - rank * size):
                raise damaged(folder, f"'{one.file}' has parameter '{name}' in another place than its shape says", name)
    return _Group(shapes, begins, total, size)


def _gaps(folder: str, number: int, count: int, partitions: Sequence[OptimizerStates]) -> list[int]:
    """Return the elements of padding after each parameter of a group of ZeRO 1 and 2, which all ranks must have."""
    found = [0] * count
    for one in partitions:
        gaps = found if one.gaps is None else next(iter(one.gaps[number : number + 1]), None)
        if not isinstance(gaps, list) or len(gaps) != count or not all(map(is_count, gaps)):
            raise damaged(folder, f"'{one.file}' has other paddings than one for each parameter of a group")
        if one is partitions[0]:
            found = gaps
        if gaps != found:
            raise damaged(folder, f"'{one.file}' and '{partitions[0].file}' have different paddings")
    return found


def _partition_size(folder: str, total: int, pieces: Sequence[TensorInFile]) -> int:
    """Find how many elements of a group each rank has, padding included.

    Args:
        folder: For the message.
        total: Elements of the group, without the padding at its end.
        pieces: The ranks' partitions, each with its padding or without.
    """
    ranks = len(pieces)
    sizes = [piece.tensor.numel for piece in pieces]
    for alignment in (_ALIGNMENT * ranks, ranks):
        size = -(-total // alignment) * alignment // ranks
        if all(min(max(total - rank * size, 0), size) <= found <= size for rank, found in enumerate(sizes)):
            return size
    shown = shorten_list([str(size) for size in sizes], _SHOWN)
    raise damaged(folder, f"'{pieces[0].file}' and its peers have {shown} elements of a group of {total}")


class SplitParameters:
    """Parameters under ZeRO 3: each is cut into equal parts, and a rank's parts are end to end, over its sub-groups."""

    def __init__(self, folder: str, groups: Sequence[Shapes], partitions: Sequence[OptimizerStates]) -> None:
        """Check that they are complete; see `SplitGroups`."""
        self._folder = folder
        self._shapes = [*chain.from_iterable(shapes.items() for shapes in groups)]
        self._numels = [[piece.tensor.numel for piece in one.masters] for one in partitions]
        expected = sum(-(-prod(shape) // len(partitions)) for _, shape in self._shapes)
        for one, numels in zip(partitions, self._numels, strict=True):
            if sum(numels) != expected:
                raise damaged(folder, f"'{one.file}' has {sum(numels)} elements of parameters that need {expected}")

    def fits(self, rank: int, number: int, numel: int) -> bool:
        """Return whether a flat tensor of a rank's sub-group has one value for each element."""
        return numel == self._numels[rank][number]

    def join(self, flats: Sequence[Sequence[TensorInFile | None]]) -> dict[str, ForeignTensor]:
        """Join the parameters of flat tensors; of parameters for which there are none, nothing.

        Args:
            flats: Per rank: a tensor of each sub-group.
        """
        ranks = len(flats)
        dtype = _common_dtype(self._folder, [piece for own in flats for piece in own if piece is not None])
        ranges = [
            _Flat(
                (begin, piece)
                for begin, piece in zip(accumulate(numels, initial=0), own, strict=False)
                if piece is not None
            )
            for numels, own in zip(self._numels, flats, strict=True)
        ]
        found = {}
        at = 0
        for name, shape in self._shapes:
            part = -(-prod(shape) // ranks)
            runs: list[ByteRun] = []
            for rank, flat in enumerate(ranges):
                count = min(part, max(prod(shape) - rank * part, 0))
                runs += flat.runs(at, count, rank * part * dtype.itemsize)
            if runs or not prod(shape):
                found[name] = ForeignTensor(dtype, shape, tuple(runs))
            at += part
        return found


def join_frozen(folder: str, models: Sequence[ModelStates]) -> dict[str, ForeignTensor]:
    """Join frozen parameters under ZeRO 3, which are cut like trained ones, but are tensors of their own."""
    found = {}
    for name, shape in models[0].frozen_shapes.items():
        part = -(-prod(shape) // len(models))
        pieces = []
        for one in models:
            piece = one.frozen.get(name)
            if piece is None or piece.tensor.numel != part:
                raise damaged(folder, f"'{one.file}' lacks its part of the frozen parameter '{name}'", name)
            pieces.append(piece)
        dtype = _common_dtype(folder, pieces, is_flat=False)
        flat = _Flat((rank * part, piece) for rank, piece in enumerate(pieces))
        found[name] = ForeignTensor(dtype, shape, tuple(flat.runs(0, prod(shape), 0)))
    return found


class _Flat:
    """Tensors end to end as one, of which ranges are taken."""

    def __init__(self, pieces: Iterable[tuple[int, TensorInFile]]) -> None:
        """Place the tensors.

        Args:
            pieces: Position of the first element -> tensor; sorted.
        """
        self._pieces = list(pieces)
        self._begins = [begin for begin, _ in self._pieces]

    def runs(self, begin: int, count: int, start: int) -> Iterator[ByteRun]:
        """Return a range of elements as runs; fewer where there is a hole.

        Args:
            begin: Position of the first element.
            count: Number of elements.
            start: Byte in the complete tensor where they begin.
        """
        at = max(bisect_right(self._begins, begin) - 1, 0)
        end = begin + count
        for number in range(at, len(self._pieces)):
            first, piece = self._pieces[number]
            if first >= end:
                return
            low = max(begin, first)
            high = min(end, first + piece.tensor.numel)
            if low < high:
                itemsize = piece.tensor.dtype.itemsize
                yield piece.run(low - first, high - low, start + (low - begin) * itemsize)


def _common_dtype(folder: str, pieces: Collection[TensorInFile], *, is_flat: bool = True) -> torch.dtype:
    """Return the dtype of tensors that are parts of one."""
    dtypes = {piece.tensor.dtype for piece in pieces}
    if len(dtypes) > 1:
        raise damaged(folder, f"the ranks have parts of different dtypes: {sorted(map(str, dtypes))}")
    if not dtypes:
        raise damaged(folder, "it has no groups of parameters")
    if is_flat and any(len(piece.tensor.shape) != 1 for piece in pieces):
        raise damaged(folder, "a group of parameters is not flat")
    return dtypes.pop()
