"""Write a file from its beginning to its end in aligned blocks, past the page cache where possible."""

from __future__ import annotations

import ctypes
import errno
import os
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Final, TypeAlias

from hfshard._util.progress import ProgressCallback
from hfshard._util.threads import start_thread
from hfshard.constants import DATA_ALIGNMENT
from hfshard.storage.disk.direct_io import BLOCK_BYTES, aligned_blocks, allocate, is_direct_wanted, set_direct

_BLOCKS: Final = 4
"""Blocks of a file that are filled or under way at once."""

_Blocks: TypeAlias = "queue.SimpleQueue[memoryview | None]"

_COPY_BY_LIBRARY_BYTES: Final = 64 * 1024
"""From here on a copy is made without Python's lock: other files are hashed and copied meanwhile."""


class BlockWriter:
    """Writes one new file from its beginning to its end; used by one thread, while another one writes."""

    def __init__(
        self,
        fd: int,
        size: int,
        cancelled: threading.Event,
        progress_callback: ProgressCallback | None,
        *,
        background: bool,
    ) -> None:
        """Take an open, empty file, and reserve its space.

        Args:
            fd: Open for writing; stays the caller's.
            size: Bytes that it will have.
            cancelled: When it is set, the next block raises.
            progress_callback: Called with the number of bytes of each block written, maybe from another thread.
            background: Whether to write in another thread, if one can be started, while the next block is filled.

        Raises:
            OSError: There is no space.
        """
        self._fd = fd
        self._cancelled = cancelled
        self._progress_callback = progress_callback
        self._is_direct = is_direct_wanted(size) and set_direct(fd, wanted=True)
        if self._is_direct:
            allocate(fd, size)
        block_bytes = min(BLOCK_BYTES, max(1, -(-size // DATA_ALIGNMENT)) * DATA_ALIGNMENT)
        self._is_several = background and size > block_bytes
        self._block, *self._others = aligned_blocks(_BLOCKS if self._is_several else 1, block_bytes)
        self._filled = self._at = 0
        self._full: _Blocks = queue.SimpleQueue()
        self._free: _Blocks = queue.SimpleQueue()
        self._is_closed = False
        self._writing: Future[None] | None = None

    def write(self, view: memoryview) -> None:
        """Take the next bytes; they are copied before this returns.

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
        """Write the rest, and wait until everything is written; the caller flushes the file to the disk."""
        self._take(self._block[: self._filled])
        self._end_writing()
        self._to_buffered(self._fd)

    def close(self) -> None:
        """End the other thread; blocks that it has not begun to write are dropped."""
        self._is_closed = True
        if self._writing is not None:
            self._full.put(None)
            wait([self._writing])

    def _hand_on(self) -> None:
        if self._cancelled.is_set():
            raise InterruptedError("another file of this save failed")
        if self._is_several and self._writing is None:
            self._writing = self._start_writing()
            self._is_several = self._writing is not None
        self._take(self._block)
        if self._writing is not None:
            block = self._free.get()
            if block is None:
                self._end_writing()  # raises the error that ended it
                raise InterruptedError("the file was finished")
            self._block = block
        self._filled = 0

    def _take(self, block: memoryview) -> None:
        """Write the next bytes, or have it done."""
        if self._writing is not None:
            self._full.put(block)
        else:
            self._write(self._fd, [block])

    def _start_writing(self) -> Future[None] | None:
        fd = os.dup(self._fd)  # of its own: repeated Ctrl-C may make the caller close the other one meanwhile
        writing = start_thread(partial(self._write_in_background, fd), "hfshard-disk")
        if writing is None:
            os.close(fd)
            return None
        for block in self._others:
            self._free.put(block)
        return writing

    def _end_writing(self) -> None:
        """Wait until the other thread has written all; raise the error that has ended it."""
        if self._writing is not None:
            self._full.put(None)
            self._writing.result()

    def _write_in_background(self, fd: int) -> None:
        try:
            while (blocks := self._next_full()) and not self._is_closed:
                self._write(fd, blocks)
                for block in blocks:
                    self._free.put(block)
        finally:
            os.close(fd)
            self._free.put(None)  # nobody may wait for a block for ever

    def _next_full(self) -> list[memoryview]:
        """Wait for a full block; past the page cache take all that are, as a disk is faster with large requests."""
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
                self._to_buffered(fd)  # the file system accepts O_DIRECT, but wants another alignment
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
