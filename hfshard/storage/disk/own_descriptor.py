"""Descriptors of directories that forked processes do not keep: with them they would keep their locks."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Final

_open: Final[weakref.WeakSet[OwnDescriptor]] = weakref.WeakSet()
_opening = threading.RLock()
"""Held while one is opened, and by `fork`: a process that is forked between the call and its note would keep it."""


class OwnDescriptor:
    """A directory's descriptor, which a forked process closes at once.

    A lock (flock) lives as long as any process has the descriptor by which it was taken. The worker of a DataLoader
    outlives a killed trainer by seconds, and a daemon by days.
    """

    def __init__(self, directory: str) -> None:
        """Open the directory.

        Raises:
            OSError: It can't be opened, or is none.
        """
        with _opening:
            self.fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            _open.add(self)

    @property
    def is_open(self) -> bool:
        """Whether this process has it still; a forked one does not."""
        return self.fd >= 0

    def close(self) -> None:
        """Close it; a second call does nothing."""
        fd = self.fd
        self.fd = -1  # first: a process that is forked now must not close what gets the number next
        if fd >= 0:
            os.close(fd)


def _before_fork() -> None:
    _opening.acquire()


def _after_fork() -> None:
    _opening.release()


def _close_in_child() -> None:
    global _opening
    for one in list(_open):
        one.close()
    _opening = threading.RLock()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_close_in_child)
