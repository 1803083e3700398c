"""Reads boxes of tensors in files into memory: a call for each run of bytes, or for some at once, in threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, product
from math import prod
from typing import Final, NamedTuple

import numpy as np
import torch
from torch.autograd.graph import increment_version

from hfshard._util.threads import in_threads
from hfshard.distributed.layout import Box, Interval, box_shape, section
from hfshard.distributed.runs import ByteArray, Runs, gather_into
from hfshard.storage.tensors.tensor_bytes import INTEGER_OF_SIZE, memory_of, own_memory
from hfshard.storage.weights.ranged.ranged_shard import RangedShard
from hfshard.storage.weights.safetensors_file import SafetensorsFile

_READERS: Final = 4
"""Threads, as for tensors that are read whole."""
_BLOCK_BYTES: Final = 4 * 1024 * 1024
"""Bytes of a local tensor that one thread reads at once. With 1 MiB, the kernel read two thirds more of a cold disk
than was asked for: it takes the threads for one reader that goes on."""
_STAGED_BYTES: Final = 1024 * 1024
"""The same where a stage is filled and then copied, from a local disk."""
_WINDOW_BYTES: Final = 4 * 1024 * 1024
"""Bytes of a file that are read by one call, with those between the runs, which nobody wants."""
_FAR_GAP_BYTES: Final = 1024 * 1024
"""From a file system of the network, so many bytes come in the time of one more request. A local one is asked for each
run, which takes a microsecond."""


@dataclass(frozen=True, slots=True, eq=False)
class FileTensor:
    """A tensor in a safetensors file."""

    shard: SafetensorsFile | RangedShard
    start: int
    """In the file."""
    dtype: torch.dtype
    is_far: bool
    """Whether the file is read over the network."""


class Part(NamedTuple):
    """What is read of one stored tensor."""

    source: FileTensor | torch.Tensor
    """In a file, or the tensor of a pickle."""
    sizes: tuple[int, ...]
    """The source's shape, to which the box refers; maybe with more dimensions of one element."""
    box: Box
    target: torch.Tensor
    """Of the box's shape."""

    def place(self) -> tuple[str, int]:
        """Where the source lies."""
        return ("", 0) if isinstance(self.source, torch.Tensor) else (self.source.shard.path, self.source.start)


class PartReader:
    """The reads of one call."""

    def __init__(self) -> None:
        self._stages: list[torch.Tensor] = []

    def read_all(self, parts: Sequence[Part]) -> int:
        """Read parts into place, in their order, and return the bytes that were read."""
        jobs = [partial(self.read, block) for part in parts for block in _blocks(part)]
        with torch.no_grad():
            counts = in_threads(lambda job, _: job(), jobs, _READERS)
        increment_version([part.target for part in parts if not part.target.is_inference()])
        return sum(counts)

    def read(self, part: Part) -> int:
        """Read a part into place, and return the bytes that were read."""
        source, sizes, box, target = part
        if isinstance(source, torch.Tensor):
            return _copy_box(source.reshape(sizes), box, target)
        runs = Runs.of_box(sizes, source.dtype.itemsize, box)
        if _is_read_into(target, source.dtype):
            return self._read_runs(source, runs, target)
        with self._stage() as stage:
            raw = stage[: runs.total]
            count_bytes = self._read_runs(source, runs, raw)
            _assign(target, raw.view(source.dtype).view(target.shape))
        return count_bytes

    def _read_runs(self, source: FileTensor, runs: Runs, target: torch.Tensor) -> int:
        """Read runs of a file into a contiguous target, one after another."""
        count_bytes = 0
        offsets = (runs.offsets + source.start).tolist()
        lengths = runs.lengths.tolist()
        positions = runs.positions.tolist()
        memory = memory_of(target)
        with _reading(source.shard) as read_exactly:
            for first, last in _windows(runs, _FAR_GAP_BYTES if source.is_far else 0):
                start, stop = offsets[first], offsets[last - 1] + lengths[last - 1]
                begin, end = positions[first], positions[last - 1] + lengths[last - 1]
                if stop - start == end - begin:
                    read_exactly(memory[begin:end], start)
                else:
                    starts = runs.offsets[first:last] - runs.offsets[first]
                    with self._stage() as stage:
                        window = stage[: stop - start]
                        read_exactly(memory_of(window), start)
                        gather_into(_bytes_of(target)[begin:end], _bytes_of(window), starts, runs.lengths[first:last])
                count_bytes += stop - start
        return count_bytes

    @contextmanager
    def _stage(self) -> Iterator[torch.Tensor]:
        """Borrow bytes that no other thread uses meanwhile."""
        try:
            stage = self._stages.pop()
        except IndexError:
            stage = own_memory((max(_BLOCK_BYTES, _WINDOW_BYTES),), torch.uint8)
        try:
            yield stage
        finally:
            self._stages.append(stage)


def _blocks(part: Part) -> Iterator[Part]:
    """Split a part into ones that are read at once, in row-major order.

    Those of a contiguous target are contiguous.
    """
    sizes = box_shape(part.box)
    elements = prod(sizes)
    if not elements:
        return
    itemsize = part.source.dtype.itemsize
    is_far = isinstance(part.source, FileTensor) and part.source.is_far
    most_bytes = _BLOCK_BYTES if is_far or _is_read_into(part.target, part.source.dtype) else _STAGED_BYTES
    dim = next((dim for dim, size in enumerate(sizes) if size > 1), None)
    if dim is None or elements * itemsize <= most_bytes:
        yield part
        return
    rows = max(1, most_bytes * sizes[dim] // (elements * itemsize))
    for start in range(0, sizes[dim], rows):
        stop = min(start + rows, sizes[dim])
        box = (*part.box[:dim], tuple(section(part.box[dim], start, stop)), *part.box[dim + 1 :])
        yield from _blocks(part._replace(box=box, target=part.target.narrow(dim, start, stop - start)))


def _is_read_into(target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a target has in its memory what a file has."""
    return target.device.type == "cpu" and target.is_contiguous() and _is_plain(target, dtype)


def _is_plain(target: torch.Tensor, dtype: torch.dtype) -> bool:
    return target.dtype == dtype and not (target.is_conj() or target.is_neg())


def _bytes_of(tensor: torch.Tensor) -> ByteArray:
    return np.frombuffer(memory_of(tensor), np.uint8)


def _assign(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor of the same shape: bit for bit, where the dtype is the same."""
    integer = INTEGER_OF_SIZE.get(source.element_size())
    if integer is not None and _is_plain(target, source.dtype) and _is_plain(source, target.dtype):
        target.view(integer).copy_(source.view(integer))
    else:
        target.copy_(source)


def _copy_box(source: torch.Tensor, box: Box, target: torch.Tensor) -> int:
    """Copy a box of a tensor that is mapped or in memory, and return its bytes."""
    placed = [[*zip(_ranges_from_zero(intervals), intervals, strict=True)] for intervals in box]
    for pairs in product(*placed):
        into = tuple(slice(*interval) for interval, _ in pairs)
        _assign(target[into], source[tuple(slice(*interval) for _, interval in pairs)])
    return target.numel() * source.element_size()


def _ranges_from_zero(intervals: tuple[Interval, ...]) -> Iterator[Interval]:
    """Intervals of the same lengths, one after another."""
    stops = accumulate(stop - start for start, stop in intervals)
    return ((end - (stop - start), end) for (start, stop), end in zip(intervals, stops, strict=True))


def _windows(runs: Runs, most_gap: int) -> Iterator[tuple[int, int]]:
    """Group runs that are read at once.

    Yields:
        The first one's number, and the number after the last one's.
    """
    if not most_gap:
        yield from ((number, number + 1) for number in range(len(runs.offsets)))
        return
    starts = runs.offsets
    stops = runs.offsets + runs.lengths
    far_apart = np.flatnonzero(starts[1:] - stops[:-1] > most_gap) + 1
    first = 0
    for end in [*far_apart.tolist(), len(starts)]:
        while first < end:
            last = int(np.searchsorted(stops[first:end], starts[first] + _WINDOW_BYTES, "right")) + first
            last = max(last, first + 1)
            yield first, last
            first = last


@contextmanager
def _reading(shard: SafetensorsFile | RangedShard) -> Iterator[Callable[[memoryview, int], None]]:
    """What fills memory with the bytes of a file from a place on."""
    if isinstance(shard, RangedShard):
        yield lambda target, start: shard.read_into(start, target)
        return
    with shard.opened() as fd:
        yield partial(_read_exactly, shard, fd)


def _read_exactly(shard: SafetensorsFile, fd: int, target: memoryview, start: int) -> None:
    """Fill a target with the bytes of a file from `start` on."""
    while target:
        count = os.preadv(fd, [target], start)
        if count == 0:
            raise shard.truncated_error()
        target = target[count:]
        start += count
