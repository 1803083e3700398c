"""Block-by-block reading and writing of files, bypassing the page cache."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from queue import SimpleQueue
from typing import Final, NamedTuple, TypeAlias

from hfshard._util.progress import ProgressCallback
from hfshard._util.threads import run_in_threads, start_worker
from hfshard.constants import DATA_ALIGNMENT
from hfshard.disk.fsops import UNSUPPORTED
from hfshard.errors import InvalidArgumentError

LIBRARY: Final = ctypes.CDLL(None, use_errno=True)
"""The C library, for calls that Python lacks."""

BLOCK_BYTES: Final = 1024 * 1024
"""Bytes of one read or write: enough for any disk, and still in the core's cache when it is hashed, then copied."""

DIRECT_VARIABLE: Final = "HFSHARD_DIRECT"
"""The environment variable that disables O_DIRECT (0), or enables it for small files too (1)."""

HUGE_PAGE_BYTES: Final = 2 * 1024 * 1024
"""Huge page size of x86 and most others; with another size, blocks are slightly slower or take slightly more memory."""

_MIN_HUGE_BYTES: Final = 512 * 1024
"""Smaller memory gets no huge page: it would not pay."""

_MIN_DIRECT_BYTES: Final = 1024 * 1024
"""Smaller files go through the page cache: a flush of one costs as much as its bytes."""


def is_direct_wanted(size: int) -> bool:
    """Return whether a file of this size should bypass the page cache, if its file system can."""
    wanted = check_setting()
    return hasattr(os, "O_DIRECT") and wanted != "0" and (wanted == "1" or size >= _MIN_DIRECT_BYTES)


def check_setting() -> str:
    """Return the value of the environment variable: "", "0" or "1".

    Raises:
        InvalidArgumentError: It is anything else.
    """
    wanted = os.environ.get(DIRECT_VARIABLE, "")
    if wanted not in ("", "0", "1"):
        raise InvalidArgumentError(f"The variable {DIRECT_VARIABLE} must be 0 or 1, got {wanted!r}.")
    return wanted


def set_direct(fd: int, *, wanted: bool) -> bool:
    """Enable or disable O_DIRECT of an open file; return False if the file system does not support it."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def aligned_block(count_bytes: int) -> memoryview:
    """Allocate page-aligned memory, which returns to the system with the last view of it."""
    return aligned_blocks(1, count_bytes)[0]


def aligned_blocks(count: int, count_bytes: int) -> list[memoryview]:
    """Allocate several such blocks next to each other, in huge pages if the system has them.

    Without the page cache, the disk gets a list of physical memory ranges, one for each page. A list of small pages
    exceeds one request: reading 2.5 GB took 2.0 s into small pages and 0.64 s into huge ones.
    """
    step = -(-count_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    room = step * count
    is_huge = room >= _MIN_HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE")
    if is_huge:
        room = -(-room // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    pages = mmap.mmap(-1, room + HUGE_PAGE_BYTES if is_huge else room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    begin = 0
    if is_huge:
        begin = -ctypes.addressof(ctypes.c_char.from_buffer(pages)) % HUGE_PAGE_BYTES
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    memory = memoryview(pages)
    return [memory[at : at + count_bytes] for at in range(begin, begin + count * step, step)]


def allocate(fd: int, size: int) -> None:
    """Reserve the space of a new file; do nothing if the file system cannot.

    It does not use `os.posix_fallocate`: if the file system cannot, the C library would write a byte into each block.

    Raises:
        OSError: There is no space.
    """
    while LIBRARY.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)) != 0:
        number = ctypes.get_errno()
        if number in UNSUPPORTED | {errno.EINVAL}:
            return
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


# Reads of a file range: block by block and ahead of its use, bypassing the page cache if the file is cold.


_AHEAD: Final = 2
"""Huge pages that are read while one is in use."""

_LEAST_PER_PLACE: Final = 100
"""If the spots are more than 1/100 of the range's bytes, they are read into the page cache, for all readers: otherwise,
each of four processes that load a file of a thousand small tensors would read a sixteenth of it more.
"""

_PLACES_AT_ONCE: Final = 8
"""Small reads in progress at once: each waits for the disk."""

_MIN_AHEAD_BYTES: Final = 4 * BLOCK_BYTES
"""Shorter ranges are read without another thread."""

_PROBES: Final = 8
"""Number of pages at which the page cache is probed."""

_MMAP: Final = LIBRARY.mmap
_MMAP.restype = ctypes.c_void_p
_MMAP.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_MUNMAP: Final = LIBRARY.munmap
_MUNMAP.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
LIBRARY.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


class FileRange(NamedTuple):
    """A range of a file that is opened when it is read."""

    opened: Callable[[], AbstractContextManager[int]]
    """Keeps the file open for reading until the block ends."""
    start: int
    count_bytes: int


def read_blocks(
    fd: int, start: int, count_bytes: int, block_bytes: int = BLOCK_BYTES, *, keep_cached: bool = False
) -> Iterator[memoryview]:
    """Yield the bytes of a file from `start` on, in blocks of `block_bytes`; only the last one is shorter.

    A block is valid until the next one is requested. If the file ends early, so do the blocks.

    Args:
        fd: Open for reading; the caller closes it.
        start, count_bytes: The range.
        block_bytes: The size of a block.
        keep_cached: Whether to leave the read bytes in the page cache.
    """
    return read_ranges([FileRange(lambda: nullcontext(fd), start, count_bytes)], block_bytes, keep_cached=keep_cached)


def read_ranges(
    ranges: Sequence[FileRange], block_bytes: int = BLOCK_BYTES, *, keep_cached: bool = False
) -> Iterator[memoryview]:
    """Do what `read_blocks` does for several ranges, one after the other; the last block of each may be shorter."""
    reads = _Reads(ranges, block_bytes, keep_cached=keep_cached)
    try:
        yield from reads.blocks()
    finally:
        reads.close()


def read_spots(fd: int, start: int, count_bytes: int, places: Sequence[tuple[int, int]]) -> Iterable[bytes]:
    """Read a few small spots in a range of a file.

    If the file is cold and the spots are few for the range's size, they are read several at once, bypassing the page
    cache: scattered small pages in the cache would keep it from reading the range in huge ones.

    Args:
        fd: Open for reading.
        start, count_bytes: The range.
        places: The offset in the file and the length of each spot.

    Returns:
        The bytes of each spot, shorter if the file ends there.
    """
    places_bytes = sum(count + DATA_ALIGNMENT for _, count in places)
    is_few = len(places) > 1 and places_bytes * _LEAST_PER_PLACE <= count_bytes
    past_cache = is_few and is_direct_wanted(count_bytes) and not is_cached(fd, start, count_bytes)
    direct = open_direct(fd) if past_cache else -1
    if direct < 0:
        return (os.pread(fd, count, at) for at, count in places)

    def read(place: tuple[int, int], _cancelled: object) -> bytes:
        at, count = place
        return bytes(read_direct(fd, direct, aligned_block(count + 2 * DATA_ALIGNMENT), at, count))

    try:
        return run_in_threads(read, places, _PLACES_AT_ONCE)
    finally:
        os.close(direct)


def is_cached(fd: int, start: int, count_bytes: int) -> bool:
    """Return whether the page cache has a range of a file, judged by a few pages; True if the system does not say.

    `preadv2` with RWF_NOWAIT would tell too, but starts to read missing pages.
    """
    lead = start % mmap.PAGESIZE
    room = lead + max(count_bytes, 1)
    address = _MMAP(None, room, mmap.PROT_READ, mmap.MAP_SHARED, fd, start - lead)  # Python's hides its address
    if address == _MAP_FAILED:
        return True
    try:
        return is_resident(address + lead, count_bytes)
    finally:
        _MUNMAP(address, room)


def is_resident(address: int, count_bytes: int) -> bool:
    """Do what `is_cached` does for a range of a file that is already mapped."""
    resident = ctypes.c_ubyte()
    place = ctypes.byref(resident)
    found = [0, 0]
    for number in range(_PROBES):
        # Not at the beginning of a tensor, which was read for the file's fingerprint.
        at = address + (2 * number + 1) * count_bytes // (2 * _PROBES)
        if LIBRARY.mincore(at - at % mmap.PAGESIZE, 1, place) != 0:
            return True
        found[resident.value & 1] += 1
        if 2 * max(found) > _PROBES:
            break
    return found[1] >= found[0]


def open_direct(fd: int) -> int:
    """Open the same file as `fd` for reading without the page cache; return -1 if that is impossible."""
    try:
        return reopen_direct(fd)
    except OSError:
        return -1


def reopen_direct(fd: int) -> int:
    """Do what `open_direct` does, but raise the OSError."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)


def read_direct(fd: int, direct: int, buffer: memoryview, start: int, count_bytes: int) -> memoryview:
    """Read a range of a file into an aligned buffer.

    Args:
        fd: The file.
        direct: The same file, opened by `open_direct`; or -1.
        buffer: Page-aligned memory with room for the range and one more page on either side of it.
        start, count_bytes: The range.

    Returns:
        The part of `buffer` with the range, shorter than requested if the file ends early.
    """
    lead = start % DATA_ALIGNMENT
    at = start - lead
    wanted = lead + count_bytes
    filled = 0
    if direct >= 0:
        whole = _aligned(wanted)
        try:
            while filled < wanted and filled % DATA_ALIGNMENT == 0:
                count = os.preadv(direct, [buffer[filled:whole]], at + filled)
                filled += count
                if count == 0:
                    break
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    while filled < wanted and (count := os.preadv(fd, [buffer[filled:wanted]], at + filled)):
        filled += count
    return buffer[lead : min(filled, wanted)]


def _aligned(count_bytes: int) -> int:
    return -(-count_bytes // DATA_ALIGNMENT) * DATA_ALIGNMENT


class _Read(NamedTuple):
    """One read of a file, which is open, also as `direct` unless that is -1."""

    fd: int
    direct: int
    start: int
    count_bytes: int

    def into(self, buffer: memoryview) -> memoryview:
        """Do it; see `read_direct`."""
        return read_direct(self.fd, self.direct, buffer, self.start, self.count_bytes)


class _Reads:
    def __init__(self, ranges: Sequence[FileRange], block_bytes: int, *, keep_cached: bool) -> None:
        self._ranges = ranges
        self._block_bytes = block_bytes
        self._may_pass_cache = block_bytes >= BLOCK_BYTES and not keep_cached
        # Without the page cache: a huge page at once, with no room around it if every read begins at a page.
        self._direct_bytes = max(1, HUGE_PAGE_BYTES // block_bytes) * block_bytes
        places = (block_bytes, self._direct_bytes, *(one.start for one in ranges))
        is_aligned = not any(place % DATA_ALIGNMENT for place in places)
        self._longest = max((_aligned(one.count_bytes) for one in ranges), default=0)
        self._around = 0 if is_aligned else 2 * DATA_ALIGNMENT
        self._is_closed = False
        self._reads = self._each_read()

    def blocks(self) -> Iterator[memoryview]:
        """Yield the blocks. The page cache reads ahead by itself, within a range; else another thread does."""
        first = next(self._reads, None)
        if first is None:
            return
        reads = chain([first], self._reads)
        is_long = sum(one.count_bytes for one in self._ranges) >= _MIN_AHEAD_BYTES
        is_cached_range = first.direct < 0 and (len(self._ranges) == 1 or not self._may_pass_cache)
        yield from self._ahead(reads) if is_long and not is_cached_range else self._one_by_one(reads)

    def close(self) -> None:
        """Close what is open."""
        self._reads.close()

    def _each_read(self) -> Generator[_Read]:
        for opened, start, count_bytes in self._ranges:
            with opened() as fd:
                # Through the page cache, the kernel would also read ahead beyond the range.
                past_cache = self._may_pass_cache and is_direct_wanted(count_bytes)
                direct = open_direct(fd) if past_cache and not is_cached(fd, start, count_bytes) else -1
                read_bytes = self._block_bytes if direct < 0 else self._direct_bytes
                end = start + count_bytes
                try:
                    for at in range(start, end, read_bytes):
                        yield _Read(fd, direct, at, min(read_bytes, end - at))
                finally:
                    if direct >= 0:
                        os.close(direct)

    def _one_by_one(self, reads: Iterable[_Read]) -> Iterator[memoryview]:
        """Yield the blocks, each read when it is requested."""
        cached = aligned = memoryview(b"")
        for read in reads:
            if read.direct >= 0:
                buffer = aligned = aligned or aligned_block(self._room(self._direct_bytes))
            else:
                buffer = cached = cached or memoryview(bytearray(self._room(self._block_bytes)))
            found = read.into(buffer)
            yield from self._blocks_of(found)
            if len(found) < read.count_bytes:
                return

    def _ahead(self, reads: Iterable[_Read]) -> Iterator[memoryview]:
        """Yield the blocks, read by another thread while one is in use; by this thread if none can be started."""
        free: SimpleQueue[memoryview] = SimpleQueue()
        full: SimpleQueue[tuple[memoryview, memoryview] | None] = SimpleQueue()
        # A daemon: if a traceback holds this generator when Python exits, nothing ends the thread.
        reading = start_worker(partial(self._read_all, reads, free, full), "hfshard-read", daemon=True)
        if reading is None:
            yield from self._one_by_one(reads)
            return
        for buffer in aligned_blocks(_AHEAD + 1, self._room(self._direct_bytes)):
            free.put(buffer)
        try:
            while (filled := full.get()) is not None:
                found, buffer = filled
                yield from self._blocks_of(found)
                free.put(buffer)
            reading.result()
        finally:
            self._is_closed = True
            free.put(memoryview(b""))  # it may wait for one
            wait([reading])

    def _read_all(
        self,
        reads: Iterable[_Read],
        free: SimpleQueue[memoryview],
        full: SimpleQueue[tuple[memoryview, memoryview] | None],
    ) -> None:
        try:
            for read in reads:
                buffer = free.get()
                if self._is_closed:
                    return
                found = read.into(buffer)
                full.put((found, buffer))
                if len(found) < read.count_bytes:
                    return
        finally:
            full.put(None)

    def _blocks_of(self, found: memoryview) -> Iterator[memoryview]:
        for at in range(0, len(found), self._block_bytes):
            yield found[at : at + self._block_bytes]

    def _room(self, read_bytes: int) -> int:
        return min(read_bytes, self._longest) + self._around


# Writes of a file from its beginning to its end in aligned blocks, bypassing the page cache if possible.


_BLOCKS: Final = 4
"""Blocks of a file that are being filled or written at once."""

_BLOCKS_HASHED: Final = 6
"""The same if another thread hashes them."""

_Blocks: TypeAlias = "queue.SimpleQueue[memoryview | None]"

_COPY_BY_LIBRARY_BYTES: Final = 64 * 1024
"""Size from which a copy releases Python's lock, so that other files are hashed and copied at the same time."""


class BlockWriter:
    """A writer of one new file from its beginning to its end: one thread fills blocks, others hash and write them."""

    def __init__(
        self,
        fd: int,
        size: int,
        cancelled: threading.Event,
        progress_callback: ProgressCallback | None,
        *,
        background: bool,
        hash_block: Callable[[memoryview], object] | None = None,
    ) -> None:
        """Wrap an open, empty file, and reserve its space.

        Args:
            fd: Open for writing; the caller closes it.
            size: The file's final size in bytes.
            cancelled: Once it is set, the next block raises.
            progress_callback: Called with the number of bytes of each block written, possibly from another thread.
            background: Whether to write in another thread, if one can be started, while the next block is filled.
            hash_block: Called in one more thread, if it can be started, with each block before it is written; with the
                last one before `finish` returns.

        Raises:
            OSError: There is no space.
        """
        self._fd = fd
        self._hash_block = hash_block
        self._cancelled = cancelled
        self._progress_callback = progress_callback
        self._is_direct = is_direct_wanted(size) and set_direct(fd, wanted=True)
        if self._is_direct:
            allocate(fd, size)
        block_bytes = min(BLOCK_BYTES, max(1, -(-size // DATA_ALIGNMENT)) * DATA_ALIGNMENT)
        self._is_several = background and size > block_bytes
        count = (_BLOCKS if hash_block is None else _BLOCKS_HASHED) if self._is_several else 1
        self._block, *self._others = aligned_blocks(count, block_bytes)
        self._filled = self._at = 0
        self._unhashed: _Blocks = queue.SimpleQueue()
        self._full: _Blocks = queue.SimpleQueue()
        self._free: _Blocks = queue.SimpleQueue()
        self._is_closed = False
        self._hashing: Future[None] | None = None
        self._writing: Future[None] | None = None

    def write(self, view: memoryview) -> None:
        """Write the next bytes; they are copied before this returns.

        Raises:
            OSError: This block, or one before it, could not be written.
            InterruptedError: `cancelled` was set.
        """
        while view:
            count = min(len(view), len(self._block) - self._filled)
            _copy_bytes(self._block[self._filled : self._filled + count], view[:count])
            self._filled += count
            view = view[count:]
            if self._filled == len(self._block):
                self._hand_on()

    def finish(self) -> None:
        """Write the rest, and wait until everything is written; the caller flushes the file to disk."""
        self._take(self._block[: self._filled])
        self._end_writing()
        self._to_buffered(self._fd)

    def close(self) -> None:
        """End the other threads; drop the blocks that they have not begun to hash or write."""
        self._is_closed = True
        self._unhashed.put(None)
        self._full.put(None)
        wait([one for one in (self._hashing, self._writing) if one is not None])

    def _hand_on(self) -> None:
        if self._cancelled.is_set():
            raise InterruptedError("another file of this save failed")
        if self._is_several and self._writing is None:
            self._writing = self._start_writing()
            self._is_several = self._writing is not None
            if self._hash_block is not None and self._is_several:
                self._hashing = start_worker(partial(self._hash_in_background, self._hash_block), "hfshard-hash")
        self._take(self._block)
        if self._writing is not None:
            block = self._free.get()
            if block is None:
                self._end_writing()  # raises the error that ended it
                raise InterruptedError("the file was finished")
            self._block = block
        self._filled = 0

    def _take(self, block: memoryview) -> None:
        """Hash and write a block, or pass it to the threads that do."""
        if self._hashing is not None:
            self._unhashed.put(block)
            return
        if self._hash_block is not None:
            self._hash_block(block)
        if self._writing is not None:
            self._full.put(block)
        else:
            self._write(self._fd, [block])

    def _start_writing(self) -> Future[None] | None:
        fd = os.dup(self._fd)  # its own one: after repeated Ctrl-C, the caller may close the other one early
        writing = start_worker(partial(self._write_in_background, fd), "hfshard-disk")
        if writing is None:
            os.close(fd)
            return None
        for block in self._others:
            self._free.put(block)
        return writing

    def _end_writing(self) -> None:
        """Wait until the other threads have hashed and written all; raise the error that ended one."""
        if self._hashing is not None:
            self._unhashed.put(None)
            self._hashing.result()
        if self._writing is not None:
            self._full.put(None)
            self._writing.result()

    def _hash_in_background(self, hash_block: Callable[[memoryview], object]) -> None:
        try:
            while (block := self._unhashed.get()) is not None and not self._is_closed:
                hash_block(block)
                self._full.put(block)
        finally:
            self._full.put(None)

    def _write_in_background(self, fd: int) -> None:
        try:
            while (blocks := self._next_full()) and not self._is_closed:
                self._write(fd, blocks)
                for block in blocks:
                    self._free.put(block)
        finally:
            os.close(fd)
            self._free.put(None)  # so that nothing waits for a block forever

    def _next_full(self) -> list[memoryview]:
        """Wait for a full block; without the page cache take all full ones: a disk is faster with large requests."""
        blocks: list[memoryview] = []
        while not blocks or (self._is_direct and not self._full.empty()):
            block = self._full.get()
            if block is None:
                self._full.put(None)
                break
            blocks.append(block)
        return blocks

    def _write(self, fd: int, blocks: Sequence[memoryview]) -> None:
        *before, last = blocks
        whole = len(last) - len(last) % DATA_ALIGNMENT if self._is_direct else len(last)
        self._write_all(fd, [block for block in (*before, last[:whole]) if block])
        if whole < len(last):  # the end of the file
            self._to_buffered(fd)
            self._write_all(fd, [last[whole:]])
        if self._progress_callback is not None:
            self._progress_callback(sum(map(len, blocks)))

    def _write_all(self, fd: int, left: list[memoryview]) -> None:
        while left:
            try:
                count = os.pwritev(fd, left, self._at) if len(left) > 1 else os.pwrite(fd, left[0], self._at)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._is_direct:
                    raise
                self._to_buffered(fd)  # the file system accepts O_DIRECT, but needs another alignment
                continue
            self._at += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if left:
                left[0] = left[0][count:]

    def _to_buffered(self, fd: int) -> None:
        if self._is_direct:
            set_direct(fd, wanted=False)
            self._is_direct = False


def _copy_bytes(target: memoryview, source: memoryview) -> None:
    if len(source) < _COPY_BY_LIBRARY_BYTES or source.readonly:
        target[:] = source
        return
    byte = ctypes.c_char
    ctypes.memmove(ctypes.addressof(byte.from_buffer(target)), ctypes.addressof(byte.from_buffer(source)), len(source))


# Detection of network file systems.


_REMOTE: Final = frozenset({
    "nfs", "nfs3", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs",
    "pvfs2", "orangefs", "wekafs", "panfs",
})  # fmt: skip
"""Types whose files are on another machine: a page fault is a request. `is_networked` adds FUSE, mostly remote too."""


def is_networked(device: int) -> bool:
    """Return whether the files of a device (`st_dev`) come over the network; False if the system does not say."""
    kind = _type_of(device)
    return kind in _REMOTE or kind.split(".")[0] in ("fuse", "fuseblk")


def _type_of(device: int) -> str:
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
            for line in mounts:
                mount, _, kind = line.partition(" - ")
                if mount.split()[2:3] == [number]:
                    return kind.split()[0]
    except OSError:
        return ""
    return ""
