"""One safetensors file of this machine: checked as a whole, mapped or read, and held open while there is room."""

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
from queue import SimpleQueue
from threading import Event, Lock, Semaphore
from typing import Final, cast

import torch

from hfshard._util.threads import no_collection, start_thread
from hfshard.constants import MAX_HEADER_BYTES
from hfshard.disk.direct_io import BLOCK_BYTES, HUGE_PAGE_BYTES, LIBRARY, is_resident, read_blocks, read_places
from hfshard.disk.fsops import is_remote
from hfshard.disk.safe_open import NO_FILES_LEFT, Identity, identity_of, open_regular, read_text
from hfshard.errors import CheckpointChangedError, MissingShardError
from hfshard.format.digests import HASHERS
from hfshard.format.header import LENGTH_BYTES, TensorInfo, read_header_length
from hfshard.shards.shard import SafetensorsShard
from hfshard.tensors.stored_tensor import DTYPE_NAMES, PLAIN_DTYPES, iter_blocks

_CPU: Final = torch.device("cpu")

_PLAIN_DTYPES: Final = {DTYPE_NAMES[dtype]: dtype for dtype in PLAIN_DTYPES}


class SafetensorsFile(SafetensorsShard):
    """One safetensors file of this machine; open while it is read, and as long as there is room (see `open_files`).

    Attributes:
        signed_sha256: The sha256 of the whole file that was found to be signed: what is copied is compared with it.
    """

    signed_sha256: str | None = None

    def __init__(self, path: str, root: str, real_root: str | None = None) -> None:
        """Open and check a file (arguments as for `open_regular`).

        Raises:
            DamagedCheckpointError: The header does not match itself or the size of the file.
            UnsafePathError: It is a link that leaves `root`.
        """
        self._root = root
        self._mapped: torch.UntypedStorage | None = None
        fd = open_with_room(partial(open_regular, path, root, real_root))
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
        self._file = HeldFile(fd, self._open_again)

    @property
    def is_far(self) -> bool:
        """Whether it is on a file system of the network."""
        return is_remote(self.identity[0])

    def close(self) -> None:
        """Close the file; tensors that were mapped stay valid, and the mapping ends with the last of them."""
        self._file.close()
        self._mapped = None  # this object lives until a collection of garbage: its file refers to it

    def opened(self) -> AbstractContextManager[int]:
        """The open file, which stays open until the block ends.

        Raises:
            CheckpointChangedError: It had to be opened again, and another file has its name now.
        """
        return self._file.opened()

    def tensor(self, name: str) -> torch.Tensor:
        """Map one tensor: a private mapping of its bytes, paged in when touched."""
        info = self.header.tensors[name]
        return self.shaped(name, self._slice(info) if info.nbytes else torch.UntypedStorage(0))

    def tensors(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Map tensors as `tensor` does, each with a storage of its own; many small ones take half the time."""
        mapped: dict[str, torch.Tensor] = {}
        if not names:
            return mapped
        dtypes = {} if self._complex_as_real else _PLAIN_DTYPES
        infos = self.header.tensors
        data_start = self.header.data_start
        mapping = self.mapping
        with no_collection():
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
        """Hash what was copied, and compare it with what was signed.

        A file can be written over, and put back, so that it looks untouched: through a shared mapping of it, no write
        need change its ctime. So it is not asked for again; tensors that were not copied are hashed from the file.

        Args:
            tensors: Read from this file into memory of their own, on the CPU.

        Raises:
            CheckpointChangedError: Other bytes were there when they were read.
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
                f"'{self.path}' was changed after its signature had been checked: what was read from it is not what "
                "was signed. Load it again when nothing changes it.",
                path=self.path,
            )

    def _stretch(self, start: int, count_bytes: int, block_bytes: int) -> Iterator[memoryview]:
        with self.opened() as fd:
            yield from read_blocks(fd, start, count_bytes, block_bytes)

    def _places(self, places: Sequence[tuple[int, int]]) -> list[bytes]:
        with self.opened() as fd:  # 4 MiB at most; a generator of its own would cost each tensor a call
            return [*read_places(fd, self.header.data_start, self.data_bytes, places)]

    def _data(self, *, keep_cached: bool = False) -> Iterator[memoryview]:
        start = self.header.data_start
        with self.opened() as fd:
            if keep_cached:
                yield from populated_blocks(fd, self.mapping, start, self.size)
            else:
                yield from read_blocks(fd, start, self.data_bytes)

    def _slice(self, info: TensorInfo) -> torch.UntypedStorage:
        start = self.header.data_start + info.begin
        return cast(torch.UntypedStorage, self.mapping[start : start + info.nbytes])

    @property
    def mapping(self) -> torch.UntypedStorage:
        """The whole file, mapped privately.

        Raises:
            DamagedCheckpointError: It was truncated since it was opened.
        """
        if self._mapped is None:
            with self.opened() as fd:
                if os.fstat(fd).st_size < self.size:
                    raise self.truncated_error()
                mapping = torch.UntypedStorage.from_file(self._path_of(fd), shared=False, nbytes=self.size)
            self._mapped = cast(torch.UntypedStorage, mapping)
        return self._mapped

    def _path_of(self, fd: int) -> str:
        # The open file itself, even if its name has been given to another file since.
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
            "Load it again when the process that saves there is done.",
            path=self.path,
        ) from problem


# Files that stay open after they were used, as long as there is room: any number of them, with few descriptors.


_SHARE: Final = 2
"""One of so many descriptors that the process may have is for these files; the others are left to the program."""


def open_with_room(open_file: Callable[[], int]) -> int:
    """Open a file, and where the process has no descriptor left, close held files that nobody uses now for it.

    Raises:
        Everything that `open_file` raises.
    """
    try:
        return open_file()
    except OSError as error:
        if error.errno not in NO_FILES_LEFT or not close_idle_files():
            raise
    return open_file()


def close_idle_files() -> bool:
    """Close all held files that nobody uses now, which are opened again when they are used; False if there was none."""
    return _pool.close_all_idle()


class HeldFile:
    """A file that is open while it is used, and afterwards until others need its descriptor; then it is opened again.

    Used by several threads at once.
    """

    def __init__(self, fd: int, open_again: Callable[[], int], pool: FilePool | None = None) -> None:
        """Take an open file.

        Args:
            fd: Belongs to this object from now on.
            open_again: Opens the same file, or raises.
            pool: The files that share a limit; None: all of the process.
        """
        self._fd, self._open_again, self._pool = fd, open_again, pool or _pool
        self._users = 0
        self._is_closed = False
        self._opening = threading.Lock()
        self._pool.add(self)

    @contextmanager
    def opened(self) -> Iterator[int]:
        """The open file, which stays open until the block ends.

        Raises:
            ValueError: It was closed for good.
            Everything that opening it again raises.
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
        """Close it for good, when nobody uses it any more."""
        self._pool.close(self)


class FilePool:
    """Held files that share a limit."""

    def __init__(self, most_open: Callable[[], int]) -> None:
        """Take what tells how many may be open, if no more are in use at once."""
        self._most_open = most_open
        self._idle: dict[HeldFile, None] = {}
        """Those that are open and not in use; first the one that was not in use for the longest time."""
        self._count = 0
        """How many are open."""
        self.renew_lock()

    def renew_lock(self) -> None:
        """Make a new lock: in a forked child, a thread that does not exist there may hold the old one."""
        self._lock = threading.Lock()

    def add(self, file: HeldFile) -> None:
        """Count a new one, and close others for it."""
        with self._lock:
            self._count += 1
            self._idle[file] = None
            self._close_idle(self._count - self._most_open())

    def take(self, file: HeldFile) -> None:
        """Keep a file open."""
        with self._lock:
            file._users += 1
            self._idle.pop(file, None)

    def give_back(self, file: HeldFile) -> None:
        """Let a file be closed when its last user has given it back."""
        with self._lock:
            file._users -= 1
            if file._users == 0 and file._fd >= 0:
                self._idle[file] = None
                self._close_idle(self._count - self._most_open())
                if file._is_closed:
                    self._close(file)

    def open(self, open_again: Callable[[], int]) -> int:
        """Open a file again, and close others for it."""
        with self._lock:
            self._count += 1
            self._close_idle(self._count - self._most_open())
        try:
            return open_with_room(open_again)
        except BaseException:
            with self._lock:
                self._count -= 1
            raise

    def close(self, file: HeldFile) -> None:
        """Close a file for good, now or when its last user has given it back."""
        with self._lock:
            file._is_closed = True
            if file._users == 0:
                self._close(file)

    def close_all_idle(self) -> bool:
        """Close all that can be closed; False if there was none."""
        with self._lock:
            return self._close_idle(len(self._idle))

    def _close_idle(self, count: int) -> bool:
        for file in list(islice(self._idle, count)) if count > 0 else ():
            self._close(file)
        return count > 0

    def _close(self, file: HeldFile) -> None:
        self._idle.pop(file, None)
        if file._fd >= 0:
            os.close(file._fd)
            file._fd = -1
            self._count -= 1


def _most_open() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit // _SHARE if limit >= 0 else 1 << 30


_pool: Final = FilePool(_most_open)
os.register_at_fork(after_in_child=_pool.renew_lock)


# Bring a stretch of a mapped file into the page cache, in huge pages where the system has them.


_POPULATE_READ: Final = 22
"""`madvise`: read the pages and map them, without a page fault for each (Linux 5.14)."""

_WILL_NEED: Final = 3
"""`madvise`: read the pages; for older kernels."""

_HUGE_PAGE: Final = 14
"""`madvise`: in huge pages."""

_PIECE_BYTES: Final = 4 * 1024 * 1024
"""Bytes that are brought in at once, ahead of those that are hashed."""

_AHEAD: Final = 8
"""Such pieces."""

_THREADS: Final = 2
"""With one for a file, the disk waits for it to get a core that others hash on: 2.5 GB took 1.06 s instead of 0.96."""


def is_populated(mapping: torch.UntypedStorage, begin: int, end: int) -> bool:
    """Whether the page cache holds a stretch, judged by a few pages; True where the system does not say."""
    return is_resident(mapping.data_ptr() + begin, end - begin)


def advise_huge(mapping: torch.UntypedStorage, begin: int, end: int) -> None:
    """Let a stretch that is about to be read come into the page cache in huge pages.

    The disk then writes into long stretches of memory, and each is mapped by one fault. A kernel without them does
    nothing.
    """
    base = mapping.data_ptr()
    first = -(-(base + begin) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    last = (base + end) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if last > first:
        _advise(first, last - first, _HUGE_PAGE)


def populate(mapping: torch.UntypedStorage, begin: int, end: int) -> bool:
    """Read the pages of a stretch, and map them.

    Returns:
        False if the file is shorter by now, where a page fault would end the process.
    """
    begin -= begin % mmap.PAGESIZE
    address, size = mapping.data_ptr() + begin, end - begin
    return _advise(address, size, _POPULATE_READ) or (
        ctypes.get_errno() == errno.EINVAL and _advise(address, size, _WILL_NEED)
    )


def populated_blocks(fd: int, mapping: torch.UntypedStorage, begin: int, end: int) -> Iterator[memoryview]:
    """Yield the bytes of a stretch, and leave it in the page cache, because the tensors there will be used.

    They are copied out of the page cache: a page of the mapping that is gone because somebody has cut the file short
    would end the process. What is missing is read ahead by another thread.

    Args:
        fd: The file that is mapped.
        mapping: All of it.
        begin, end: The stretch.

    Yields:
        Blocks as `read_blocks` does: each is valid until the next one is asked for, and if the file ends early, so do
        they.
    """
    blocks = read_blocks(fd, begin, end - begin, keep_cached=True)
    if end <= begin or is_populated(mapping, begin, end):
        yield from blocks
        return
    advise_huge(mapping, begin, end)
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


def pieces_of(begin: int, end: int, piece_bytes: int) -> Iterator[tuple[int, int]]:
    """Divide a stretch of a file at multiples of a piece, so that no huge page belongs to two pieces."""
    while begin < end:
        last = min(begin - begin % piece_bytes + piece_bytes, end)
        yield begin, last
        begin = last


class _Ahead:
    """Threads that populate a stretch, a few pieces ahead of who waits for them."""

    def __init__(self, mapping: torch.UntypedStorage, begin: int, end: int) -> None:
        self._mapping = mapping
        self._populated = begin
        self._end = end
        self._left = pieces_of(begin, end, _PIECE_BYTES)
        self._begun: SimpleQueue[tuple[int, Event]] = SimpleQueue()
        self._room = Semaphore(_AHEAD)
        self._lock = Lock()
        self._is_closed = False
        started = [start_thread(self._populate_pieces, "hfshard-read", daemon=True) for _ in range(_THREADS)]
        self._threads = [one for one in started if one is not None]
        if not self._threads:
            self._stop()

    def wait_for(self, position: int) -> None:
        """Wait until everything before a position was read, or the threads have stopped."""
        while self._populated < position:
            self._populated, done = self._begun.get()
            done.wait()
            self._room.release()

    def close(self) -> None:
        """End the threads."""
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
                is_read = populate(self._mapping, *piece)
            finally:
                done.set()
                if not is_read:  # the page cache reads the rest by itself, as far as the file goes
                    self._stop()
            if not is_read:
                return

    def _stop(self) -> None:
        """Let nobody wait for pieces that will not come."""
        nothing = Event()
        nothing.set()
        self._begun.put((self._end, nothing))


def _advise(address: int, count_bytes: int, advice: int) -> bool:
    return bool(LIBRARY.madvise(ctypes.c_void_p(address), ctypes.c_size_t(count_bytes), advice) == 0)
