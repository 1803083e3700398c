"""The memory that transfers to and from stores share: parts of uploads, and turns of streams over Xet."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from mmap import mmap
from typing import Final

from hfshard._util.text import parse_size
from hfshard._util.threads import pause
from hfshard.errors import InvalidArgumentError, InvalidSizeError

MEMORY_VARIABLE: Final = "HFSHARD_STORE_MEMORY"
"""The environment variable that says how much."""

_DEFAULT_BYTES: Final = 256 * 2**20
_FILES_BYTES: Final = 768 * 2**20
"""Where no tensors are in memory beside: as much as hf_xet takes by itself to send files (measured: 810 MB)."""
_LEAST_BYTES: Final = 32 * 2**20
"""Three parts of 8 MiB under way, and one that is being filled."""


def store_memory_bytes() -> int:
    """Bytes that all transfers of this process may hold at once, beside the tensors themselves.

    Raises:
        InvalidArgumentError: The variable is no size, or a very small one.

    Example:
        HFSHARD_STORE_MEMORY=1GiB python train.py
    """
    return _asked_bytes() or _DEFAULT_BYTES


def file_push_memory_bytes() -> int:
    """Bytes that a push of files over Xet may hold at once; else as `store_memory_bytes`."""
    return _asked_bytes() or _FILES_BYTES


def _asked_bytes() -> int | None:
    text = os.environ.get(MEMORY_VARIABLE, "").strip()
    if not text:
        return None
    try:
        size = parse_size(text)
    except InvalidSizeError as error:
        raise InvalidArgumentError(f"The environment variable {MEMORY_VARIABLE}: {error}", actual=text) from error
    if size < _LEAST_BYTES:
        raise InvalidArgumentError(
            f"The environment variable {MEMORY_VARIABLE} is {text}: transfers to a store need at least 32MiB.",
            expected=_LEAST_BYTES,
            actual=size,
        )
    return size


# The memory of the parts that are being filled or sent: bounded, and shared by all uploads of the process.


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


# Turns of transfers over Xet: as many at once as the memory allows, which hf_xet itself does not bound.


UPLOAD_BYTES: Final = 170 * 2**20
"""What one stream takes at most: 64 MB that are gathered, and 64 MB that are packed and sent (measured: up to 165)."""
_SESSION_BYTES: Final = 100 * 2**20
"""What hf_xet takes beside (measured: 93)."""
SMALL_BYTES: Final = 8_000_000
"""Smaller transfers need no turn."""
PIECE_BYTES: Final = 16 * 2**20
"""Bytes that one stream brings: hf_xet gives them in blocks of up to 64 MB, of which there are two copies."""
BLOCK_BYTES: Final = 64 * 2**20
"""What hf_xet gathers from the files of a commit before it sends it, as a block."""
_TURN_LOOK_SECONDS: Final = 0.2
"""How often who waits for a turn looks whether Ctrl-C came (see `_util.threads.wait_for`)."""
_PIECE_SHARE: Final = 64 * 2**20
"""What one of them takes: sent, unpacked, and given to Python."""


def uploads_at_once(memory_bytes: int) -> int:
    """How many large uploads this much memory is enough for; one is always allowed."""
    return max(1, (memory_bytes - _SESSION_BYTES) // UPLOAD_BYTES)


def commit_streams(sizes: Collection[int], memory_bytes: int) -> int:
    """How many files of one commit this much memory lets be sent at once; 0: they can't have one commit.

    What of a file fills no block waits in memory for the next file, while that gathers a block of its own. With files
    that are no larger than a block, that is still as much as one large file takes (measured: 255 MB at most; a file of
    300 MB alone 255 MB, and two in one commit 282 MB).
    """
    at_once = max(0, memory_bytes - _SESSION_BYTES - BLOCK_BYTES) // UPLOAD_BYTES
    return max(at_once, int(len(sizes) == 1 or max(sizes) <= BLOCK_BYTES))


def upload_commits(sizes: Sequence[int], memory_bytes: int) -> list[list[int]]:
    """Divide files into as few commits as this much memory allows: one, or one for each large file and one for others.

    Returns:
        The numbers of the files of each commit.
    """
    every = list(range(len(sizes)))
    if not every or commit_streams(sizes, memory_bytes):
        return [every] if every else []
    small = [number for number in every if sizes[number] <= BLOCK_BYTES]
    return [*([number] for number in every if sizes[number] > BLOCK_BYTES), *([small] if small else [])]


def downloads_at_once(memory_bytes: int) -> int:
    """How many pieces this much memory is enough for; one is always allowed."""
    return max(1, memory_bytes // _PIECE_SHARE)


class _Turns:
    """The turns of this process. A thread that has one gets another at once: it would wait for itself."""

    def __init__(self, at_once: Callable[[int], int]) -> None:
        self._at_once = at_once
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._changed = threading.Condition(threading.RLock())  # a turn may be given back within the lock, by `__del__`
        self._held: list[int] = []

    def take(self, thread: int, memory_bytes: int) -> None:
        most = self._at_once(memory_bytes)
        with self._changed:
            while len(self._held) >= most and thread not in self._held:
                self._changed.wait(_TURN_LOOK_SECONDS)
            self._held.append(thread)

    def give_back(self, thread: int) -> None:
        with self._changed:
            if thread in self._held:  # not in a forked child, which has none
                self._held.remove(thread)
            self._changed.notify_all()


_UPLOADS: Final = _Turns(uploads_at_once)
_DOWNLOADS: Final = _Turns(downloads_at_once)


class Turn:
    """The turn of one transfer, waited for when it is made, and given back once."""

    def __init__(self, turns: _Turns, size: int, memory_bytes: int | None = None) -> None:
        """Wait for it, if so many bytes need one; as many have one as this much memory allows."""
        self._turns = turns
        self._thread: int | None = None
        if size > SMALL_BYTES:
            thread = threading.get_ident()
            turns.take(thread, memory_bytes or store_memory_bytes())
            self._thread = thread

    def end(self) -> None:
        """Let the next one begin. May be called more than once."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._turns.give_back(thread)

    def __del__(self) -> None:
        """Whoever forgets to end a transfer must not stop all others."""
        self.end()


def upload_turn(size: int, memory_bytes: int) -> Turn:
    """Wait until so many bytes may be sent, beside others in so much memory."""
    return Turn(_UPLOADS, size, memory_bytes)


def download_turn(size: int) -> Turn:
    """Wait until so many bytes may be fetched."""
    return Turn(_DOWNLOADS, size)


def give_memory_back() -> None:
    """Give freed memory back to the system, where the C library can be told to.

    glibc keeps what was freed for the thread that had it: six files in turn, by six threads, take 540 MB without this,
    and 231 MB with it.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)
