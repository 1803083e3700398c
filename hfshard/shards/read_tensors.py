"""Read tensors of open files: mapped, or read by several threads straight into place."""

from __future__ import annotations

import fcntl
import mmap
import os
import queue
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

import torch

from hfshard._util.threads import run_in_threads, start_worker
from hfshard.constants import DATA_ALIGNMENT, FILES_AT_ONCE
from hfshard.disk.direct_io import (
    HUGE_PAGE_BYTES,
    aligned_block,
    check_setting,
    is_cached,
    is_direct_wanted,
    is_networked,
    open_direct,
    read_direct,
    reopen_direct,
)
from hfshard.errors import InvalidArgumentError
from hfshard.shards.shard_file import (
    PooledFile,
    SafetensorsFile,
    advise_huge_pages,
    is_prefaulted,
    prefault,
    split_range,
)
from hfshard.tensors.stored_tensor import bytes_view

ReadMode = Literal["auto", "mmap", "pread"]

TensorRead = Sequence[tuple[SafetensorsFile, Sequence[str]]]
"""Files, each with the names of the tensors to read from it."""

_READERS: Final = 4
"""Threads that read into memory: more speed up neither a disk nor page faults on few cores."""

_DEVICE_READERS: Final = 8
"""Threads that fill page-locked memory: copying out of the page cache takes several cores to keep a GPU's bus busy."""

_PIECE_BYTES: Final = 1024 * 1024
"""Bytes that a thread reads into place at once: with 4 MiB, reading 2.5 GB from a cold disk took a fifth longer."""

_STAGE_BYTES: Final = 4 * 1024 * 1024
"""Bytes read at once and then copied: enough for a GPU's bus, and one call for many small tensors."""

_MIN_OWN_BYTES: Final = 1024 * 1024
"""Tensors of at least this size are read into their own pages; smaller ones are read together and copied."""

_LARGEST_ALIGNMENT: Final = 16
"""Bytes of a complex128. A tensor that is not aligned to it in the file is copied to aligned memory."""

_STAGES: Final = 2
"""Page-locked pieces per thread: one is copied to the device while the other is filled."""


def check_read_mode(read: str, *, disable_mmap: bool | None = None) -> ReadMode:
    """Resolve two arguments to a read mode.

    Raises:
        InvalidArgumentError: There is no such mode, or the arguments contradict each other.
    """
    if read not in ("auto", "mmap", "pread"):
        raise InvalidArgumentError(f"read must be 'auto', 'mmap' or 'pread', got {read!r}.")
    if disable_mmap and read == "mmap":
        raise InvalidArgumentError("Cannot combine read='mmap' with disable_mmap=True. Pass only one of them.")
    check_setting()
    return "pread" if disable_mmap else read  # type: ignore[return-value]


def mode_of(wanted: TensorRead, read: ReadMode, device: torch.device) -> ReadMode:
    """Return the mode that `read_from` will use: "mmap" or "pread".

    Args:
        wanted: The files and names.
        read: "mmap" or "pread" is returned as it is.
        device: The device of the tensors.
    """
    if read == "auto":
        devices = {shard.identity[0] for shard, _ in wanted}
        read = "pread" if device.type == "cuda" or any(map(is_networked, devices)) else "mmap"
    return read if device.type in ("cpu", "cuda") else "mmap"


def read_from(
    wanted: TensorRead, read: ReadMode, device: torch.device, *, ahead: bool = True
) -> dict[str, torch.Tensor]:
    """Read tensors into memory or onto a device.

    For the CPU, tensors on local disks are mapped: a page is read when it is touched, and threads read ahead (see
    `start_read_ahead`). For a GPU, and from network file systems, they are read immediately. If a file's signature was
    checked, they are read into CPU memory, and the copies are compared with the signed checksum.

    Args:
        wanted: The files and names.
        read: "mmap" or "pread" overrides that choice. For a GPU, "mmap" copies from mapped memory.
        device: The device of the tensors.
        ahead: Whether to read mapped files ahead; False if another reader does so.

    Raises:
        CheckpointChangedError: A file whose tensors were copied no longer matches its signature.
    """
    if str(device) == "cuda":  # the current device depends on the thread
        device = torch.device("cuda", torch.cuda.current_device())
    if mode_of(wanted, read, device) == "mmap":
        if ahead:
            start_read_ahead([(shard, stretches_of(shard, names)) for shard, names in wanted])
        mapped = {name: tensor for shard, names in wanted for name, tensor in shard.tensors(names).items()}
        return mapped if device.type == "cpu" else {name: tensor.to(device) for name, tensor in mapped.items()}
    signed = [(shard, names) for shard, names in wanted if names and shard.signed_sha256 is not None]
    others = [(shard, names) for shard, names in wanted if shard.signed_sha256 is None]
    tensors = _read_at_once(others, device)
    threads = FILES_AT_ONCE if device.type == "cpu" else 1  # tensors that are copied to a device need memory twice
    for one in run_in_threads(lambda read, _: _read_signed(read, device), signed, threads):
        tensors |= one
    return {name: tensors[name] for _, names in wanted for name in names}


def _read_signed(wanted: tuple[SafetensorsFile, Sequence[str]], device: torch.device) -> dict[str, torch.Tensor]:
    """Copy a file's tensors, compare the copies with the signed checksum, and move them to the device."""
    tensors = _read_at_once([wanted], torch.device("cpu"))
    wanted[0].check_copied(tensors)
    return {name: tensor.to(device) for name, tensor in tensors.items()}


@dataclass(frozen=True, slots=True)
class _ReadPart:
    """A file range, and the bytes of a tensor to read it into."""

    target: torch.Tensor
    """One-dimensional bytes, as long as the range."""
    start: int
    """Position in the file."""

    @property
    def end(self) -> int:
        return self.start + self.target.numel()


def _read_at_once(wanted: TensorRead, device: torch.device, *, staged: bool = False) -> dict[str, torch.Tensor]:
    """Read tensors into their own memory; `staged` uses a GPU's path for the CPU too."""
    staged = staged or device.type != "cpu"
    threads = _DEVICE_READERS if device.type == "cuda" else _READERS
    stages = _Stages(device, threads)
    tensors: dict[str, torch.Tensor] = {}
    jobs: list[Callable[[], object]] = []
    with ExitStack() as stack:
        for shard, names in wanted:
            file, parts = _File(shard, stack), list[_ReadPart]()
            for name in sorted(names, key=lambda name: shard.header.tensors[name].begin):
                info = shard.header.tensors[name]
                start = shard.header.data_start + info.begin
                if info.nbytes == 0:
                    tensors[name] = shard.tensor(name).to(device)
                elif staged or info.nbytes < _MIN_OWN_BYTES or start % _LARGEST_ALIGNMENT:
                    raw = torch.empty(info.nbytes, dtype=torch.uint8, device=device)
                    tensors[name] = shard.shaped(name, raw.untyped_storage())
                    begins = range(0, info.nbytes, _STAGE_BYTES)
                    parts += [_ReadPart(raw[at : at + _STAGE_BYTES], start + at) for at in begins]
                else:
                    storage, reads = _own_pages(file, start, info.nbytes)
                    tensors[name] = shard.shaped(name, storage)
                    jobs += reads
            jobs += [partial(stages.fill_targets, file, run) for run in _runs(parts)]
        run_in_threads(lambda job, _: job(), jobs, threads)
        stages.wait()
    return {name: tensors[name] for _, names in wanted for name in names}


class _File:
    """A file to read pieces from, bypassing the page cache if it is cold and no other local process reads it."""

    def __init__(self, shard: SafetensorsFile, stack: ExitStack) -> None:
        self.shard = shard
        self._held: PooledFile | None = None
        self._is_networked = is_networked(shard.identity[0])
        self._is_shared = False
        if not is_direct_wanted(shard.data_bytes) or has_local_peers():
            return
        with shard.opened() as fd:
            if not is_cached(fd, shard.header.data_start, shard.data_bytes) and (direct := open_direct(fd)) >= 0:
                self._mark(direct)
                self._held = PooledFile(direct, self._open_again)
                stack.callback(self._held.close)

    def read(self, buffer: memoryview, start: int, count_bytes: int) -> None:
        """Read a range into an aligned buffer with room around it (see `read_direct`)."""
        with self.shard.opened() as fd, nullcontext(-1) if self._held is None else self._held.opened() as direct:
            if direct >= 0 and (self._is_shared or self._has_fellows(direct)):
                self._is_shared = True  # from now on: what the others leave in the page cache need not be read again
                direct = -1
            if len(read_direct(fd, direct, buffer, start, count_bytes)) < count_bytes:
                raise self.shard.truncated_error()

    def _has_fellows(self, direct: int) -> bool:
        return not self._is_networked and read_by_other_processes(direct)

    def _open_again(self) -> int:
        with self.shard.opened() as fd:
            direct = reopen_direct(fd)
        self._mark(direct)
        return direct

    def _mark(self, direct: int) -> None:
        if not self._is_networked:
            lock_shared(direct)


def _own_pages(file: _File, start: int, nbytes: int) -> tuple[torch.UntypedStorage, list[Callable[[], object]]]:
    """Allocate memory for one tensor at its page offset in the file, and return it with the reads that fill it."""
    lead = start % DATA_ALIGNMENT
    end = lead + nbytes
    pages = mmap.mmap(-1, -(-end // DATA_ALIGNMENT) * DATA_ALIGNMENT, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if len(pages) >= HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    whole, begin = memoryview(pages), start - lead
    raw = torch.frombuffer(pages, dtype=torch.uint8, offset=lead, count=nbytes)
    return raw.untyped_storage(), [
        partial(file.read, whole[at:], begin + at, min(_PIECE_BYTES, end - at)) for at in range(0, end, _PIECE_BYTES)
    ]


def _runs(parts: Sequence[_ReadPart]) -> Iterator[list[_ReadPart]]:
    """Group parts that are adjacent in the file and together fit one piece."""
    run: list[_ReadPart] = []
    for part in parts:
        if run and (part.start != run[-1].end or part.end - run[0].start > _STAGE_BYTES):
            yield run
            run = []
        run.append(part)
    if run:
        yield run


class _Stages:
    """Aligned memory, page-locked for a GPU, in which pieces wait to be copied into place."""

    def __init__(self, device: torch.device, threads: int) -> None:
        self._device, self._count = device, _STAGES * threads
        # The caller's stream, on which the targets' memory was allocated.
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._made = 0
        self._free: queue.SimpleQueue[_HostStage] = queue.SimpleQueue()
        self._lock = threading.Lock()

    def fill_targets(self, file: _File, run: Sequence[_ReadPart]) -> None:
        """Read the parts of a run, and copy each to its target."""
        stage = self._take()
        try:
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                stage.fill_targets(file, run)
        finally:
            self._free.put(stage)

    def wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _take(self) -> _HostStage:
        with self._lock:
            is_new = self._made < self._count and self._free.empty()
            self._made += is_new
        if not is_new:
            return self._free.get()
        try:
            return _HostStage(self._device)
        except BaseException:
            with self._lock:
                self._made -= 1
            raise


class _HostStage:
    def __init__(self, device: torch.device) -> None:
        room = _STAGE_BYTES + 2 * DATA_ALIGNMENT
        self._device = device
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._raw = torch.empty(room, dtype=torch.uint8, device="cpu", pin_memory=True)
            self._memory = bytes_view(self._raw)
        else:
            self._memory = aligned_block(room)
            self._raw = torch.frombuffer(self._memory, dtype=torch.uint8)

    def fill_targets(self, file: _File, run: Sequence[_ReadPart]) -> None:
        """Read the parts of a run, and copy each to its target; copies to a GPU continue after this returns."""
        if self._copied is not None:
            self._copied.synchronize()
        start = run[0].start
        file.read(self._memory, start, run[-1].end - start)
        for part in run:
            at = start % DATA_ALIGNMENT + part.start - start
            part.target.copy_(self._raw[at : at + part.target.numel()], non_blocking=True)
        if self._device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(self._device))


# Detection of local processes that read the same file, so that the page cache reads it once for all.


_FLOCK: Final = struct.Struct("@hhqqi4x")
"""The kernel's `struct flock` where `off_t` has 64 bits: type, whence, start, length, process."""

_HAS_LOCKS: Final = sys.platform == "linux" and struct.calcsize("P") == 8


def has_local_peers() -> bool:
    """Return whether this is one of several ranks that are likely to load on this machine at the same time.

    The launcher sets the number of local ranks (torchrun and accelerate: LOCAL_WORLD_SIZE). Without it, the ranks of
    the default process group are assumed to be local.
    """
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    if here.isdecimal():
        return int(here) > 1
    group = torch.distributed
    return group.is_available() and group.is_initialized() and group.get_world_size() > 1


def lock_shared(fd: int) -> None:
    """Let `read_by_other_processes` of other processes see that a file is being read, until it is closed.

    The mark is a shared lock of the open file, which stops no other process. A file system without locks has no marks.

    Args:
        fd: A file open for reading on a local file system; network locks are slow.
    """
    if _HAS_LOCKS:
        with suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_RDLCK))


def read_by_other_processes(fd: int) -> bool:
    """Return whether another process has marked a file as being read; False if this cannot be detected."""
    if not _HAS_LOCKS:
        return False
    try:
        found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK))
    except OSError:
        return False
    return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)


def _flock(kind: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0)


# Read-ahead of mapped tensors in threads, while the model that will use them is being built.


_THREADS: Final = 2
"""Threads per call: one does not keep a disk busy, and more take cores away from building the model."""

_AHEAD_PIECE_BYTES: Final = 4 * 1024 * 1024
"""Bytes requested at once. With 16 MiB, the first pages arrived late: 2.5 GB took 1.2 s instead of 1.1."""

_GAP_BYTES: Final = 128 * 1024
"""Ranges with at most this many bytes between them are read as one: the kernel reads that much around a page anyway."""


def start_read_ahead(wanted: Sequence[tuple[SafetensorsFile, Iterable[tuple[int, int]]]]) -> list[Future[None]]:
    """Start threads that read mapped ranges that are not in the page cache, in the order of the files.

    They fill at most half of the available memory. A file that is truncated during the read is not an error here:
    `madvise` reports it, while a page fault would kill the process.

    Args:
        wanted: Files, each with ranges of it: the first byte, and the one after the last.

    Returns:
        A future per thread, none if everything is cached or no thread can be started. The threads end by themselves,
        and keep the files mapped until then.
    """
    cold = [
        (shard.mapping, begin, end)
        for shard, stretches in wanted
        for begin, end in _merged(stretches)
        if not is_prefaulted(shard.mapping, begin, end)
    ]
    if not cold:
        return []
    for stretch in cold:
        advise_huge_pages(*stretch)
    pieces, lock = _pieces_of(cold, _available_bytes() // 2), threading.Lock()

    def populate() -> None:
        while True:
            with lock:
                piece = next(pieces, None)
            if piece is None or not prefault(*piece):
                return

    started = [start_worker(populate, "hfshard-read-ahead", daemon=True) for _ in range(_THREADS)]
    return [one for one in started if one is not None]


def _pieces_of(
    stretches: Sequence[tuple[torch.UntypedStorage, int, int]], limit_bytes: int
) -> Iterator[tuple[torch.UntypedStorage, int, int]]:
    for mapping, begin, end in stretches:
        for first, last in split_range(begin, end, _AHEAD_PIECE_BYTES):
            limit_bytes -= last - first
            if limit_bytes < 0:
                return
            yield mapping, first, last


def stretches_of(shard: SafetensorsFile, names: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Yield the file ranges of some tensors."""
    start = shard.header.data_start
    return ((start + info.begin, start + info.end) for info in map(shard.header.tensors.__getitem__, names))


def _merged(stretches: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Sort the ranges of a file, merge nearby ones, and leave out empty ones."""
    begin = end = -1
    for start, stop in sorted(stretches):
        if start - end > _GAP_BYTES or begin < 0:
            if end > begin:
                yield begin, end
            begin = start
        end = max(end, stop)
    if end > begin:
        yield begin, end


def _available_bytes() -> int:
    """Return the bytes available without swapping; 0 if the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except OSError:
        return 0
