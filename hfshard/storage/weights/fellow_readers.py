"""Whether other processes of this machine read the same file now: then the page cache should read it once for all."""

from __future__ import annotations

import fcntl
import os
import struct
import sys
from contextlib import suppress
from typing import Final

import torch

_FLOCK: Final = struct.Struct("@hhqqi4x")
"""The kernel's `struct flock` where `off_t` has 64 bits: type, whence, start, length, process."""

_HAS_LOCKS: Final = sys.platform == "linux" and struct.calcsize("P") == 8


def has_fellow_ranks() -> bool:
    """Whether this process is one of several ranks of a job that are likely to load on this machine at the same time.

    The launcher says how many there are here (torchrun and accelerate: LOCAL_WORLD_SIZE); without one, the ranks of the
    default process group are taken for some of this machine.
    """
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    if here.isdecimal():
        return int(here) > 1
    group = torch.distributed
    return group.is_available() and group.is_initialized() and group.get_world_size() > 1


def mark_reading(fd: int) -> None:
    """Let `has_fellow_readers` of other processes see that a file is being read, until it is closed.

    It is a shared lock of the open file, which keeps nobody from anything. Where the file system has no locks, nothing
    is to be seen.

    Args:
        fd: Open for reading, from a file system of this machine; locks of the network are slow.
    """
    if _HAS_LOCKS:
        with suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_RDLCK))


def has_fellow_readers(fd: int) -> bool:
    """Whether somebody else has marked a file as being read; False where that can't be seen."""
    if not _HAS_LOCKS:
        return False
    try:
        found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK))
    except OSError:
        return False
    return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)


def _flock(kind: int) -> bytes:
    """A lock of the whole file."""
    return _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0)
