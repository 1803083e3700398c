"""Tensors that another framework has cut into pieces: which bytes of which files they are."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, product
from math import prod
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from hfshard.disk.safe_open import Identity
from hfshard.errors import DamagedCheckpointError, InvalidArgumentError, UnsafePathError
from hfshard.format.file_names import is_safe_file_name

_MOST_PIECES: Final = 1 << 20
"""Limit of all runs besides the first one of each chunk: about 150 MB. A transposed matrix has one per column."""

_WINDOW_BYTES: Final = 4 << 20
"""Bytes of a tensor whose rows are compared at once: at most 4 Mi rows, of one byte each."""


_MOST_BYTES: Final = (1 << 63) - 1
"""As torch counts them."""


@dataclass(frozen=True, slots=True)
class ByteRun:
    """Bytes of a tensor that are in one piece in a file.

    In the tensor, too, they are in one piece, or in rows of `size` bytes at equal distances: the part of a rank that
    has some columns of a matrix.
    """

    file: str
    """Name relative to the directory, separated by "/"."""
    offset: int
    """Position in the file, in bytes."""
    size: int
    """Bytes of a row."""
    start: int
    """Position of the first row in the tensor's bytes, row-major."""
    rows: int = 1
    """Number of rows; in the file, one follows the other."""
    stride: int = 0
    """Bytes from the start of a row to that of the next one in the tensor; at least `size` if there are several."""

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.size * self.rows

    @property
    def end(self) -> int:
        """Position in the tensor's bytes after the last row."""
        return self.start + (self.rows - 1) * self.stride + self.size


@dataclass(frozen=True, slots=True)
class ForeignTensor:
    """A tensor as runs of bytes, little-endian and row-major."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    runs: tuple[ByteRun, ...]
    """Sorted by `start`; they cover each byte exactly once, which `ForeignTable` checks. None of them is empty."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """Bytes of a file whose CRC-32 the file itself has, as each record of a zip does; None: it has none."""

    file: str
    offset: int
    size: int
    crc32: int | None


@dataclass(frozen=True, slots=True)
class ForeignTable:
    """All weights and buffers in a directory of another framework.

    Raises:
        UnsafePathError: A file's name leads out of the directory.
        DamagedCheckpointError: The runs of a tensor don't cover each of its bytes exactly once, or are not in their
            files, or an alias has no tensor.
    """

    directory: str
    """Path of the directory, for messages."""
    framework: str
    """Name and kind, such as "DeepSpeed ZeRO-3, 4 ranks"."""
    tensors: Mapping[str, ForeignTensor]
    """Name in the model -> tensor."""
    sizes: Mapping[str, int]
    """File -> its bytes; of at least all files that have bytes of tensors."""
    identities: Mapping[str, Identity] = field(default_factory=lambda: MappingProxyType({}))
    """File -> what it was when it was described; one that is another when it is opened was replaced."""
    aliases: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Tied name -> name of the tensor with the data."""
    records: tuple[StoredRecord, ...] = ()
    """Records of the files that can be compared with a checksum."""
    trained: Mapping[str, ForeignTensor] = field(default_factory=lambda: MappingProxyType({}))
    """Name -> the weight as it was trained, of which `tensors` has the float32 master, without rows; each is the cast
    of that."""

    def __post_init__(self) -> None:
        """Check the table."""
        everything = [*self.tensors.items(), *self.trained.items()]
        taken = dict.fromkeys(sorted({run.file for _, tensor in everything for run in tensor.runs}), 0)
        for file in taken:
            if not is_safe_file_name(file):
                raise UnsafePathError(
                    f"The {self.framework} checkpoint in '{self.directory}' names the file {file!r:.200}, which is "
                    "outside of it. Do not load it unless you know its origin.",
                    path=self.directory,
                    actual=file,
                )
            if file not in self.sizes:
                raise self._damaged(f"its file '{file}' is missing", f"Copy '{file}' there: it may be on another disk")
        for name in [*self.tensors, *self.aliases]:
            if not name.isprintable() or name in ("", "__metadata__"):
                raise self._damaged(f"it has a tensor of the name {name!r:.200}")
        for name, tensor in everything:
            if (problem := _problem_of(tensor, self.sizes)) is not None:
                raise self._damaged(f"tensor '{name}' of shape {list(tensor.shape)} {problem}", fqn=name)
        for tensor in self.tensors.values():
            for run in tensor.runs:
                taken[run.file] += run.nbytes
        for file, nbytes in taken.items():
            if nbytes > self.sizes[file]:
                raise self._damaged(f"'{file}' has {self.sizes[file]:,} bytes, but {nbytes:,} of tensors")
        for name, tensor in self.tensors.items():
            if any(run.rows > 1 for run in tensor.runs) and not _covers(tensor):
                raise self._damaged(f"pieces of tensor '{name}' overlap", fqn=name)
        for alias, name in self.aliases.items():
            if name not in self.tensors or alias in self.tensors:
                raise self._damaged(f"it ties '{alias}' to '{name}', which is not one of its tensors", fqn=alias)

    @property
    def is_verifiable(self) -> bool:
        """True if the records have the bytes of all tensors, so that each can be compared with a checksum."""
        found: dict[str, list[tuple[int, int]]] = {}
        for record in sorted(self.records, key=lambda record: record.offset):
            found.setdefault(record.file, []).append((record.offset, record.offset + record.size))
        return all(_is_within(run, found.get(run.file, [])) for tensor in self.tensors.values() for run in tensor.runs)

    def _damaged(
        self, problem: str, hint: str = "Copy it again from where it was saved", fqn: str | None = None
    ) -> DamagedCheckpointError:
        return DamagedCheckpointError(
            f"The {self.framework} checkpoint in '{self.directory}' is damaged: {problem}. {hint}.",
            path=self.directory,
            fqn=fqn,
        )


def _problem_of(tensor: ForeignTensor, sizes: Mapping[str, int]) -> str | None:
    """Describe what is wrong with a tensor's runs, other than overlaps of rows; None if nothing is."""
    if any(number < 0 for number in tensor.shape):
        return "has a negative size"
    if prod(max(number, 1) for number in tensor.shape) * tensor.dtype.itemsize > _MOST_BYTES:
        return "is larger than any tensor, or would be with elements"
    nbytes = tensor.nbytes
    at = 0
    for run in tensor.runs:
        if min(run.offset, run.start, run.stride) < 0 or run.size < 1 or run.rows < 1:
            return "has a piece of negative size or offset"
        if run.offset + run.nbytes > sizes[run.file]:
            return f"ends at byte {run.offset + run.nbytes:,} of '{run.file}', which has {sizes[run.file]:,}"
        if run.start < at or run.end > nbytes or (run.rows > 1 and run.stride < run.size):
            return "has pieces that overlap, or are out of its bounds or order"
        at = run.start if run.rows > 1 else run.end
    found = sum(run.nbytes for run in tensor.runs)
    return None if found == nbytes else f"has {found:,} of its {nbytes:,} bytes"


def _is_within(run: ByteRun, ranges: list[tuple[int, int]]) -> bool:
    """Return whether one of the sorted ranges of a file has all bytes of a run."""
    at = bisect_right(ranges, run.offset, key=lambda one: one[0]) - 1
    return at >= 0 and run.offset + run.nbytes <= ranges[at][1]


def _covers(tensor: ForeignTensor) -> bool:
    """Return whether the rows of all runs cover each byte exactly once."""
    for begin in range(0, tensor.nbytes, _WINDOW_BYTES):
        end = min(begin + _WINDOW_BYTES, tensor.nbytes)
        pieces = [_rows_in(run, begin, end) for run in tensor.runs if run.start < end and run.end > begin]
        if not pieces:
            return False
        starts = np.sort(np.concatenate([first for first, _ in pieces]))
        ends = np.sort(np.concatenate([last for _, last in pieces]))
        if starts[0] != begin or ends[-1] != end or (starts[1:] != ends[:-1]).any():
            return False
    return True


def _rows_in(run: ByteRun, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the starts and the ends of a run's rows in a window of the tensor, cut at its bounds."""
    first, last = 0, run.rows
    if run.rows > 1:
        first = max(0, (begin - run.start - run.size) // run.stride)
        last = min(run.rows, (end - run.start) // run.stride + 1)
    starts = run.start + np.arange(first, last, dtype=np.int64) * run.stride
    starts = starts[(starts < end) & (starts + run.size > begin)]
    return np.maximum(starts, begin), np.minimum(starts + run.size, end)


# Chunks: rectangles of a tensor, each in one piece in a file.


class ChunkRuns:
    """Finder of the runs of a checkpoint's chunks, of which there may be so many."""

    def __init__(self, directory: str) -> None:
        """Begin without a run.

        Args:
            directory: For messages.
        """
        self._directory = directory
        self._left = _MOST_PIECES

    def find(
        self,
        fqn: str,
        file: str,
        offset: int,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        offsets: tuple[int, ...],
        sizes: tuple[int, ...],
        order: Iterable[int] | None = None,
    ) -> list[ByteRun]:
        """Find the runs of a chunk.

        Args:
            fqn: The tensor, for a message.
            file: File with the chunk.
            offset: Byte in the file where it begins.
            dtype, shape: Of the tensor.
            offsets, sizes: Position of the chunk in the tensor, and its shape.
            order: Dimensions of the chunk, from the outermost to the innermost in the file; None: row-major.

        Raises:
            InvalidArgumentError: There are too many.
        """
        steps = [dtype.itemsize] * len(shape)
        for at in reversed(range(len(steps) - 1)):
            steps[at] = steps[at + 1] * shape[at + 1]
        start = sum(begin * step for begin, step in zip(offsets, steps, strict=True))
        axes = range(len(shape)) if order is None else order
        runs = _rows_of([(sizes[at], steps[at]) for at in axes], file, offset, start, dtype.itemsize)
        found = list(islice(runs, self._left + 2))
        self._left -= len(found) - 1
        if self._left < 0:
            raise InvalidArgumentError(
                f"'{os.path.join(self._directory, file)}' has tensor '{fqn}' in too many pieces: more than "
                f"{_MOST_PIECES:,}. Nothing was loaded. Save it contiguous(), or cut in its first dimension.",
                path=self._directory,
                fqn=fqn,
            )
        return found


def joined_tensor(dtype: torch.dtype, shape: tuple[int, ...], runs: Iterable[ByteRun]) -> ForeignTensor:
    """Return the tensor that has these runs, in any order."""
    return ForeignTensor(dtype, shape, tuple(sorted(runs, key=lambda run: run.start)))


def _rows_of(axes: list[tuple[int, int]], file: str, offset: int, start: int, itemsize: int) -> Iterator[ByteRun]:
    """Yield the runs of a chunk.

    Of its dimensions, in the order in which the file has them, the innermost ones make the bytes of a row while the
    tensor has them in one piece, too. Those around them make rows as long as their distances are equal. There is a run
    for each index of the others.

    Args:
        axes: Size of each dimension, and bytes from one index to the next in the tensor.
        file, offset: Place of the chunk.
        start: Byte of the tensor where it begins.
        itemsize: Bytes of an element.
    """
    outer = [(size, step) for size, step in axes if size > 1]
    row_bytes = itemsize
    while outer and outer[-1][1] == row_bytes:
        row_bytes *= outer.pop()[0]
    rows, stride = outer.pop() if outer else (1, 0)
    while outer and outer[-1][1] == rows * stride:
        rows *= outer.pop()[0]
    for number, index in enumerate(product(*(range(size) for size, _ in outer))):
        at = start + sum(one * step for one, (_, step) in zip(index, outer, strict=True))
        yield ByteRun(file, offset + number * rows * row_bytes, row_bytes, at, rows, stride)


# A run that another framework has saved in parts: tensors by name as tables, and all else as plain values.

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class ForeignGroup(NamedTuple):
    """A group of an optimizer's parameters."""

    parameters: tuple[str, ...]
    """Names in the model, as the table of weights has them."""
    options: Mapping[str, Any]
    """Plain values: everything of the group but its parameters."""


@dataclass(frozen=True, slots=True)
class ForeignOptimizer:
    """An optimizer's state by the names of parameters."""

    table: ForeignTable
    """Tensors of the state, named "PARAMETER/SLOT", such as "up.weight/exp_avg"."""
    groups: tuple[ForeignGroup, ...]
    slots: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: _NOTHING)
    """Parameter -> slot -> plain value, of what is not in the table: a count of steps."""
    has_groups: bool = True
    """False: only parameters have options. A group has those with equal ones, and may have been several groups."""


@dataclass(frozen=True, slots=True)
class ForeignRun:
    """A run by name. No byte of the tables was read."""

    weights: ForeignTable
    optimizer: ForeignOptimizer | None
    """None: there is none, and the directory has the weights of a model alone."""
    files: Mapping[str, Identity]
    """Path of each file that was read, or has tensors -> its identity."""
    step: int | None = None
    """None if the directory has none."""
    parts: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    """Other parts of a run, by their names in a `TrainingState`: "scheduler" -> its state dict, as plain values."""
    extra: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    """Everything else that the user has saved."""
