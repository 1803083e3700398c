"""Copy files without copying their bytes, where the file system lets two files share blocks (btrfs, XFS)."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from typing import Final

from hfshard.storage.disk.fsops import UNSUPPORTED, copy_mode, sync

_FICLONE: Final = 0x40049409
"""The ioctl that lets a file share the blocks of another until one of them is written to (linux/fs.h)."""

_NO_CLONES: Final = UNSUPPORTED | {errno.EINVAL, errno.ENOTTY, errno.EXDEV, errno.EPERM, errno.EACCES, errno.ETXTBSY}
"""What the ioctl answers where files can't share blocks. A full or failing disk answers something else."""


def clone_blocks(source_fd: int, target_fd: int) -> bool:
    """Let an empty file share all blocks of another one.

    Args:
        source_fd: Open for reading.
        target_fd: Open for writing.

    Returns:
        Whether it does; False where the file system can't, and then the target is still empty.

    Raises:
        OSError: The disk is full or fails.
    """
    try:
        fcntl.ioctl(target_fd, _FICLONE, source_fd)
    except OSError as error:
        if error.errno not in _NO_CLONES:
            raise
        return False
    return True


def copy_file(source: str, target: str, like: os.stat_result | None) -> None:
    """Copy a file into a new one, durably, by sharing its blocks where possible.

    Args:
        source: The file to copy.
        target: It must not exist.
        like: The status of the file whose mode and group the copy gets; None: those that the umask gives.
    """
    with open(source, "rb") as reading, open(target, "xb") as writing:
        if not clone_blocks(reading.fileno(), writing.fileno()):
            shutil.copyfileobj(reading, writing)
            writing.flush()
        copy_mode(writing.fileno(), like)
        sync(writing.fileno(), target)
