"""A file that is far away, held in memory: torch maps pickles, so that they need to be files of this machine."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Callable
from typing import Final

from hfshard._util.threads import in_threads

_PIECE_BYTES: Final = 8 << 20
"""What is asked for at once."""
_PIECES_AT_ONCE: Final = 8


class FileInMemory:
    """An unnamed file in memory, which goes when nobody holds this any more; nothing of it is on the disk.

    Where the system has no such files (macOS), it is a temporary one.
    """

    def __init__(self, size: int, read_into: Callable[[int, memoryview], None]) -> None:
        """Fill it.

        Args:
            size: Bytes; as many are taken of the memory.
            read_into: Fills memory with the bytes from a position on; called by several threads.

        Raises:
            Everything that `read_into` raises.
        """
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("hfshard")
            self._path = f"/proc/self/fd/{fd}"
        else:
            fd, self._path = tempfile.mkstemp(prefix="hfshard-")
            weakref.finalize(self, os.unlink, self._path)
        weakref.finalize(self, os.close, fd)
        os.truncate(fd, size)
        if size == 0:
            return
        with mmap.mmap(fd, size) as mapping, memoryview(mapping) as whole:

            def fill(begin: int, _cancelled: object) -> None:
                with whole[begin : begin + _PIECE_BYTES] as piece:
                    read_into(begin, piece)

            in_threads(fill, range(0, size, _PIECE_BYTES), _PIECES_AT_ONCE)

    def open(self) -> int:
        """Open it for reading, at its first byte."""
        return os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
