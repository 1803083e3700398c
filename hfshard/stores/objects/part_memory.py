"""The memory of the parts that are being filled or sent: bounded, and shared by all uploads of the process."""

from __future__ import annotations

import os
import threading
import weakref
from mmap import mmap
from typing import Final

from hfshard._util.threads import pause
from hfshard.stores.memory import store_memory_bytes

_LOOK_SECONDS: Final = 0.5
"""A service may have stopped answering: who waits for it looks this often whether it still should."""
_SHARE: Final = 3, 4
"""Of the memory that is allowed; the rest is the client's own."""


class PartMemory:
    """Buffers for parts, which are used again."""

    def __init__(self) -> None:
        # Reentrant: a buffer may come back while this very thread holds the lock.
        self._changed = threading.Condition(threading.RLock())
        self._free: list[mmap] = []
        self._in_use = 0
        self._uploads = 0

    def forget(self) -> None:
        """Begin anew in a forked child: another thread of the parent may have held the lock."""
        self.__init__()  # type: ignore[misc]

    def join(self) -> None:
        """An upload begins."""
        with self._changed:
            self._uploads += 1

    def leave(self) -> None:
        """An upload is over; after the last one, nothing is kept."""
        with self._changed:
            self._uploads -= 1
            if not self._uploads:
                self._free.clear()

    def take(self, size: int) -> mmap:
        """A buffer of this size. Waits until there is room; a part that is larger than all there is comes alone.

        Raises:
            InterruptedError: The work of this thread was cancelled; see `pause`.
        """
        limit = store_memory_bytes() * _SHARE[0] // _SHARE[1]
        with self._changed:
            while self._in_use and self._in_use + size > limit:
                self._changed.wait(_LOOK_SECONDS)
                pause(0)
            self._in_use += size
            buffer = next((kept for kept in self._free if len(kept) == size), None)
            if buffer is not None:
                self._free.remove(buffer)
                return buffer
            while self._free and self._in_use + sum(map(len, self._free)) > limit:
                self._free.pop()
        return mmap(-1, size)  # not from the heap, which would keep it

    def lend(self, buffer: mmap, used: int) -> memoryview:
        """A view of the beginning of a buffer; when nobody holds it any more, the buffer comes back."""
        view = memoryview(buffer)[:used]
        weakref.finalize(view, self.give_back, buffer).atexit = False
        return view

    def give_back(self, buffer: mmap) -> None:
        """The buffer is not used any more."""
        with self._changed:
            self._in_use -= len(buffer)
            if self._uploads:
                self._free.append(buffer)
            self._changed.notify_all()


PART_MEMORY: Final = PartMemory()
os.register_at_fork(after_in_child=PART_MEMORY.forget)
