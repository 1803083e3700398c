"""Descriptors for locks of directories, which forked processes do not keep; and who holds such a lock."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Final

_LOCKS: Final = "/proc/locks"
_LONGEST_COMMAND: Final = 80
"""Characters of a command line that are shown."""

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


def holder_of(fd: int) -> str:
    """Say which process holds the `flock` of an open directory, with its command line.

    Returns:
        Words for a message; "another process" where the system does not tell, as on another machine or in another
        container.
    """
    pid = _pid_of(os.fstat(fd))
    if pid is None:
        return "another process"
    if pid == os.getpid():
        return f"another thread of this process ({pid})"
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except FileNotFoundError:
        return f"process {pid}, which has ended, or rather one that it forked"
    except OSError:
        command = ""
    shown = command if len(command) <= _LONGEST_COMMAND else f"{command[:_LONGEST_COMMAND]}…"
    return f"process {pid} ({shown})" if shown else f"process {pid}"


def _pid_of(status: os.stat_result) -> int | None:
    """The process that took the lock, from a line such as `1: FLOCK  ADVISORY  WRITE 4711 fe:00:2146320 0 EOF`."""
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        with open(_LOCKS, encoding="ascii", errors="replace") as lines:
            for line in lines:
                words = line.split()  # a process that waits has "->" in the place of FLOCK
                if len(words) > 5 and words[1] == "FLOCK" and words[5] == file and words[4].isdecimal():
                    return int(words[4]) or None
    except OSError:
        return None
    return None
