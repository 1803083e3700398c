"""Digests of what is read in pieces: computed in order while the pieces come in any order, then compared."""

from __future__ import annotations

import threading
from typing import Final

from hfshard.constants import FINGERPRINT_BYTES
from hfshard.format.digests import Hasher

_LOOK_SECONDS: Final = 0.1
"""How soon a thread that waits for its turn notices that another one has failed."""


class RunningDigest:
    """Hashes a stretch of bytes whose pieces come in any order, from several threads."""

    def __init__(self, hasher: Hasher, start: int, nbytes: int) -> None:
        """Wait for the first piece.

        Args:
            hasher: What it goes into.
            start: Where the stretch begins in its file.
            nbytes: Of the stretch.
        """
        self.head = b""
        """The first bytes, as many as go into a file's fingerprint."""
        self._hasher = hasher
        self._start, self._next, self._end = start, start, start + nbytes
        self._early: dict[int, memoryview] = {}
        self._changed = threading.Condition()
        self._is_busy = False

    @property
    def is_whole(self) -> bool:
        """Whether all bytes have been hashed."""
        return self._next == self._end

    def hexdigest(self) -> str:
        """The digest."""
        return self._hasher.hexdigest()

    def add(self, start: int, block: memoryview, cancelled: threading.Event, *, stays: bool) -> None:
        """Take a piece.

        Args:
            start: Where it begins in the file. Pieces are begun in the order of their bytes.
            block: Its bytes.
            cancelled: Set by others that failed.
            stays: Whether the memory keeps these bytes; else this waits for the pieces before it.

        Raises:
            InterruptedError: Another piece failed, so that the turn never comes.
        """
        if start == self._start:
            self.head = bytes(block[:FINGERPRINT_BYTES])
        with self._changed:
            while not stays and (self._is_busy or self._next != start):
                if cancelled.is_set():
                    raise InterruptedError("another range failed, or Ctrl-C came")
                self._changed.wait(_LOOK_SECONDS)
            self._early[start] = block
            if self._is_busy:
                return  # who is busy takes it
            self._is_busy = True
        while (block_in_turn := self._in_turn()) is not None:
            self._hasher.update(block_in_turn)
            self._next += len(block_in_turn)

    def _in_turn(self) -> memoryview | None:
        with self._changed:
            block = self._early.pop(self._next, None)
            if block is None:
                self._is_busy = False
                self._changed.notify_all()
            return block
