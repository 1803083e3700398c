"""Reads boxes of tensors in files into memory: a call for each run of bytes, or for some at once, in threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, product
from typing import Final

import torch
from torch.autograd.graph import increment_version

from hfshard._util.threads import in_threads
from hfshard.distributed.layout import Box, Interval
from hfshard.distributed.parts.by_ranges import RangedParts
from hfshard.distributed.parts.part import (
    BLOCK_BYTES,
    WINDOW_BYTES,
    FileTensor,
    Part,
    assign_bits,
    blocks_of,
    bytes_of,
    is_ranged,
    is_read_into,
    windows_of,
)
from hfshard.distributed.runs import Runs, gather_into
from hfshard.format.digests import Verify
from hfshard.shards.ranged_shard import DEFAULT_MEMORY, RangedShard
from hfshard.shards.shard_file import SafetensorsFile
from hfshard.tensors.stored_tensor import memory_of, own_memory

_READERS: Final = 4
"""Threads, as for tensors that are read whole."""
_FAR_GAP_BYTES: Final = 1024 * 1024
"""From a file system of the network, so many bytes come in the time of one more request. A local one is asked for each
run, which takes a microsecond."""


class PartReader:
    """The reads of one call."""

    def __init__(self, level: Verify = "none") -> None:
        """Read nothing yet; `level` says what is compared of files that are read by ranges (see `Comparison`)."""
        self._level = level
        self._stages: list[torch.Tensor] = []

    def read_all(self, parts: Sequence[Part], memory_bytes: int = DEFAULT_MEMORY, progress: bool | None = False) -> int:
        """Read parts into place, in their order, and return the bytes that were read.

        Args:
            parts: What is read.
            memory_bytes: What reads by ranges may take beside the targets.
            progress: A bar for them.

        Raises:
            IntegrityError: A tensor that was read whole is not what was saved; the targets are overwritten.
        """
        ranged = RangedParts(self._level)
        blocks = [block for part in parts for block in (ranged.add(part) if is_ranged(part) else blocks_of(part))]
        with torch.no_grad():
            count_bytes = ranged.read(memory_bytes, progress)
            count_bytes += sum(in_threads(lambda block, _: self.read(block), blocks, _READERS))
        increment_version([part.target for part in parts if not part.target.is_inference()])
        return count_bytes

    def read(self, part: Part) -> int:
        """Read a part into place, and return the bytes that were read."""
        source, sizes, box, target = part
        if isinstance(source, torch.Tensor):
            return _copy_box(source.reshape(sizes), box, target)
        runs = Runs.of_box(sizes, source.dtype.itemsize, box)
        if is_read_into(target, source.dtype):
            return self._read_runs(source, runs, target)
        with self._stage() as stage:
            raw = stage[: runs.total]
            count_bytes = self._read_runs(source, runs, raw)
            assign_bits(target, raw.view(source.dtype).view(target.shape))
        return count_bytes

    def _read_runs(self, source: FileTensor, runs: Runs, target: torch.Tensor) -> int:
        """Read runs of a file into a contiguous target, one after another."""
        count_bytes = 0
        offsets = (runs.offsets + source.start).tolist()
        lengths = runs.lengths.tolist()
        positions = runs.positions.tolist()
        memory = memory_of(target)
        with _reading(source.shard) as read_exactly:
            for first, last in windows_of(runs, _FAR_GAP_BYTES if source.is_far else 0):
                start, stop = offsets[first], offsets[last - 1] + lengths[last - 1]
                begin, end = positions[first], positions[last - 1] + lengths[last - 1]
                if stop - start == end - begin:
                    read_exactly(memory[begin:end], start)
                else:
                    starts = runs.offsets[first:last] - runs.offsets[first]
                    with self._stage() as stage:
                        window = stage[: stop - start]
                        read_exactly(memory_of(window), start)
                        gather_into(bytes_of(target)[begin:end], bytes_of(window), starts, runs.lengths[first:last])
                count_bytes += stop - start
        return count_bytes

    @contextmanager
    def _stage(self) -> Iterator[torch.Tensor]:
        """Borrow bytes that no other thread uses meanwhile."""
        try:
            stage = self._stages.pop()
        except IndexError:
            stage = own_memory((max(BLOCK_BYTES, WINDOW_BYTES),), torch.uint8)
        try:
            yield stage
        finally:
            self._stages.append(stage)


def _copy_box(source: torch.Tensor, box: Box, target: torch.Tensor) -> int:
    """Copy a box of a tensor that is mapped or in memory, and return its bytes."""
    placed = [[*zip(_ranges_from_zero(intervals), intervals, strict=True)] for intervals in box]
    for pairs in product(*placed):
        into = tuple(slice(*interval) for interval, _ in pairs)
        assign_bits(target[into], source[tuple(slice(*interval) for _, interval in pairs)])
    return target.numel() * source.element_size()


def _ranges_from_zero(intervals: tuple[Interval, ...]) -> Iterator[Interval]:
    """Intervals of the same lengths, one after another."""
    stops = accumulate(stop - start for start, stop in intervals)
    return ((end - (stop - start), end) for (start, stop), end in zip(intervals, stops, strict=True))


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
