"""Files that stay open after they were used, as long as there is room: any number of them, with few descriptors."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Final

from hfshard.disk.safe_open import NO_FILES_LEFT

_SHARE: Final = 2
"""One of so many descriptors that the process may have is for these files; the others are left to the program."""


def open_with_room(open_file: Callable[[], int]) -> int:
    """Open a file, and where the process has no descriptor left, close held files that nobody uses now for it.

    Raises:
        Everything that `open_file` raises.
    """
    try:
        return open_file()
    except OSError as error:
        if error.errno not in NO_FILES_LEFT or not close_idle_files():
            raise
    return open_file()


def close_idle_files() -> bool:
    """Close all held files that nobody uses now, which are opened again when they are used; False if there was none."""
    return _pool.close_all_idle()


class HeldFile:
    """A file that is open while it is used, and afterwards until others need its descriptor; then it is opened again.

    Used by several threads at once.
    """

    def __init__(self, fd: int, open_again: Callable[[], int], pool: FilePool | None = None) -> None:
        """Take an open file.

        Args:
            fd: Belongs to this object from now on.
            open_again: Opens the same file, or raises.
            pool: The files that share a limit; None: all of the process.
        """
        self._fd, self._open_again, self._pool = fd, open_again, pool or _pool
        self._users = 0
        self._is_closed = False
        self._opening = threading.Lock()
        self._pool.add(self)

    @contextmanager
    def opened(self) -> Iterator[int]:
        """The open file, which stays open until the block ends.

        Raises:
            ValueError: It was closed for good.
            Everything that opening it again raises.
        """
        self._pool.take(self)
        try:
            with self._opening:
                if self._is_closed:
                    raise ValueError("the file was closed")
                if self._fd < 0:
                    self._fd = self._pool.open(self._open_again)
            yield self._fd
        finally:
            self._pool.give_back(self)

    def close(self) -> None:
        """Close it for good, when nobody uses it any more."""
        self._pool.close(self)


class FilePool:
    """Held files that share a limit."""

    def __init__(self, most_open: Callable[[], int]) -> None:
        """Take what tells how many may be open, if no more are in use at once."""
        self._most_open = most_open
        self._idle: dict[HeldFile, None] = {}
        """Those that are open and not in use; first the one that was not in use for the longest time."""
        self._count = 0
        """How many are open."""
        self.renew_lock()

    def renew_lock(self) -> None:
        """Make a new lock: in a forked child, a thread that does not exist there may hold the old one."""
        self._lock = threading.Lock()

    def add(self, file: HeldFile) -> None:
        """Count a new one, and close others for it."""
        with self._lock:
            self._count += 1
            self._idle[file] = None
            self._close_idle(self._count - self._most_open())

    def take(self, file: HeldFile) -> None:
        """Keep a file open."""
        with self._lock:
            file._users += 1
            self._idle.pop(file, None)

    def give_back(self, file: HeldFile) -> None:
        """Let a file be closed when its last user has given it back."""
        with self._lock:
            file._users -= 1
            if file._users == 0 and file._fd >= 0:
                self._idle[file] = None
                self._close_idle(self._count - self._most_open())
                if file._is_closed:
                    self._close(file)

    def open(self, open_again: Callable[[], int]) -> int:
        """Open a file again, and close others for it."""
        with self._lock:
            self._count += 1
            self._close_idle(self._count - self._most_open())
        try:
            return open_with_room(open_again)
        except BaseException:
            with self._lock:
                self._count -= 1
            raise

    def close(self, file: HeldFile) -> None:
        """Close a file for good, now or when its last user has given it back."""
        with self._lock:
            file._is_closed = True
            if file._users == 0:
                self._close(file)

    def close_all_idle(self) -> bool:
        """Close all that can be closed; False if there was none."""
        with self._lock:
            return self._close_idle(len(self._idle))

    def _close_idle(self, count: int) -> bool:
        for file in list(islice(self._idle, count)) if count > 0 else ():
            self._close(file)
        return count > 0

    def _close(self, file: HeldFile) -> None:
        self._idle.pop(file, None)
        if file._fd >= 0:
            os.close(file._fd)
            file._fd = -1
            self._count -= 1


def _most_open() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit // _SHARE if limit >= 0 else 1 << 30


_pool: Final = FilePool(_most_open)
os.register_at_fork(after_in_child=_pool.renew_lock)
