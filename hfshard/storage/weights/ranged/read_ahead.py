"""What a thread asks for beyond what it needs: the small tensors of a file, one after the other, in few requests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

MOST_BYTES: Final = 4 << 20
"""Of a window. A request takes some 50 ms, and eight threads have one each."""
_FIRST_BYTES: Final = 1 << 20
"""Of the first one. Each that follows another one is twice as large, so that little is asked for in vain."""


class _Window(threading.local):
    """The last window of this thread, whatever the file."""

    def __init__(self) -> None:
        self.file: object = None
        self.start = 0
        self.memory = memoryview(b"")


_window = _Window()


def read_ahead(
    file: object, start: int, count_bytes: int, end: int, read_into: Callable[[int, memoryview], None]
) -> memoryview:
    """The bytes of a stretch of a file; no byte is asked for twice as long as a thread reads on from where it was.

    Args:
        file: Which one.
        start: Of the stretch.
        count_bytes: Its length; at most `MOST_BYTES`.
        end: Of what may be asked for.
        read_into: Fills memory with the bytes of the file from a position on.

    Raises:
        Everything that `read_into` raises.
    """
    offset = start - _window.start
    goes_on = _window.file is file and 0 <= offset <= len(_window.memory)
    if not goes_on or offset + count_bytes > len(_window.memory):
        known = _window.memory[offset:] if goes_on else memoryview(b"")
        more = min(2 * len(_window.memory), MOST_BYTES) if goes_on else _FIRST_BYTES
        memory = memoryview(bytearray(min(max(more, count_bytes), end - start)))
        memory[: len(known)] = known
        _window.file = None  # until it is filled
        read_into(start + len(known), memory[len(known) :])
        _window.file = file
        _window.start = start
        _window.memory = memory
        offset = 0
    return _window.memory[offset : offset + count_bytes]


def forget(file: object) -> None:
    """Let go of what this thread has of a file."""
    if _window.file is file:
        _window.file = None
        _window.memory = memoryview(b"")
