"""The lock of a run directory: held by one manager while it lives, and never by the processes that it forks."""

from __future__ import annotations

import os
from typing import Final

from hfshard.disk.fsops import OwnDescriptor, holder_of, lock, unlock
from hfshard.errors import DirectoryLockedError

_WAIT_SECONDS: Final = 5.0
"""How long a manager waits for another one: a killed process may take as long to disappear."""


class RunLock:
    """The lock of a directory (flock on its descriptor: there is no lock file, and it dies with the process)."""

    def __init__(self, directory: str) -> None:
        """Take the lock.

        Raises:
            DirectoryLockedError: Another manager, in this process or another one, holds it.
        """
        self.directory = directory
        self._own = OwnDescriptor(directory)
        try:
            lock(self._own.fd, directory, _WAIT_SECONDS)
        except BlockingIOError as error:
            holder = holder_of(self._own.fd)
            self._own.close()
            raise DirectoryLockedError(
                f"Another CheckpointManager is saving into '{directory}': {holder}. Stop the other run, or close() its "
                "manager, or give this one another directory. (A failed cell of a notebook may hold it: restart the "
                "kernel.)",
                path=directory,
            ) from error
        except BaseException:
            self._own.close()
            raise

    @property
    def is_held(self) -> bool:
        """Whether this process holds the lock; a forked one does not."""
        return self._own.is_open

    @property
    def is_of_the_run(self) -> bool:
        """Whether the directory that is locked is still the one at its path: it may have been removed or renamed."""
        try:
            locked, found = os.fstat(self._own.fd), os.stat(self.directory)
        except (FileNotFoundError, NotADirectoryError):
            return False
        if os.path.samestat(locked, found):
            return True
        # Some network file systems give a directory another number each time: then it holds what is found there.
        return locked.st_nlink > 0 and sorted(os.listdir(self._own.fd)) == sorted(os.listdir(self.directory))

    def release(self) -> None:
        """Release the lock; a second call does nothing, nor does one in a forked process."""
        if self._own.is_open:
            unlock(self._own.fd, self.directory)
            self._own.close()
