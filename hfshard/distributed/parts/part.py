"""What is read of a stored tensor into which memory, in blocks, and which stretches of a file that takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Final, NamedTuple

import numpy as np
import torch

from hfshard.distributed.layout import Box, box_shape, section
from hfshard.distributed.runs import ByteArray, Runs
from hfshard.shards.ranged_shard import RangedShard
from hfshard.shards.shard_file import SafetensorsFile
from hfshard.tensors.stored_tensor import INTEGER_OF_SIZE, memory_of

BLOCK_BYTES: Final = 4 * 1024 * 1024
"""Bytes of a local tensor that one thread reads at once. With 1 MiB, the kernel read two thirds more of a cold disk
than was asked for: it takes the threads for one reader that goes on."""
_STAGED_BYTES: Final = 1024 * 1024
"""The same where a stage is filled and then copied, from a local disk."""
WINDOW_BYTES: Final = 4 * 1024 * 1024
"""Bytes of a file that are read by one call, with those between the runs, which nobody wants."""


@dataclass(frozen=True, slots=True, eq=False)
class FileTensor:
    """A tensor in a safetensors file."""

    shard: SafetensorsFile | RangedShard
    name: str
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


def is_ranged(part: Part) -> bool:
    """Whether a part is in a file that is read by ranges."""
    return isinstance(part.source, FileTensor) and isinstance(part.source.shard, RangedShard)


def blocks_of(part: Part, block_bytes: int = 0) -> Iterator[Part]:
    """Split a part into ones that are read at once, in row-major order.

    Those of a contiguous target are contiguous.

    Args:
        part: What is read.
        block_bytes: The most bytes of a block; 0: as suits the file and the target.
    """
    sizes = box_shape(part.box)
    elements = prod(sizes)
    if not elements:
        return
    itemsize = part.source.dtype.itemsize
    is_far = isinstance(part.source, FileTensor) and part.source.is_far
    most_bytes = BLOCK_BYTES if is_far or is_read_into(part.target, part.source.dtype) else _STAGED_BYTES
    most_bytes = block_bytes or most_bytes
    dim = next((dim for dim, size in enumerate(sizes) if size > 1), None)
    if dim is None or elements * itemsize <= most_bytes:
        yield part
        return
    rows = max(1, most_bytes * sizes[dim] // (elements * itemsize))
    for start in range(0, sizes[dim], rows):
        stop = min(start + rows, sizes[dim])
        box = (*part.box[:dim], tuple(section(part.box[dim], start, stop)), *part.box[dim + 1 :])
        yield from blocks_of(part._replace(box=box, target=part.target.narrow(dim, start, stop - start)), block_bytes)


def is_read_into(target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a target has in its memory what a file has."""
    return target.device.type == "cpu" and target.is_contiguous() and _is_plain(target, dtype)


def _is_plain(target: torch.Tensor, dtype: torch.dtype) -> bool:
    return target.dtype == dtype and not (target.is_conj() or target.is_neg())


def bytes_of(tensor: torch.Tensor) -> ByteArray:
    """The bytes of a contiguous CPU tensor, not copied."""
    return np.frombuffer(memory_of(tensor), np.uint8)


def assign_bits(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor of the same shape: bit for bit, where the dtype is the same."""
    integer = INTEGER_OF_SIZE.get(source.element_size())
    if integer is not None and _is_plain(target, source.dtype) and _is_plain(source, target.dtype):
        target.view(integer).copy_(source.view(integer))
    else:
        target.copy_(source)


def windows_of(runs: Runs, most_gap: int) -> Iterator[tuple[int, int]]:
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
            last = int(np.searchsorted(stops[first:end], starts[first] + WINDOW_BYTES, "right")) + first
            last = max(last, first + 1)
            yield first, last
            first = last
