"""The bytes of an owner's files on their way from the exchange to the thread that writes them."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from typing import Final

from hfshard.distributed.runs import ByteArray

_WINDOWS: Final = 2
"""That wait at most: one is written while the next ones come, and memory stays bounded."""
_LOOK_SECONDS: Final = 0.1
"""Between two looks whether the other side is still there."""


class Incoming:
    """A queue of windows, which are consecutive: one thread puts them, one takes their bytes."""

    def __init__(self) -> None:
        self._windows: queue.Queue[ByteArray] = queue.Queue(_WINDOWS)
        self._left = memoryview(b"")
        self._is_closed = False

    def put(self, window: ByteArray, is_taken: Callable[[], bool]) -> None:
        """Hand on the next bytes, when there is room; they are dropped where nobody takes any more.

        Args:
            window: Not to be changed any more.
            is_taken: Whether the other thread still runs.
        """
        while is_taken() and not self._is_closed:
            try:
                self._windows.put(window, timeout=_LOOK_SECONDS)
            except queue.Full:
                continue
            return

    def close(self) -> None:
        """Let the other thread end with an error, unless it has all bytes that it wants."""
        self._is_closed = True

    def blocks(self, nbytes: int) -> Callable[[int], Iterator[memoryview]]:
        """What a `RawTensor` gets its bytes from: the next ones of the queue, once."""

        def take(block_bytes: int) -> Iterator[memoryview]:
            left = nbytes
            while left:
                block = self._next(min(left, block_bytes))
                left -= len(block)
                yield block

        return take

    def _next(self, most_bytes: int) -> memoryview:
        while not self._left:
            if self._is_closed:
                raise InterruptedError("the bytes of this file do not come any more: the save has failed")
            try:
                self._left = self._windows.get(timeout=_LOOK_SECONDS).data
            except queue.Empty:
                continue
        block = self._left[:most_bytes]
        self._left = self._left[most_bytes:]
        return block
