"""Read a rank's part of stored tensors straight into its local tensors, from files or by ranges."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, product
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
from torch.autograd.graph import increment_version

from hfshard._util.progress import byte_progress
from hfshard._util.threads import run_in_threads
from hfshard.checkpoint.open_checkpoint import OpenCheckpoint
from hfshard.distributed.layout import (
    Box,
    Interval,
    box_shape,
    held_box,
    mesh_layout_of,
    section,
    single_run,
    whole_box,
)
from hfshard.distributed.spread_tensor import ByteArray, Runs, SpreadTensor, gather_into
from hfshard.errors import InvalidArgumentError, StateDictMismatchError, UnstorableTensorError
from hfshard.format.index import Verify
from hfshard.shards.ranged_shard import (
    DEFAULT_MEMORY,
    GAP_BYTES,
    REQUEST_BYTES,
    DigestComparison,
    Piece,
    RangedShard,
    UnorderedDigest,
    read_pieces,
)
from hfshard.shards.read_tensors import ReadMode, mode_of, start_read_ahead
from hfshard.shards.shard_file import SafetensorsFile
from hfshard.tensors.flat_tensor import FlatTensor
from hfshard.tensors.state_dict import is_dtensor, is_spread_tensor, local_tensor
from hfshard.tensors.stored_tensor import (
    INTEGER_OF_SIZE,
    allocate_pages,
    bytes_view,
    fits_its_storage,
    is_torch_tensor_type,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


_CPU: Final = torch.device("cpu")


class BoxTarget(NamedTuple):
    """A tensor to be filled with a box of a stored one."""

    box: Box
    """Of the stored tensor."""
    tensor: torch.Tensor
    """Of the box's shape."""


Target = torch.Tensor | SpreadTensor | BoxTarget
"""The target of a read: a tensor; or this rank's part of a DTensor, or of a `SpreadTensor` if what is stored is a
rectangle of one; or a tensor for a box of what is stored."""


def read_parts(checkpoint: OpenCheckpoint, wanted: Iterable[tuple[str, Target]]) -> int:
    """Read stored tensors, or this rank's parts of them, into place. No other rank is contacted.

    Args:
        checkpoint: Open.
        wanted: Names of stored tensors, or names that are tied to them, each with its target. One tensor may fill
            several targets. If a target has another dtype, the values are cast.

    Returns:
        The number of bytes read: of the parts, and of the gaps between runs that were read at once.

    Raises:
        StateDictMismatchError: There is no such tensor, or it has another shape; nothing was read.
        InvalidArgumentError: A target has no memory, or its part on this rank is unknown; nothing was read.
        DamagedCheckpointError: This torch does not know a dtype, or a file was truncated since it was opened.

    Example:
        with open_checkpoint(directory) as checkpoint:
            read_parts(checkpoint, [("encoder.weight", encoder.weight)])
    """
    return prepare_reads(checkpoint, wanted)()


def prepare_reads(checkpoint: OpenCheckpoint, wanted: Iterable[tuple[str, Target]]) -> Callable[[], int]:
    """Check what `read_parts` checks, and return a function that then reads.

    Raises:
        What `read_parts` raises before anything is read.
    """
    finder = _Finder(checkpoint)
    parts = [finder.part(name, target) for name, target in wanted]
    reader = PartReader(checkpoint.level)
    return partial(
        reader.read_all,
        sorted(parts, key=PartToRead.place),
        checkpoint.folder.traits.read_memory_bytes,
        checkpoint.progress,
    )


def stored_tensors(checkpoint: OpenCheckpoint, *, is_mapped: bool = False) -> dict[str, torch.Tensor]:
    """Describe each tensor of a checkpoint, tied names included, by a meta tensor of its dtype and shape.

    Args:
        checkpoint: Open.
        is_mapped: Map the tensors of files on this machine: they are read when their values are accessed.

    Raises:
        DamagedCheckpointError: This torch does not know a dtype.
    """
    found = {
        name: shard.tensor(name) if is_mapped and isinstance(shard, SafetensorsFile) else shard.described(name)
        for shard in checkpoint.shards.values()
        for name in shard.header.tensors
    }
    for pickled in checkpoint.pickles.values():
        found |= {
            name: tensor if is_mapped else torch.empty_like(tensor, device="meta")
            for name, tensor in pickled.tensors.items()
        }
    return found | {name: found[kept] for name, kept in checkpoint.index.tied_names.items() if kept in found}


class PartMapper:
    """Maps new tensors from files on this machine, in place of memory that this rank's parts would be read into.

    A load whose tensors are new, or replace those of a model, asks it for each of them. It maps a part under the
    conditions under which `read_from` maps full tensors, and if the part is one run of aligned bytes in the dtype that
    is wanted. Mapped tensors are private: a page is read when it is touched, and copied when it is written to.
    """

    def __init__(self, checkpoint: OpenCheckpoint, read: ReadMode) -> None:
        """Map nothing yet.

        Args:
            checkpoint: Open; it may be closed while mapped tensors are in use.
            read: How the caller wants bytes to be read: "pread" maps nothing.
        """
        files = [(shard, ()) for shard in checkpoint.shards.values() if isinstance(shard, SafetensorsFile)]
        self._is_enabled = bool(files) and mode_of(files, read, _CPU) == "mmap"
        self._is_ahead = checkpoint.check is None
        self._finder = _Finder(checkpoint)
        self._stretches: dict[SafetensorsFile, list[Interval]] = {}
        self._mapped: set[tuple[str, str]] = set()
        """Files and stored names; a second target needs other memory than the first."""

    def map_like(self, name: str, like: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        """Map a stored tensor, or this rank's part of it; None: it must be read, or `prepare_reads` rejects it.

        Args:
            name: A stored tensor's name, or one that is tied to it.
            like: A tensor with the new one's shape, strides, mesh and placements; it may be on the meta device.
            dtype: Of the new tensor.
            device: Of the new tensor.
        """
        part = local_tensor(like) if is_dtensor(like) else like
        if not self._is_enabled or device.type != "cpu" or not is_torch_tensor_type(part) or not part.is_contiguous():
            return None
        source, shape = self._finder.source(name)
        if not isinstance(source, FileTensor) or source.dtype != dtype or shape != tuple(like.shape):
            return None
        box = _box_of(like, name)
        run = None if box is None or box_shape(box) != tuple(part.shape) else single_run(shape, box)
        is_aligned = source.start % dtype.itemsize == 0
        if run is None or run[0] == run[1] or not is_aligned or (source.shard.path, source.name) in self._mapped:
            return None
        assert isinstance(source.shard, SafetensorsFile)
        self._mapped.add((source.shard.path, source.name))
        begin, end = (source.start + element * dtype.itemsize for element in run)
        self._stretches.setdefault(source.shard, []).append((begin, end))
        return with_local(like, source.shard.run(source.name, run[0], part.shape))

    def start_read_ahead(self) -> None:
        """Read what was mapped ahead, unless a running check reads all of it."""
        if self._is_ahead:
            start_read_ahead(list(self._stretches.items()))


def with_local(like: Any, part: torch.Tensor) -> torch.Tensor:
    """Return a DTensor like another one that has this local tensor; or the local tensor, if the other one is plain."""
    if isinstance(like, FlatTensor):
        return like.with_local(part)
    if not is_dtensor(like):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _box_of(like: torch.Tensor, name: str) -> Box | None:
    """Return the part of a tensor that this rank has; None if it has none, or has summands in place of a part."""
    if not is_dtensor(like):
        return whole_box(like.shape)
    coordinate = like.device_mesh.get_coordinate()
    try:
        layout = mesh_layout_of(like, name)
    except UnstorableTensorError:
        return None
    return None if coordinate is None else held_box(tuple(like.shape), layout, tuple(coordinate))


class _Finder:
    def __init__(self, checkpoint: OpenCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._networked: dict[Any, bool] = {}
        """Device, or kind of file -> whether it is remote."""

    def part(self, name: str, target: Target) -> PartToRead:
        """Find what is read into a target; raise what `read_parts` raises before anything is read."""
        source, shape = self.source(name)
        if isinstance(target, BoxTarget):
            part = PartToRead(source, shape, target.box, target.tensor.detach())
            _check_target(name, part)
            return part
        whole = _spread(target, name) if is_spread_tensor(target) else target
        if isinstance(whole, SpreadTensor):
            part = PartToRead(source, whole.stored_sizes, whole.stored_box, whole.part().detach())
        else:
            part = PartToRead(source, tuple(whole.shape), whole_box(whole.shape), whole.detach())
        expected = tuple(whole.shape)
        if shape != expected:
            raise StateDictMismatchError(
                f"Tensor '{name}' of the checkpoint '{self._checkpoint.directory}' has the shape {list(shape)}, not "
                f"{list(expected)}. Nothing was loaded. To see the names and shapes, run: "
                f"hfshard inspect --tensors {self._checkpoint.directory}",
                path=self._checkpoint.directory,
                fqn=name,
                mismatched_keys=((name, shape, expected),),
            )
        _check_target(name, part)
        return part

    def _lies_far(self, shard: SafetensorsFile | RangedShard) -> bool:
        place = shard.identity[0]  # of files on this machine the device, which many files share
        if place not in self._networked:
            self._networked[place] = shard.is_networked
        return self._networked[place]

    def source(self, name: str) -> tuple[FileTensor | torch.Tensor, tuple[int, ...]]:
        """Find a stored tensor, and its shape in torch; raise StateDictMismatchError if there is none."""
        index = self._checkpoint.index
        stored = index.tied_names.get(name, name)
        file = index.weight_map.get(stored)
        if file in self._checkpoint.shards:
            shard = self._checkpoint.shards[file]
            described = shard.described(stored)
            start = shard.header.data_start + shard.header.tensors[stored].begin
            assert isinstance(shard, SafetensorsFile | RangedShard)
            return FileTensor(shard, stored, start, described.dtype, self._lies_far(shard)), tuple(described.shape)
        if file in self._checkpoint.pickles:
            tensor = self._checkpoint.pickles[file].tensors[stored]
            return tensor, tuple(tensor.shape)
        raise StateDictMismatchError(
            f"The checkpoint '{self._checkpoint.directory}' has no tensor '{name}'. Nothing was loaded. To see the "
            f"names, run: hfshard inspect --tensors {self._checkpoint.directory}",
            path=self._checkpoint.directory,
            fqn=name,
            missing_keys=(name,),
        )


def _spread(target: DTensor | FlatTensor, name: str) -> SpreadTensor:
    """Describe a DTensor; it must be one that could also be stored."""
    try:
        return SpreadTensor.of(target, name)
    except UnstorableTensorError as error:
        problem = error.message.partition(": ")[2]
        raise InvalidArgumentError(f"Cannot load into '{name}', so nothing was loaded: {problem}", fqn=name) from error


def _check_target(name: str, part: PartToRead) -> None:
    """Reject a target that cannot be written to, or not in its dtype."""
    target = part.target
    dtype = part.source.dtype
    is_expanded = any(size > 1 and stride == 0 for size, stride in zip(target.shape, target.stride(), strict=True))
    if target.is_meta or not fits_its_storage(target):
        problem = "has no memory. Allocate it first: torch.empty_like(..., device=...)."
    elif target.numel() and is_expanded:
        problem = "is expanded: several of its elements share memory. Give it memory of its own: .contiguous()."
    elif target.dtype != dtype and not _is_castable(dtype, target.dtype):
        problem = f"is {target.dtype}, to which torch cannot cast the stored {dtype}."
    else:
        return
    raise InvalidArgumentError(f"Cannot load into '{name}', so nothing was loaded: it {problem}", fqn=name)


@lru_cache
def _is_castable(source: torch.dtype, target: torch.dtype) -> bool:
    try:
        torch.empty(1, dtype=target, device="cpu").copy_(torch.empty(1, dtype=source, device="cpu"))
    except (RuntimeError, NotImplementedError):
        return False
    return True


# Parts: what is read of a stored tensor into which memory, split into blocks and ranges of a file.


BLOCK_BYTES: Final = 4 * 1024 * 1024
"""Bytes of a local tensor that one thread reads at once. With 1 MiB, the kernel read two thirds more from a cold disk
than was requested, because it takes the threads for one sequential reader."""
_STAGED_BYTES: Final = 1024 * 1024
"""The same if a stage is filled and then copied, from a local disk."""
WINDOW_BYTES: Final = 4 * 1024 * 1024
"""Bytes of a file that one call reads, including the unwanted ones between the runs."""


@dataclass(frozen=True, slots=True, eq=False)
class FileTensor:
    """A tensor in a safetensors file."""

    shard: SafetensorsFile | RangedShard
    name: str
    start: int
    """In the file."""
    dtype: torch.dtype
    is_networked: bool
    """True if the file is read over the network."""


class PartToRead(NamedTuple):
    """The part of one stored tensor to read."""

    source: FileTensor | torch.Tensor
    """In a file, or a pickle's tensor."""
    sizes: tuple[int, ...]
    """The source's shape, to which the box refers; it may have additional dimensions of one element."""
    box: Box
    target: torch.Tensor
    """Of the box's shape."""

    def place(self) -> tuple[str, int]:
        """Return the location of the source, for sorting: path and offset."""
        return ("", 0) if isinstance(self.source, torch.Tensor) else (self.source.shard.path, self.source.start)


def _is_of_ranged_shard(part: PartToRead) -> bool:
    return isinstance(part.source, FileTensor) and isinstance(part.source.shard, RangedShard)


def blocks_of(part: PartToRead, block_bytes: int = 0) -> Iterator[PartToRead]:
    """Split a part into blocks, each of which is read at once, in row-major order.

    The blocks of a contiguous target are contiguous.

    Args:
        part: What is read.
        block_bytes: The most bytes of a block; 0: as suits the file and the target.
    """
    sizes = box_shape(part.box)
    elements = prod(sizes)
    if not elements:
        return
    itemsize = part.source.dtype.itemsize
    is_networked = isinstance(part.source, FileTensor) and part.source.is_networked
    most_bytes = BLOCK_BYTES if is_networked or is_read_into(part.target, part.source.dtype) else _STAGED_BYTES
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
    """Return whether a target's memory has the same form as the bytes in a file."""
    return target.device.type == "cpu" and target.is_contiguous() and _is_plain(target, dtype)


def _is_plain(target: torch.Tensor, dtype: torch.dtype) -> bool:
    return target.dtype == dtype and not (target.is_conj() or target.is_neg())


def bytes_of(tensor: torch.Tensor) -> ByteArray:
    """Return the bytes of a contiguous CPU tensor, without a copy."""
    return np.frombuffer(bytes_view(tensor), np.uint8)


def assign_bits(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor of the same shape: bit for bit, if the dtype is the same."""
    integer = INTEGER_OF_SIZE.get(source.element_size())
    if integer is not None and _is_plain(target, source.dtype) and _is_plain(source, target.dtype):
        target.view(integer).copy_(source.view(integer))
    else:
        target.copy_(source)


def _windows_of(runs: Runs, most_gap: int) -> Iterator[tuple[int, int]]:
    """Group runs that are read at once; yield each group's first number, and the number after its last one."""
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


# Reads of tensor boxes from files into memory, in threads: one call per run of bytes, or per group of runs.


_READERS: Final = 4
"""Threads; the same number as for tensors that are read completely."""
_NETWORK_GAP_BYTES: Final = 1024 * 1024
"""A network file system delivers this many bytes in the time of one more request. A local one is read run by run, at a
microsecond per call."""


class PartReader:
    """The reads of one `read_parts` call."""

    def __init__(self, level: Verify = "none") -> None:
        """Read nothing yet; `level` sets what is compared of files that are read by ranges (see `DigestComparison`)."""
        self._level = level
        self._stages: list[torch.Tensor] = []

    def read_all(
        self, parts: Sequence[PartToRead], memory_bytes: int = DEFAULT_MEMORY, progress: bool | None = False
    ) -> int:
        """Read parts into place, in their order, and return the bytes that were read.

        Args:
            parts: What is read.
            memory_bytes: The most memory that reads by ranges use, apart from the targets.
            progress: Whether to show a bar for them.

        Raises:
            IntegrityError: A tensor that was read completely differs from what was saved; the targets are overwritten.
        """
        ranged = RangedParts(self._level)
        blocks = [
            block for part in parts for block in (ranged.add(part) if _is_of_ranged_shard(part) else blocks_of(part))
        ]
        with torch.no_grad():
            count_bytes = ranged.read(memory_bytes, progress)
            count_bytes += sum(run_in_threads(lambda block, _: self.read(block), blocks, _READERS))
        increment_version([part.target for part in parts if not part.target.is_inference()])
        return count_bytes

    def read(self, part: PartToRead) -> int:
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
        memory = bytes_view(target)
        with _reading(source.shard) as read_exactly:
            for first, last in _windows_of(runs, _NETWORK_GAP_BYTES if source.is_networked else 0):
                start, stop = offsets[first], offsets[last - 1] + lengths[last - 1]
                begin, end = positions[first], positions[last - 1] + lengths[last - 1]
                if stop - start == end - begin:
                    read_exactly(memory[begin:end], start)
                else:
                    starts = runs.offsets[first:last] - runs.offsets[first]
                    with self._stage() as stage:
                        window = stage[: stop - start]
                        read_exactly(bytes_view(window), start)
                        gather_into(bytes_of(target)[begin:end], bytes_of(window), starts, runs.lengths[first:last])
                count_bytes += stop - start
        return count_bytes

    @contextmanager
    def _stage(self) -> Iterator[torch.Tensor]:
        """Borrow bytes that no other thread uses in the block."""
        try:
            stage = self._stages.pop()
        except IndexError:
            stage = allocate_pages((max(BLOCK_BYTES, WINDOW_BYTES),), torch.uint8)
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
    stops = accumulate(stop - start for start, stop in intervals)
    return ((end - (stop - start), end) for (start, stop), end in zip(intervals, stops, strict=True))


@contextmanager
def _reading(shard: SafetensorsFile | RangedShard) -> Iterator[Callable[[memoryview, int], None]]:
    """Open a file, and yield a function that fills memory with its bytes from an offset on."""
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


# Reads of tensor boxes from remote files: one request for nearby ranges, and several requests at a time.


class RangedParts:
    """Parts of tensors in files that are read by ranges, for one call."""

    def __init__(self, level: Verify) -> None:
        """Request nothing yet; `level` sets what is compared (see `DigestComparison`)."""
        self._level = level
        self._pieces: dict[RangedShard, list[Piece]] = {}
        self._comparisons: dict[RangedShard, DigestComparison] = {}
        self._whole: dict[RangedShard, set[str]] = {}
        """The tensors whose bytes are all hashed as they arrive."""

    def add(self, part: PartToRead) -> list[PartToRead]:
        """Add a part; return those of its blocks that need several requests each, which are not added."""
        source = part.source
        assert isinstance(source, FileTensor)
        shard = source.shard
        assert isinstance(shard, RangedShard)
        if shard not in self._comparisons:
            self._comparisons[shard] = DigestComparison(shard, self._level)
            self._pieces[shard] = []
            self._whole[shard] = set()
        comparison, pieces, whole = self._comparisons[shard], self._pieces[shard], self._whole[shard]
        digest = None
        if part.box == whole_box(part.sizes) and source.name not in whole:
            digest = comparison.digest_of(shard.header.tensors[source.name])
            whole.add(source.name)
        left: list[PartToRead] = []
        for block in blocks_of(part, REQUEST_BYTES):
            found = _pieces_of(block, source, digest)
            pieces += found
            left += [] if found else blocks_of(block)
        return left

    def read(self, memory_bytes: int, progress: bool | None) -> int:
        """Read what was added, compare it, and return the number of bytes that were requested.

        Args:
            memory_bytes: The most memory that this uses, apart from the targets.
            progress: Whether to show a bar.

        Raises:
            IntegrityError: A tensor differs from what was saved; the targets are overwritten.
        """
        for shard, comparison in self._comparisons.items():
            self._pieces[shard] += comparison.others(self._whole[shard])
        total = sum(piece.nbytes for pieces in self._pieces.values() for piece in pieces)
        with byte_progress("Loading", total, progress if total else False) as progress_callback:
            count_bytes = read_pieces(list(self._pieces.items()), progress_callback, memory_bytes)
        for comparison in self._comparisons.values():
            comparison.compare()
        return count_bytes


def _pieces_of(block: PartToRead, source: FileTensor, digest: UnorderedDigest | None) -> list[Piece]:
    """List the independent requests that fill a block; none if they cannot be independent."""
    _, sizes, box, target = block
    runs = Runs.of_box(sizes, source.dtype.itemsize, box)
    is_direct = is_read_into(target, source.dtype)
    if is_direct and len(runs.offsets) == 1:
        start = int(runs.offsets[0]) + source.start
        take = None if digest is None else partial(digest.add, start, stays=True)
        return [Piece(start, runs.total, bytes_view(target), take)]
    windows = list(_windows_of(runs, GAP_BYTES))
    if len(windows) > 1 and not is_direct:
        return []
    found = []
    for first, last in windows:
        some = Runs(runs.offsets[first:last], runs.lengths[first:last], runs.positions[first:last])
        start = int(some.offsets[0]) + source.start
        nbytes = int(some.offsets[-1] + some.lengths[-1] - some.offsets[0])
        found.append(Piece(start, nbytes, None, partial(_take_runs, block, source, some, digest, start)))
    return found


def _take_runs(
    block: PartToRead,
    source: FileTensor,
    runs: Runs,
    digest: UnorderedDigest | None,
    start: int,
    found: memoryview,
    cancelled: threading.Event,
) -> None:
    """Copy the bytes of a window, which contains these runs of a block, into place."""
    target = block.target
    raw = np.frombuffer(found, np.uint8)
    starts = runs.offsets - runs.offsets[0]
    with torch.no_grad():
        if is_read_into(target, source.dtype):
            begin = int(runs.positions[0])
            gather_into(bytes_of(target)[begin : begin + runs.total], raw, starts, runs.lengths)
        else:
            gathered = allocate_pages((runs.total,), torch.uint8)
            gather_into(bytes_of(gathered), raw, starts, runs.lengths)
            assign_bits(target, gathered.view(source.dtype).view(target.shape))
    if digest is not None:
        digest.add(start, found, cancelled, stays=False)
