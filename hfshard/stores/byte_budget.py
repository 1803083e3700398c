"""Memory budget that transfers to and from stores share: parts of uploads, and turns of Xet streams."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from mmap import mmap
from typing import Final

from hfshard._util.text import parse_size
from hfshard._util.threads import sleep_unless_cancelled
from hfshard.errors import InvalidArgumentError, InvalidSizeError

MEMORY_VARIABLE: Final = "HFSHARD_STORE_MEMORY"
"""Environment variable that sets the budget."""

_DEFAULT_BYTES: Final = 256 * 2**20
_FILES_BYTES: Final = 768 * 2**20
"""Default for file pushes, with no tensors in memory: as much as hf_xet itself uses to send them (measured: 810 MB)."""
_LEAST_BYTES: Final = 32 * 2**20
"""Three parts of 8 MiB in flight, and one that is being filled."""


def store_memory_bytes() -> int:
    """Return the bytes that all transfers of this process may use at once, in addition to the tensors themselves.

    Raises:
        InvalidArgumentError: The variable is not a size, or is too small.

    Example:
        HFSHARD_STORE_MEMORY=1GiB python train.py
    """
    return _asked_bytes() or _DEFAULT_BYTES


def file_push_memory_bytes() -> int:
    """Return the bytes that a push of files over Xet may use at once; raises InvalidArgumentError likewise."""
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
            f"The environment variable {MEMORY_VARIABLE} must be at least 32MiB for transfers to a store, got {text}.",
            expected=_LEAST_BYTES,
            actual=size,
        )
    return size


# Memory of the parts that are being filled or sent: bounded, and shared by all uploads of the process.


_LOOK_SECONDS: Final = 0.5
"""Interval of the cancellation check while waiting: the service may have stopped responding."""
_SHARE: Final = 3, 4
"""Share of the allowed memory for parts; the client uses the rest."""


class BufferPool:
    """Pool of reusable buffers for parts."""

    def __init__(self) -> None:
        # Reentrant: a buffer can be returned while this same thread holds the lock.
        self._changed = threading.Condition(threading.RLock())
        self._free: list[mmap] = []
        self._in_use = 0
        self._uploads = 0

    def forget(self) -> None:
        """Start empty in a forked child: another thread of the parent may have held the lock."""
        self.__init__()  # type: ignore[misc]

    def join(self) -> None:
        """Register the start of an upload."""
        with self._changed:
            self._uploads += 1

    def leave(self) -> None:
        """Register the end of an upload; after the last one, free all buffers."""
        with self._changed:
            self._uploads -= 1
            if not self._uploads:
                self._free.clear()

    def take(self, size: int) -> mmap:
        """Return a buffer of this size, waiting until it fits. One that exceeds the budget waits to be the only one.

        Raises:
            InterruptedError: This thread's work was cancelled; see `sleep_unless_cancelled`.
        """
        limit = store_memory_bytes() * _SHARE[0] // _SHARE[1]
        with self._changed:
            while self._in_use and self._in_use + size > limit:
                self._changed.wait(_LOOK_SECONDS)
                sleep_unless_cancelled(0)
            self._in_use += size
            buffer = next((kept for kept in self._free if len(kept) == size), None)
            if buffer is not None:
                self._free.remove(buffer)
                return buffer
            while self._free and self._in_use + sum(map(len, self._free)) > limit:
                self._free.pop()
        return mmap(-1, size)  # not from the heap, which would keep it

    def lend(self, buffer: mmap, used: int) -> memoryview:
        """Return a view of a buffer's first `used` bytes; the buffer returns to the pool when the view is freed."""
        view = memoryview(buffer)[:used]
        weakref.finalize(view, self.give_back, buffer).atexit = False
        return view

    def give_back(self, buffer: mmap) -> None:
        """Return a buffer to the pool."""
        with self._changed:
            self._in_use -= len(buffer)
            if self._uploads:
                self._free.append(buffer)
            self._changed.notify_all()


PART_MEMORY: Final = BufferPool()
os.register_at_fork(after_in_child=PART_MEMORY.forget)


# Turns of transfers over Xet: the memory limits how many run at once, which hf_xet itself does not.


UPLOAD_BYTES: Final = 170 * 2**20
"""The most memory one stream uses: 64 MB gathered, and 64 MB packed and sent (measured: up to 165)."""
_SESSION_BYTES: Final = 100 * 2**20
"""Memory that hf_xet uses in addition (measured: 93)."""
SMALL_BYTES: Final = 8_000_000
"""The most bytes of a transfer that needs no turn."""
PIECE_BYTES: Final = 16 * 2**20
"""Bytes that one stream downloads: hf_xet returns them in blocks of up to 64 MB, each of which exists twice."""
BLOCK_BYTES: Final = 64 * 2**20
"""Bytes that hf_xet gathers from a commit's files before it sends them as a block."""
_TURN_LOOK_SECONDS: Final = 0.2
"""Interval at which a thread that waits for a turn checks for Ctrl-C (see `_util.threads.wait_for`)."""
_PIECE_SHARE: Final = 64 * 2**20
"""Memory that one piece uses: sent, unpacked, and passed to Python."""


def uploads_at_once(memory_bytes: int) -> int:
    """Return the number of large uploads that fit this much memory; one is always allowed."""
    return max(1, (memory_bytes - _SESSION_BYTES) // UPLOAD_BYTES)


def commit_streams(sizes: Collection[int], memory_bytes: int) -> int:
    """Return how many files of one commit this much memory allows at once; 0 if they cannot share a commit.

    The rest of a file that does not fill a block waits in memory for the next file, which gathers a block of its own.
    If no file is larger than a block, this uses no more than one large file (measured: 255 MB at most; a file of 300 MB
    alone 255 MB, and two in one commit 282 MB).
    """
    at_once = max(0, memory_bytes - _SESSION_BYTES - BLOCK_BYTES) // UPLOAD_BYTES
    return max(at_once, int(len(sizes) == 1 or max(sizes) <= BLOCK_BYTES))


def upload_commits(sizes: Sequence[int], memory_bytes: int) -> list[list[int]]:
    """Divide files into the fewest commits that fit this much memory: one, or one per large file and one for the rest.

    Returns:
        The file numbers of each commit.
    """
    every = list(range(len(sizes)))
    if not every or commit_streams(sizes, memory_bytes):
        return [every] if every else []
    small = [number for number in every if sizes[number] <= BLOCK_BYTES]
    return [*([number] for number in every if sizes[number] > BLOCK_BYTES), *([small] if small else [])]


def downloads_at_once(memory_bytes: int) -> int:
    """Return the number of pieces that fit this much memory; one is always allowed."""
    return max(1, memory_bytes // _PIECE_SHARE)


class _Turns:
    """The turns of this process. A thread that has one gets another at once, since it would wait for itself."""

    def __init__(self, at_once: Callable[[int], int]) -> None:
        self._at_once = at_once
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._changed = threading.Condition(threading.RLock())  # `__del__` can return a turn within the lock
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


class TransferSlot:
    """One transfer's turn: creating it waits for it, and `end` returns it."""

    def __init__(self, turns: _Turns, size: int, memory_bytes: int | None = None) -> None:
        """Wait for a turn if `size` bytes need one; `memory_bytes` limits how many have one at once."""
        self._turns = turns
        self._thread: int | None = None
        if size > SMALL_BYTES:
            thread = threading.get_ident()
            turns.take(thread, memory_bytes or store_memory_bytes())
            self._thread = thread

    def end(self) -> None:
        """Let the next transfer begin. Can be called more than once."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._turns.give_back(thread)

    def __del__(self) -> None:
        """Release on garbage collection, so that a leaked transfer cannot block the rest."""
        self.end()


def reserve_upload(size: int, memory_bytes: int) -> TransferSlot:
    """Wait until `size` bytes may be sent along with other uploads within `memory_bytes`."""
    return TransferSlot(_UPLOADS, size, memory_bytes)


def reserve_download(size: int) -> TransferSlot:
    """Wait until `size` bytes may be downloaded."""
    return TransferSlot(_DOWNLOADS, size)


def trim_heap() -> None:
    """Return freed memory to the system, if the C library supports it.

    glibc keeps freed memory for the thread that used it: six files, one after another in six threads, use 540 MB
    without this, and 231 MB with it.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)
