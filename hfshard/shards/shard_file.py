"""Local safetensors files: checked, mapped or read, and kept open while descriptors are available."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import islice
from math import prod
from queue import SimpleQueue
from threading import Event, Lock, Semaphore
from typing import Final, cast

import torch

from hfshard._util.threads import ForkSafeLock, pause_gc, start_worker
from hfshard.constants import MAX_HEADER_BYTES
from hfshard.disk.direct_io import (
    BLOCK_BYTES,
    HUGE_PAGE_BYTES,
    LIBRARY,
    is_networked,
    is_resident,
    read_blocks,
    read_spots,
)
from hfshard.disk.safe_open import NO_FILES_LEFT, Identity, identity_of, open_regular, read_text
from hfshard.errors import CheckpointChangedError, MissingShardError
from hfshard.format.header import LENGTH_BYTES, read_header_length
from hfshard.format.index import HASHERS
from hfshard.shards.shard import SafetensorsShard
from hfshard.tensors.stored_tensor import DTYPE_NAMES, PLAIN_DTYPES, iter_blocks

_CPU: Final = torch.device("cpu")

_PLAIN_DTYPES: Final = {DTYPE_NAMES[dtype]: dtype for dtype in PLAIN_DTYPES}


class SafetensorsFile(SafetensorsShard):
    """One local safetensors file; open while it is read, and until its descriptor is needed (see `PooledFile`).

    Attributes:
        signed_sha256: The complete file's sha256 that was found to be signed; copied bytes are compared with it.
    """

    signed_sha256: str | None = None

    def __init__(self, path: str, root: str, real_root: str | None = None) -> None:
        """Open and check a file; takes the arguments of `open_regular`.

        Raises:
            DamagedCheckpointError: The header does not match itself or the size of the file.
            UnsafePathError: The file is a link that leaves `root`.
        """
        self._root = root
        self._mapped: torch.UntypedStorage | None = None
        fd = open_or_evict(partial(open_regular, path, root, real_root))
        try:
            status = os.fstat(fd)
            self.identity: Identity = identity_of(status)
            self.changed_ns = status.st_ctime_ns
            length = read_header_length(os.read(fd, LENGTH_BYTES), status.st_size, path)
            assert length <= MAX_HEADER_BYTES
            raw_header = length.to_bytes(LENGTH_BYTES, "little") + read_text(fd, length, path)
            super().__init__(path, raw_header, status.st_size)
        except BaseException:
            os.close(fd)
            raise
        self._file = PooledFile(fd, self._open_again)

    @property
    def is_networked(self) -> bool:
        """Return whether the file is on a network file system."""
        return is_networked(self.identity[0])

    def close(self) -> None:
        """Close the file; mapped tensors stay valid, and the mapping ends with the last of them."""
        self._file.close()
        self._mapped = None  # this object lives until garbage collection: its file refers to it

    def opened(self) -> AbstractContextManager[int]:
        """Return a context manager that keeps the file open until the block ends.

        Raises:
            CheckpointChangedError: The file had to be reopened, and another file now has its name.
        """
        return self._file.opened()

    def tensor(self, name: str) -> torch.Tensor:
        """Map one tensor privately; its pages are read when touched."""
        info = self.header.tensors[name]
        start = self.header.data_start + info.begin
        storage = self.mapping[start : start + info.nbytes] if info.nbytes else torch.UntypedStorage(0)
        return self.shaped(name, cast(torch.UntypedStorage, storage))

    def run(self, name: str, begin: int, shape: Sequence[int]) -> torch.Tensor:
        """Map contiguous elements of a tensor privately, with a storage of their own.

        Args:
            name: The tensor.
            begin: The first of the elements, counted in row-major order.
            shape: The shape of the result; it has at least one element.
        """
        dtype = self.described(name).dtype
        start = self.header.data_start + self.header.tensors[name].begin + begin * dtype.itemsize
        storage = self.mapping[start : start + prod(shape) * dtype.itemsize]
        raw = torch.empty(0, dtype=torch.uint8, device=_CPU).set_(storage)
        return raw.view(dtype).view(tuple(shape)).detach()  # for autograd not a view of other bytes

    def tensors(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Map tensors as `tensor` does, each with its own storage; many small ones take half the time."""
        mapped: dict[str, torch.Tensor] = {}
        if not names:
            return mapped
        dtypes = {} if self._complex_as_real else _PLAIN_DTYPES
        infos = self.header.tensors
        data_start = self.header.data_start
        mapping = self.mapping
        with pause_gc():
            for name in names:
                _, dtype_name, shape, begin, end = infos[name]
                dtype = dtypes.get(dtype_name)
                if dtype is None or begin == end:
                    mapped[name] = self.tensor(name)
                    continue
                storage = mapping[data_start + begin : data_start + end]
                mapped[name] = torch.empty(0, dtype=dtype, device=_CPU).set_(storage, 0, shape)  # type: ignore[call-overload]
        return mapped

    def check_copied(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Hash the copied tensors, and compare the hash with the signed one.

        A file can be overwritten and restored so that it looks untouched: a write through a shared mapping need not
        change its ctime. So the copies themselves are hashed; tensors that were not copied are hashed from the file.

        Args:
            tensors: Tensors read from this file into their own memory on the CPU.

        Raises:
            CheckpointChangedError: The file had other bytes when it was read.
        """
        if self.signed_sha256 is None:
            return
        hasher = HASHERS["sha256"]()
        hasher.update(self._raw_header)
        for name, info in self.header.tensors.items():
            copied = tensors.get(name)
            for block in self.blocks(info) if copied is None else iter_blocks(copied, BLOCK_BYTES):
                hasher.update(block)
        if hasher.hexdigest() != self.signed_sha256:
            raise CheckpointChangedError(
                f"'{self.path}' was changed after its signature was checked, so what was read may not be what was "
                "signed. Retry when nothing changes it.",
                path=self.path,
            )

    def _stretch(self, start: int, count_bytes: int, block_bytes: int) -> Iterator[memoryview]:
        with self.opened() as fd:
            yield from read_blocks(fd, start, count_bytes, block_bytes)

    def _places(self, places: Sequence[tuple[int, int]]) -> list[bytes]:
        with self.opened() as fd:  # 4 MiB at most; a separate generator would cost each tensor a call
            return [*read_spots(fd, self.header.data_start, self.data_bytes, places)]

    def _data(self, *, keep_cached: bool = False) -> Iterator[memoryview]:
        start = self.header.data_start
        with self.opened() as fd:
            if keep_cached:
                yield from prefaulted_blocks(fd, self.mapping, start, self.size)
            else:
                yield from read_blocks(fd, start, self.data_bytes)

    @property
    def mapping(self) -> torch.UntypedStorage:
        """The complete file, mapped privately.

        Raises:
            DamagedCheckpointError: The file was truncated after it was opened.
        """
        if self._mapped is None:
            with self.opened() as fd:
                if os.fstat(fd).st_size < self.size:
                    raise self.truncated_error()
                mapping = torch.UntypedStorage.from_file(self._path_of(fd), shared=False, nbytes=self.size)
            self._mapped = cast(torch.UntypedStorage, mapping)
        return self._mapped

    def _path_of(self, fd: int) -> str:
        # The open file itself, even if another file has its name by now.
        for folder in ("/proc/self/fd", "/dev/fd"):
            if os.path.exists(f"{folder}/{fd}"):
                return f"{folder}/{fd}"
        return self.path

    def _open_again(self) -> int:
        problem: Exception | None = None
        try:
            fd = open_regular(self.path, self._root)
            if identity_of(os.fstat(fd)) == self.identity:
                return fd
            os.close(fd)
        except MissingShardError as error:
            problem = error
        raise CheckpointChangedError(
            f"'{self.path}' was replaced or removed while its checkpoint was being read. "
            "Retry when no save is running.",
            path=self.path,
        ) from problem


# A pool of open files that closes idle ones when descriptors run out.


_SHARE: Final = 2
"""Divisor of the process's descriptor limit: these files use one in this many, and the program has the rest."""


def open_or_evict(open_file: Callable[[], int]) -> int:
    """Open a file; if the process has no descriptor left, close idle pooled files and retry.

    Raises:
        Everything that `open_file` raises.
    """
    try:
        return open_file()
    except OSError as error:
        if error.errno not in NO_FILES_LEFT or not evict_idle_files():
            raise
    return open_file()


def evict_idle_files() -> bool:
    """Close all idle pooled files, which are reopened when used; return False if there was none."""
    return _pool.close_all_idle()


class PooledFile:
    """A file that is open while in use and until others need its descriptor; the next use reopens it.

    Several threads use it at once.
    """

    def __init__(self, fd: int, open_again: Callable[[], int], pool: FilePool | None = None) -> None:
        """Take ownership of an open file.

        Args:
            fd: Descriptor, owned by this object from now on.
            open_again: Open the same file, or raise.
            pool: Files that share a limit; None: the process-wide pool.
        """
        self._fd, self._open_again, self._pool = fd, open_again, pool or _pool
        self._users = 0
        self._is_closed = False
        self._opening = threading.Lock()
        self._pool.add(self)

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Keep the file open until the block ends, and yield its descriptor.

        Raises:
            ValueError: The file was closed permanently.
            Everything that reopening it raises.
        """
        self._pool.take(self)
        try:
            with self._opening:
                if self._is_closed:
                    raise ValueError("the file was closed")
                if self._fd < 0:
                    self._fd = self._pool.open(self._open_again)
            yield self._fd
        finally:
            self._pool.give_back(self)

    def close(self) -> None:
        """Close the file permanently once its last use ends."""
        self._pool.close(self)


class FilePool:
    """Open files that share a limit."""

    def __init__(self, most_open: Callable[[], int]) -> None:
        """Begin without files; `most_open` returns how many may be open, unless more are in use at once."""
        self._most_open = most_open
        self._idle: dict[PooledFile, None] = {}
        """Open files that are not in use, the longest-idle one first."""
        self._count = 0
        """Number of open files."""
        self._lock = ForkSafeLock()

    def add(self, file: PooledFile) -> None:
        """Add a new file, and close idle ones for it."""
        with self._lock.held():
            self._count += 1
            self._idle[file] = None
            self._close_idle(self._count - self._most_open())

    def take(self, file: PooledFile) -> None:
        """Keep a file open."""
        with self._lock.held():
            file._users += 1
            self._idle.pop(file, None)

    def give_back(self, file: PooledFile) -> None:
        """Release one use of a file, which can be closed once it has no users."""
        with self._lock.held():
            file._users -= 1
            if file._users == 0 and file._fd >= 0:
                self._idle[file] = None
                self._close_idle(self._count - self._most_open())
                if file._is_closed:
                    self._close(file)

    def open(self, open_again: Callable[[], int]) -> int:
        """Reopen a file, and close idle ones for it."""
        with self._lock.held():
            self._count += 1
            self._close_idle(self._count - self._most_open())
        try:
            return open_or_evict(open_again)
        except BaseException:
            with self._lock.held():
                self._count -= 1
            raise

    def close(self, file: PooledFile) -> None:
        """Close a file permanently, now or when its last user releases it."""
        with self._lock.held():
            file._is_closed = True
            if file._users == 0:
                self._close(file)

    def close_all_idle(self) -> bool:
        """Close all idle files; return False if there was none."""
        with self._lock.held():
            return self._close_idle(len(self._idle))

    def _close_idle(self, count: int) -> bool:
        for file in list(islice(self._idle, count)) if count > 0 else ():
            self._close(file)
        return count > 0

    def _close(self, file: PooledFile) -> None:
        self._idle.pop(file, None)
        if file._fd >= 0:
            os.close(file._fd)
            file._fd = -1
            self._count -= 1


def _most_open() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit // _SHARE if limit >= 0 else 1 << 30


_pool: Final = FilePool(_most_open)


# Prefaulting: a range of a mapped file is brought into the page cache, in huge pages if the system has them.


_POPULATE_READ: Final = 22
"""`madvise`: read the pages and map them, without a page fault for each (Linux 5.14)."""

_WILL_NEED: Final = 3
"""`madvise`: read the pages; for older kernels."""

_HUGE_PAGE: Final = 14
"""`madvise`: use huge pages."""

_PIECE_BYTES: Final = 4 * 1024 * 1024
"""Bytes that are prefaulted at once, ahead of those that are hashed."""

_AHEAD: Final = 8
"""The most such pieces ahead."""

_THREADS: Final = 2
"""Threads per file. With one, the disk idles until it gets a core from the hashing threads: 2.5 GB took 1.06 s, not
0.96."""


def is_prefaulted(mapping: torch.UntypedStorage, begin: int, end: int) -> bool:
    """Return whether the page cache has a range, judged by a few pages; True if the system does not say."""
    return is_resident(mapping.data_ptr() + begin, end - begin)


def advise_huge_pages(mapping: torch.UntypedStorage, begin: int, end: int) -> None:
    """Request huge pages for a range that is about to be read into the page cache.

    The disk then writes into long ranges of memory, and one fault maps each. A kernel without huge pages ignores this.
    """
    base = mapping.data_ptr()
    first = -(-(base + begin) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    last = (base + end) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if last > first:
        _advise(first, last - first, _HUGE_PAGE)


def prefault(mapping: torch.UntypedStorage, begin: int, end: int) -> bool:
    """Read the pages of a range, and map them.

    Returns:
        False if the file is now shorter, so that a page fault would kill the process.
    """
    begin -= begin % mmap.PAGESIZE
    address, size = mapping.data_ptr() + begin, end - begin
    return _advise(address, size, _POPULATE_READ) or (
        ctypes.get_errno() == errno.EINVAL and _advise(address, size, _WILL_NEED)
    )


def prefaulted_blocks(fd: int, mapping: torch.UntypedStorage, begin: int, end: int) -> Iterator[memoryview]:
    """Yield the bytes of a range, and leave it in the page cache for the tensors there.

    The bytes are copied out of the page cache: touching a mapped page that another process has truncated away would
    kill this process. Other threads read missing pages ahead.

    Args:
        fd: The mapped file.
        mapping: The complete mapping.
        begin, end: The range.

    Yields:
        Blocks like those of `read_blocks`: each is valid until the next one is requested, and they end early if the
        file does.
    """
    blocks = read_blocks(fd, begin, end - begin, keep_cached=True)
    if end <= begin or is_prefaulted(mapping, begin, end):
        yield from blocks
        return
    advise_huge_pages(mapping, begin, end)
    ahead = _Ahead(mapping, begin, end)
    try:
        at = begin
        for _ in range(begin, end, BLOCK_BYTES):
            ahead.wait_for(min(at + BLOCK_BYTES, end))
            block = next(blocks, None)
            if block is None:
                return
            at += len(block)
            yield block
    finally:
        ahead.close()


def split_range(begin: int, end: int, piece_bytes: int) -> Iterator[tuple[int, int]]:
    """Divide a file range at multiples of the piece size, so that no huge page belongs to two pieces."""
    while begin < end:
        last = min(begin - begin % piece_bytes + piece_bytes, end)
        yield begin, last
        begin = last


class _Ahead:
    """Threads that prefault a range, a few pieces ahead of the reader that waits for them."""

    def __init__(self, mapping: torch.UntypedStorage, begin: int, end: int) -> None:
        self._mapping = mapping
        self._populated = begin
        self._end = end
        self._left = split_range(begin, end, _PIECE_BYTES)
        self._begun: SimpleQueue[tuple[int, Event]] = SimpleQueue()
        self._room = Semaphore(_AHEAD)
        self._lock = Lock()
        self._is_closed = False
        started = [start_worker(self._populate_pieces, "hfshard-read", daemon=True) for _ in range(_THREADS)]
        self._threads = [one for one in started if one is not None]
        if not self._threads:
            self._stop()

    def wait_for(self, position: int) -> None:
        """Wait until everything before a position has been read, or the threads have stopped."""
        while self._populated < position:
            self._populated, done = self._begun.get()
            done.wait()
            self._room.release()

    def close(self) -> None:
        self._is_closed = True
        self._room.release(_THREADS)
        wait(self._threads)

    def _populate_pieces(self) -> None:
        while True:
            self._room.acquire()
            with self._lock:
                piece = next(self._left, None)
                if piece is None or self._is_closed:
                    return
                done = Event()
                self._begun.put((piece[1], done))
            is_read = False
            try:
                is_read = prefault(self._mapping, *piece)
            finally:
                done.set()
                if not is_read:  # the page cache reads the rest of the file by itself
                    self._stop()
            if not is_read:
                return

    def _stop(self) -> None:
        """Release threads that wait for pieces that will not come."""
        nothing = Event()
        nothing.set()
        self._begun.put((self._end, nothing))


def _advise(address: int, count_bytes: int, advice: int) -> bool:
    return bool(LIBRARY.madvise(ctypes.c_void_p(address), ctypes.c_size_t(count_bytes), advice) == 0)
