"""Read a stretch of a file block by block and ahead of its use, past the page cache where the file is cold."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import wait
from functools import partial
from queue import SimpleQueue
from typing import Final

from hfshard._util.threads import in_threads, start_thread
from hfshard.constants import DATA_ALIGNMENT
from hfshard.storage.disk.direct_io import (
    BLOCK_BYTES,
    HUGE_PAGE_BYTES,
    LIBRARY,
    aligned_block,
    aligned_blocks,
    is_direct_wanted,
)

_AHEAD: Final = 2
"""Reads of a huge page that are made while one is in use."""

_LEAST_PER_PLACE: Final = 100
"""Places that are more than one in so many bytes of their stretch are read into the page cache, for all that read it:
each of four processes that load a file of a thousand small tensors would read a sixteenth of it more.
"""

_PLACES_AT_ONCE: Final = 8
"""Small reads that are under way at once: each waits for the disk."""

_MIN_AHEAD_BYTES: Final = 4 * BLOCK_BYTES
"""Shorter stretches are not worth a thread."""

_PROBES: Final = 8
"""Places at which the page cache is probed."""

_MMAP: Final = LIBRARY.mmap
_MMAP.restype = ctypes.c_void_p
_MMAP.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_MUNMAP: Final = LIBRARY.munmap
_MUNMAP.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
LIBRARY.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def read_blocks(
    fd: int, start: int, count_bytes: int, block_bytes: int = BLOCK_BYTES, *, keep_cached: bool = False
) -> Iterator[memoryview]:
    """Yield the bytes of a file from `start` on, in blocks of `block_bytes`; only the last one is shorter.

    A block is valid until the next one is asked for. If the file ends early, so do the blocks.

    Args:
        fd: Open for reading; the caller closes it.
        start, count_bytes: The stretch.
        block_bytes: The size of a block.
        keep_cached: Whether to leave what is read in the page cache.
    """
    # In the page cache, a stretch would be read with as much behind it as the kernel reads ahead.
    past_cache = block_bytes >= BLOCK_BYTES and not keep_cached and is_direct_wanted(count_bytes)
    direct = open_direct(fd) if past_cache and not is_cached(fd, start, count_bytes) else -1
    reads = _Reads(fd, direct, start, count_bytes, block_bytes)
    try:
        is_long = count_bytes >= _MIN_AHEAD_BYTES
        yield from reads.ahead() if direct >= 0 and is_long else reads.one_by_one()  # the page cache does it by itself
    finally:
        if direct >= 0:
            os.close(direct)


def read_places(fd: int, start: int, count_bytes: int, places: Sequence[tuple[int, int]]) -> Iterable[bytes]:
    """Read a few small places of a stretch of a file.

    Of a cold file past the page cache, if they are few for its size: small pages here and there in it would keep the
    stretch from coming into it in huge ones. And several at once.

    Args:
        fd: Open for reading.
        start, count_bytes: The stretch.
        places: The offset of each in the file, and its length.

    Returns:
        The bytes of each, shorter where the file ends.
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
        return in_threads(read, places, _PLACES_AT_ONCE)
    finally:
        os.close(direct)


def is_cached(fd: int, start: int, count_bytes: int) -> bool:
    """Whether the page cache holds a stretch of a file, judged by a few pages; True where the system does not say.

    `preadv2` with RWF_NOWAIT would answer too, but starts to read what it does not find.
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
    """Do what `is_cached` does for a stretch of a file that is mapped already."""
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
    """Open the same file as `fd` for reading past the page cache; -1 where that is impossible."""
    try:
        return reopen_direct(fd)
    except OSError:
        return -1


def reopen_direct(fd: int) -> int:
    """Do what `open_direct` does, but raise the OSError."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)


def read_direct(fd: int, direct: int, buffer: memoryview, start: int, count_bytes: int) -> memoryview:
    """Read a stretch of a file into an aligned buffer.

    Args:
        fd: The file.
        direct: The same, opened by `open_direct`; or -1.
        buffer: Begins at a page and has room for a page more than the stretch, on either side of it.
        start, count_bytes: The stretch.

    Returns:
        The part of `buffer` that holds the stretch, shorter than asked for where the file ends.
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


class _Reads:
    """The reads of one stretch."""

    def __init__(self, fd: int, direct: int, start: int, count_bytes: int, block_bytes: int) -> None:
        self.fd = fd
        self.direct = direct
        self.end = start + count_bytes
        self.block_bytes = block_bytes
        self.is_closed = False
        # Past the page cache a huge page at once, without room around it where every read begins at a page.
        self.read_bytes = block_bytes if direct < 0 else max(1, HUGE_PAGE_BYTES // block_bytes) * block_bytes
        is_aligned = start % DATA_ALIGNMENT == 0 and self.read_bytes % DATA_ALIGNMENT == 0
        self.room = min(self.read_bytes, _aligned(count_bytes)) + (0 if is_aligned else 2 * DATA_ALIGNMENT)
        self.starts = iter(range(start, self.end, self.read_bytes))

    def one_by_one(self) -> Iterator[memoryview]:
        """Yield the blocks, each read when it is asked for."""
        buffer = aligned_block(self.room) if self.direct >= 0 else memoryview(bytearray(self.room))
        for at in self.starts:
            found = self._read(buffer, at)
            yield from self._blocks_of(found)
            if len(found) < self.read_bytes:
                return

    def ahead(self) -> Iterator[memoryview]:
        """Yield the blocks, read by another thread while one is in use; by this one where none can be started."""
        free: SimpleQueue[memoryview] = SimpleQueue()
        full: SimpleQueue[tuple[memoryview, memoryview] | None] = SimpleQueue()
        # A daemon: a traceback may hold this generator when Python exits, and then nothing ends the thread.
        reading = start_thread(partial(self._read_all, free, full), "hfshard-read", daemon=True)
        if reading is None:
            yield from self.one_by_one()
            return
        for buffer in aligned_blocks(_AHEAD + 1, self.room):
            free.put(buffer)
        try:
            while (filled := full.get()) is not None:
                found, buffer = filled
                yield from self._blocks_of(found)
                free.put(buffer)
            reading.result()
        finally:
            self.is_closed = True
            free.put(memoryview(b""))  # it may wait for one
            wait([reading])

    def _read_all(self, free: SimpleQueue[memoryview], full: SimpleQueue[tuple[memoryview, memoryview] | None]) -> None:
        """Read all blocks, each into a buffer that is free."""
        try:
            for at in self.starts:
                buffer = free.get()
                if self.is_closed:
                    return
                found = self._read(buffer, at)
                full.put((found, buffer))
                if len(found) < self.read_bytes:
                    return
        finally:
            full.put(None)

    def _blocks_of(self, found: memoryview) -> Iterator[memoryview]:
        for at in range(0, len(found), self.block_bytes):
            yield found[at : at + self.block_bytes]

    def _read(self, buffer: memoryview, at: int) -> memoryview:
        return read_direct(self.fd, self.direct, buffer, at, min(self.read_bytes, self.end - at))
