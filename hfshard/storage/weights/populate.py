"""Bring a stretch of a mapped file into the page cache, in huge pages where the system has them."""

from __future__ import annotations

import ctypes
import errno
import mmap
from collections.abc import Iterator
from concurrent.futures import wait
from queue import SimpleQueue
from threading import Event, Lock, Semaphore
from typing import Final

import torch

from hfshard._util.threads import start_thread
from hfshard.disk.direct_io import BLOCK_BYTES, HUGE_PAGE_BYTES, LIBRARY, is_resident, read_blocks

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
