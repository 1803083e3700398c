"""Read a rank's part of stored tensors straight into its local tensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, product
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch
from torch.autograd.graph import increment_version

from hfshard._util.threads import in_threads
from hfshard.distributed.layout import Box, Interval, box_shape, section, whole_box
from hfshard.distributed.runs import ByteArray, Runs, gather_into
from hfshard.distributed.spread_tensor import SpreadTensor
from hfshard.errors import InvalidArgumentError, StateDictMismatchError, UnstorableTensorError
from hfshard.state_dicts.dtensors import is_dtensor
from hfshard.storage.checkpoint.checkpoint import OpenCheckpoint
from hfshard.storage.disk.file_system import is_remote
from hfshard.storage.tensors.tensor_bytes import INTEGER_OF_SIZE, lies_in_storage, memory_of, own_memory
from hfshard.storage.weights.safetensors_file import SafetensorsFile

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class BoxTarget(NamedTuple):
    """A tensor that is filled with a box of a stored one."""

    box: Box
    """Of the stored tensor."""
    tensor: torch.Tensor
    """Of the box's shape."""


Target = torch.Tensor | SpreadTensor | BoxTarget
"""What is filled: a tensor; or this rank's part of one, of a DTensor or, where what is stored is a rectangle of it, of
a `SpreadTensor`; or a tensor for a box of what is stored."""

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


def read_parts(checkpoint: OpenCheckpoint, wanted: Iterable[tuple[str, Target]], *, is_far: bool | None = None) -> int:
    """Read stored tensors, or this rank's parts of them, into place. No other rank is asked.

    Args:
        checkpoint: Open.
        wanted: Names of stored tensors, or names that are tied to them, each with what it fills. One may fill several.
            Where a target has another dtype, the values are cast.
        is_far: Whether to read as from a file system of the network; None: as each file lies.

    Returns:
        Bytes that were read: of the parts, and between runs that were read at once.

    Raises:
        StateDictMismatchError: There is no such tensor, or it has another shape; nothing was read.
        InvalidArgumentError: A target has no memory, or what this rank holds of it is not known; nothing was read.
        DamagedCheckpointError: This torch does not know a dtype, or a file was truncated since it was opened.

    Example:
        with open_checkpoint(directory) as checkpoint:
            read_parts(checkpoint, [("encoder.weight", encoder.weight)])
    """
    return prepare_reads(checkpoint, wanted, is_far=is_far)()


def prepare_reads(
    checkpoint: OpenCheckpoint, wanted: Iterable[tuple[str, Target]], *, is_far: bool | None = None
) -> Callable[[], int]:
    """Check what `read_parts` checks, and return what then reads.

    Raises:
        What `read_parts` raises before anything is read.
    """
    reader = _Reader(checkpoint, is_far)
    parts = [reader.part(name, target) for name, target in wanted]
    return partial(reader.read_all, sorted(parts, key=_Part.place))


def stored_tensors(checkpoint: OpenCheckpoint) -> dict[str, torch.Tensor]:
    """Describe each tensor of a checkpoint by a meta tensor of its dtype and shape, under tied names, too.

    Args:
        checkpoint: Open.

    Raises:
        DamagedCheckpointError: This torch does not know a dtype.
    """
    found = {name: shard.described(name) for shard in checkpoint.shards.values() for name in shard.header.tensors}
    for pickled in checkpoint.pickles.values():
        found |= {name: torch.empty_like(tensor, device="meta") for name, tensor in pickled.tensors.items()}
    return found | {name: found[kept] for name, kept in checkpoint.index.tied_names.items() if kept in found}


@dataclass(frozen=True, slots=True, eq=False)
class _FileTensor:
    """A tensor in a safetensors file."""

    shard: SafetensorsFile
    start: int
    """In the file."""
    dtype: torch.dtype
    is_far: bool
    """Whether the file is read over the network."""


class _Part(NamedTuple):
    """What is read of one stored tensor."""

    source: _FileTensor | torch.Tensor
    """In a file, or the tensor of a pickle."""
    sizes: tuple[int, ...]
    """The source's shape, to which the box refers; maybe with more dimensions of one element."""
    box: Box
    target: torch.Tensor
    """Of the box's shape."""

    def place(self) -> tuple[str, int]:
        """Where the source lies."""
        return ("", 0) if isinstance(self.source, torch.Tensor) else (self.source.shard.path, self.source.start)


class _Reader:
    """The reads of one call."""

    def __init__(self, checkpoint: OpenCheckpoint, is_far: bool | None) -> None:
        self._checkpoint = checkpoint
        devices = {shard.identity[0] for shard in checkpoint.shards.values()}
        self._far = {device: is_remote(device) if is_far is None else is_far for device in devices}
        self._stages: list[torch.Tensor] = []

    def part(self, name: str, target: Target) -> _Part:
        """Find out what is read into a target.

        Raises:
            What `read_parts` raises before anything is read.
        """
        source, shape = self._source(name)
        if isinstance(target, BoxTarget):
            part = _Part(source, shape, target.box, target.tensor.detach())
            _check_target(name, part)
            return part
        whole = _spread(target, name) if is_dtensor(target) else target
        if isinstance(whole, SpreadTensor):
            part = _Part(source, whole.stored_sizes, whole.stored_box, whole.part().detach())
        else:
            part = _Part(source, tuple(whole.shape), whole_box(whole.shape), whole.detach())
        expected = tuple(whole.shape)
        if shape != expected:
            raise StateDictMismatchError(
                f"Tensor '{name}' of the checkpoint '{self._checkpoint.directory}' has the shape {list(shape)}, not "
                f"{list(expected)}, and nothing was loaded. To see the names and shapes, run: "
                f"hfshard inspect --tensors {self._checkpoint.directory}",
                path=self._checkpoint.directory,
                fqn=name,
                mismatched_keys=((name, shape, expected),),
            )
        _check_target(name, part)
        return part

    def read_all(self, parts: Sequence[_Part]) -> int:
        """Read parts into place, in their order, and return the bytes that were read."""
        jobs = [partial(self.read, block) for part in parts for block in _blocks(part)]
        with torch.no_grad():
            counts = in_threads(lambda job, _: job(), jobs, _READERS)
        increment_version([part.target for part in parts if not part.target.is_inference()])
        return sum(counts)

    def read(self, part: _Part) -> int:
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

    def _source(self, name: str) -> tuple[_FileTensor | torch.Tensor, tuple[int, ...]]:
        """Find a stored tensor, and its shape in torch."""
        index = self._checkpoint.index
        stored = index.tied_names.get(name, name)
        file = index.weight_map.get(stored)
        if file in self._checkpoint.shards:
            shard = self._checkpoint.shards[file]
            described = shard.described(stored)
            start = shard.header.data_start + shard.header.tensors[stored].begin
            far = self._far[shard.identity[0]]
            return _FileTensor(shard, start, described.dtype, far), tuple(described.shape)
        if file in self._checkpoint.pickles:
            tensor = self._checkpoint.pickles[file].tensors[stored]
            return tensor, tuple(tensor.shape)
        raise StateDictMismatchError(
            f"The checkpoint '{self._checkpoint.directory}' has no tensor '{name}', and nothing was loaded. To see the "
            f"names, run: hfshard inspect --tensors {self._checkpoint.directory}",
            path=self._checkpoint.directory,
            fqn=name,
            missing_keys=(name,),
        )

    def _read_runs(self, source: _FileTensor, runs: Runs, target: torch.Tensor) -> int:
        """Read runs of a file into a contiguous target, one after another."""
        count_bytes = 0
        offsets = (runs.offsets + source.start).tolist()
        lengths = runs.lengths.tolist()
        positions = runs.positions.tolist()
        memory = memory_of(target)
        with source.shard.opened() as fd:
            for first, last in _windows(runs, _FAR_GAP_BYTES if source.is_far else 0):
                start, stop = offsets[first], offsets[last - 1] + lengths[last - 1]
                begin, end = positions[first], positions[last - 1] + lengths[last - 1]
                if stop - start == end - begin:
                    _read_exactly(source.shard, fd, memory[begin:end], start)
                else:
                    starts = runs.offsets[first:last] - runs.offsets[first]
                    with self._stage() as stage:
                        window = stage[: stop - start]
                        _read_exactly(source.shard, fd, memory_of(window), start)
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


def _spread(target: DTensor, name: str) -> SpreadTensor:
    """Describe a DTensor; it must be one that could be stored, too."""
    try:
        return SpreadTensor.of(target, name)
    except UnstorableTensorError as error:
        problem = error.message.partition(": ")[2]
        raise InvalidArgumentError(f"Can't load into '{name}', and nothing was loaded: {problem}", fqn=name) from error


def _check_target(name: str, part: _Part) -> None:
    """Refuse what can't be written to.

    Raises:
        InvalidArgumentError: It has no memory, or several of its elements are one in memory, or its dtype is none that
            torch can cast to.
    """
    target = part.target
    dtype = part.source.dtype
    is_expanded = any(size > 1 and stride == 0 for size, stride in zip(target.shape, target.stride(), strict=True))
    if target.is_meta or not lies_in_storage(target):
        problem = "has no memory. Give it some first: torch.empty_like(..., device=...)."
    elif target.numel() and is_expanded:
        problem = "is expanded: several of its elements are one in memory. Give it memory of its own: .contiguous()."
    elif target.dtype != dtype and not _is_castable(dtype, target.dtype):
        problem = f"is {target.dtype}, to which torch can't cast the {dtype} that is stored."
    else:
        return
    raise InvalidArgumentError(f"Can't load into '{name}', and nothing was loaded: it {problem}", fqn=name)


@lru_cache
def _is_castable(source: torch.dtype, target: torch.dtype) -> bool:
    try:
        torch.empty(1, dtype=target, device="cpu").copy_(torch.empty(1, dtype=source, device="cpu"))
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _blocks(part: _Part) -> Iterator[_Part]:
    """Split a part into ones that are read at once, in row-major order.

    Those of a contiguous target are contiguous.
    """
    sizes = box_shape(part.box)
    elements = prod(sizes)
    if not elements:
        return
    itemsize = part.source.dtype.itemsize
    is_far = isinstance(part.source, _FileTensor) and part.source.is_far
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


def _read_exactly(shard: SafetensorsFile, fd: int, target: memoryview, start: int) -> None:
    """Fill a target with the bytes of a file from `start` on."""
    while target:
        count = os.preadv(fd, [target], start)
        if count == 0:
            raise shard.truncated_error()
        target = target[count:]
        start += count
