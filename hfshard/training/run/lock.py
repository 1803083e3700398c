"""The lock of a run directory: held by one manager while it lives, and never by the processes that it forks."""

from __future__ import annotations

import os
import weakref
from typing import Final

from hfshard.errors import DirectoryLockedError
from hfshard.storage.disk.fsops import lock, unlock

_WAIT_SECONDS: Final = 5.0
"""How long a manager waits for another one: a killed process may take as long to disappear."""

_held: Final[weakref.WeakSet[RunLock]] = weakref.WeakSet()


class RunLock:
    """The lock of a directory (flock on its descriptor: there is no lock file, and it dies with the process)."""

    def __init__(self, directory: str) -> None:
        """Take the lock.

        Raises:
            DirectoryLockedError: Another manager, in this process or another one, holds it.
        """
        self.directory = directory
        self._fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            lock(self._fd, directory, _WAIT_SECONDS)
        except BlockingIOError as error:
            self._close()
            raise DirectoryLockedError(
                f"Another CheckpointManager is saving into '{directory}'. Stop the other run, or close() its manager, "
                "or give this one another directory. (A failed cell of a notebook may hold it: restart the kernel.)",
                path=directory,
            ) from error
        except BaseException:
            self._close()
            raise
        _held.add(self)

    @property
    def is_held(self) -> bool:
        """Whether this process holds the lock; a forked one does not."""
        return self._fd >= 0

    def release(self) -> None:
        """Release the lock; a second call does nothing, nor does one in a forked process."""
        if self._fd >= 0:
            unlock(self._fd, self.directory)
            self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _close_in_child() -> None:
    # A worker of a DataLoader outlives a killed trainer by seconds; with its descriptor the lock would, too.
    for one in list(_held):
        one._close()


os.register_at_fork(after_in_child=_close_in_child)
