"""Read a stretch of a file block by block and ahead of its use, past the page cache where the file is cold."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import wait
from functools import partial
from queue import SimpleQueue
from typing import Final

from hfshard._util.threads import start_thread
from hfshard.constants import DATA_ALIGNMENT
from hfshard.storage.disk.direct_io import BLOCK_BYTES, LIBRARY, aligned_block, is_direct_wanted

_AHEAD: Final = 2
"""Blocks that are read while one is in use."""

_MIN_AHEAD_BYTES: Final = 4 * BLOCK_BYTES
"""Shorter stretches are not worth a thread."""

_PROBES: Final = 8
"""Places at which the page cache is probed."""


def read_blocks(
    fd: int, start: int, count_bytes: int, block_bytes: int = BLOCK_BYTES, *, keep_cached: bool = False
) -> Iterator[memoryview]:
    """Yield the bytes of a file from `start` on, in blocks of `block_bytes`; only the last one is shorter.

    A block is valid until the next one is asked for. If the file ends early, so do the blocks.

    Args:
        fd: Open for reading; the caller closes it.
        start, count_bytes: The stretch.
        block_bytes: The size of a block.
        keep_cached: Whether to leave the file in the page cache, because it will be mapped.
    """
    is_long = count_bytes >= _MIN_AHEAD_BYTES and block_bytes >= BLOCK_BYTES
    past_cache = is_long and not keep_cached and is_direct_wanted(count_bytes) and not is_cached(fd, start, count_bytes)
    direct = open_direct(fd) if past_cache else -1
    reads = _Reads(fd, direct, start, count_bytes, block_bytes)
    try:
        for block in reads.one_by_one() if direct < 0 else reads.ahead():  # the page cache reads ahead by itself
            if not block:
                return
            yield block
    finally:
        if direct >= 0:
            os.close(direct)


def is_cached(fd: int, start: int, count_bytes: int) -> bool:
    """Whether the page cache holds a stretch of a file, judged by a few pages; True where the system does not say.

    `preadv2` with RWF_NOWAIT would answer too, but starts to read what it does not find.
    """
    hits = 0
    for number in range(_PROBES):
        # Not at the beginning of a tensor, which was read for the file's fingerprint.
        at = start + (2 * number + 1) * count_bytes // (2 * _PROBES)
        try:
            page = mmap.mmap(fd, 1, access=mmap.ACCESS_COPY, offset=at - at % mmap.ALLOCATIONGRANULARITY)
        except (OSError, ValueError):
            return True
        resident = ctypes.c_ubyte()
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        if LIBRARY.mincore(ctypes.c_void_p(address), ctypes.c_size_t(1), ctypes.byref(resident)) != 0:
            return True
        hits += resident.value & 1
    return 2 * hits >= _PROBES


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
        whole = -(-wanted // DATA_ALIGNMENT) * DATA_ALIGNMENT
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


class _Reads:
    """The reads of one stretch."""

    def __init__(self, fd: int, direct: int, start: int, count_bytes: int, block_bytes: int) -> None:
        self.fd = fd
        self.direct = direct
        self.end = start + count_bytes
        self.block_bytes = block_bytes
        self.starts = iter(range(start, self.end, block_bytes))
        self.is_closed = False
        self.room = min(block_bytes, count_bytes) + 2 * DATA_ALIGNMENT

    def one_by_one(self) -> Iterator[memoryview]:
        """Yield the blocks, each read when it is asked for."""
        buffer = memoryview(bytearray(self.room))
        for at in self.starts:
            yield self._read(buffer, at)

    def ahead(self) -> Iterator[memoryview]:
        """Yield the blocks, read by another thread while one is in use; by this one where none can be started."""
        free: SimpleQueue[memoryview] = SimpleQueue()
        full: SimpleQueue[tuple[memoryview, memoryview] | None] = SimpleQueue()
        # A daemon: a traceback may hold this generator when Python exits, and then nothing ends the thread.
        reading = start_thread(partial(self._read_all, free, full), "hfshard-read", daemon=True)
        if reading is None:
            yield from self.one_by_one()
            return
        for _ in range(_AHEAD + 1):
            free.put(aligned_block(self.room))
        try:
            while (filled := full.get()) is not None:
                block, buffer = filled
                yield block
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
                full.put((self._read(buffer, at), buffer))
        finally:
            full.put(None)

    def _read(self, buffer: memoryview, at: int) -> memoryview:
        return read_direct(self.fd, self.direct, buffer, at, min(self.block_bytes, self.end - at))
