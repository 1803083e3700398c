"""Memory budget that transfers to and from stores share."""

from __future__ import annotations

import os
import threading
from typing import Final

from hfshard._util.arguments import parse_size
from hfshard._util.threads import sleep_unless_cancelled
from hfshard.errors import InvalidArgumentError, InvalidSizeError

MEMORY_VARIABLE: Final = "HFSHARD_STORE_MEMORY"
"""Environment variable that sets the budget."""

_DEFAULT_BYTES: Final = 256 * 2**20
_FILES_BYTES: Final = 768 * 2**20
"""Default for file pushes, with no tensors in memory: as much as hf_xet itself uses to send them (measured: 810 MB)."""
_LEAST_BYTES: Final = 32 * 2**20
"""Three parts of 8 MiB in flight, and one that is being filled."""
_LOOK_SECONDS: Final = 0.2
"""Interval at which a thread that waits for memory checks for cancellation, and for Ctrl-C (see `wait_all`)."""


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


class ByteBudget:
    """Memory that this process's transfers of one kind share.

    Each kind has a budget of its own: a copy between two stores downloads and uploads, and would wait for itself. The
    limit is an argument of `take`, since it can depend on what is sent.
    """

    def __init__(self, *, by_thread: bool = True) -> None:
        """Start with nothing taken.

        Args:
            by_thread: Whether a thread that has bytes is given more at once, since it would wait for itself; False if
                other threads return them.
        """
        self._by_thread = by_thread
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        """Start empty, also in a forked child: another thread of the parent may have held the lock."""
        # Reentrant: the garbage collector can return bytes while this same thread holds the lock.
        self._changed = threading.Condition(threading.RLock())
        self._taken: dict[int, tuple[int, threading.Thread]] = {}

    @property
    def taken_bytes(self) -> int:
        """Return the number of bytes that are in use."""
        return sum(nbytes for nbytes, _ in self._shares_taken())

    def take(self, nbytes: int, limit_bytes: int) -> ByteShare:
        """Wait until so many bytes fit within the limit. A share that exceeds it waits to be the only one.

        Args:
            nbytes: Bytes to take; 0 never waits.
            limit_bytes: The most bytes that may be in use.

        Raises:
            InterruptedError: This thread's work was cancelled; see `sleep_unless_cancelled`.
        """
        share = ByteShare(self)
        if not nbytes:
            return share
        thread = threading.current_thread()  # not its number, which a later thread may get
        with self._changed:
            while self._must_wait(nbytes, limit_bytes, thread):
                self._changed.wait(_LOOK_SECONDS)
                sleep_unless_cancelled(0)
            self._taken[id(share)] = nbytes, thread
        return share

    def _must_wait(self, nbytes: int, limit_bytes: int, thread: threading.Thread) -> bool:
        taken = self._shares_taken()
        if not taken or (self._by_thread and any(thread is other for _, other in taken)):
            return False
        return sum(count for count, _ in taken) + nbytes > limit_bytes

    def _shares_taken(self) -> list[tuple[int, threading.Thread]]:
        """Return bytes and thread of each share, as a copy: the garbage collector can return one during a loop."""
        return list(self._taken.values())

    def give_back(self, share: ByteShare) -> None:
        """Return a share's bytes; in a forked child, which has none of its parent's, do nothing."""
        with self._changed:
            self._taken.pop(id(share), None)
            self._changed.notify_all()


class ByteShare:
    """Bytes of a budget, until `end` or the end of a `with` block."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget

    def end(self) -> None:
        """Return the bytes. Can be called more than once."""
        self._budget.give_back(self)

    def __enter__(self) -> ByteShare:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def __del__(self) -> None:
        """Release on garbage collection, so that a leaked transfer cannot block the rest."""
        self.end()
