"""Open files named by untrusted data: only regular files below the checkpoint's directory, read within bounds."""

from __future__ import annotations

import errno
import os
import stat
from typing import Final

from hfshard.constants import COPY_BYTES
from hfshard.errors import DamagedCheckpointError, MissingShardError, UnsafePathError, remedy

Identity = tuple[int, int, int, int]
"""Device, inode, size and mtime (ns) of a file: if they change, it was replaced."""

_SHARED_BLOBS_MARK: Final = ".huggingface-shared-blobs"
"""The file by which huggingface_hub 2.4 marks a folder of blobs that all repos of a cache share (for Xet)."""

_NO_FILES_LEFT: Final = frozenset({errno.EMFILE, errno.ENFILE})
"""What `open` answers if the process or the system has too many files open."""


def open_regular(path: str, root: str) -> int:
    """Open a regular file that lies below `root`, for reading.

    A symbolic link may not leave `root`, except for those of the Hub's cache, from `snapshots/<commit>/` to `blobs/`.

    Raises:
        MissingShardError: The file does not exist.
        UnsafePathError: A link leads outside.
        DamagedCheckpointError: It is a directory, a FIFO, a socket or a device.
        OSError: The process has too many files open.
    """
    try:
        real = os.path.realpath(path, strict=True)
        if not _may_read(real, root):
            raise UnsafePathError(
                f"'{path}' is a link to '{real}', outside the checkpoint's directory. "
                "Copy the file to where the link is, if you trust it.",
                path=path,
                actual=real,
            )
        fd = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingShardError(
            f"File '{path}' is missing. Download or save the checkpoint again, or run 'hfshard verify {root}'.",
            path=path,
        ) from error
    except OSError as error:
        if error.errno in _NO_FILES_LEFT:
            hint = "every shard is held open while it is checked. Raise the limit, for example: ulimit -n 65536"
            raise OSError(error.errno, f"{error.strerror}: {hint}", path) from error
        todo = f"Run: chmod u+r {path}" if error.errno in (errno.EACCES, errno.EPERM) else remedy(path)
        raise DamagedCheckpointError(f"File '{path}' can't be opened: {error.strerror}. {todo}", path=path) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise DamagedCheckpointError(
            f"'{path}' is not a regular file, and a checkpoint consists of regular files. {remedy(path)}", path=path
        )
    return fd


def identity_of(status: os.stat_result) -> Identity:
    """What distinguishes a file from one that replaces it."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def read_small(path: str, root: str, limit: int) -> tuple[bytes, Identity]:
    """Read a whole text file of at most `limit` bytes, opened by `open_regular`.

    Raises:
        DamagedCheckpointError: It is larger, or contains zero bytes.
        Everything that `open_regular` raises.
    """
    fd = open_regular(path, root)
    try:
        status = os.fstat(fd)
        if status.st_size > limit:
            raise DamagedCheckpointError(
                f"'{path}' has {status.st_size} bytes, but such a file has at most {limit}. {remedy(path)}", path=path
            )
        return read_text(fd, limit, path), identity_of(status)
    finally:
        os.close(fd)


def read_text(fd: int, limit: int, path: str) -> bytes:
    """Read text from a file's position to its end, at most `limit` bytes.

    JSON has no zero bytes. A file made by `truncate`, or one that lost its blocks in a power failure, has nothing
    else: a hundred megabytes of them are refused after the first four.

    Raises:
        DamagedCheckpointError: It contains a zero byte.
    """
    blocks, left = [], limit
    while left and (block := os.read(fd, min(left, COPY_BYTES))):
        if b"\0" in block:
            raise DamagedCheckpointError(
                f"'{path}' is damaged: it contains zero bytes, as after a power failure. {remedy(path)}",
                path=path,
            )
        blocks.append(block)
        left -= len(block)
    return b"".join(blocks)


def _may_read(real: str, root: str) -> bool:
    real_root = os.path.realpath(root)
    if real == real_root or real.startswith(real_root.rstrip("/") + "/"):
        return True
    parts = real_root.split("/")
    if "snapshots" not in parts:
        return False
    at = len(parts) - 1 - parts[::-1].index("snapshots")
    repo = parts[:at]
    is_cache = len(parts) > at + 1 and repo[-1].startswith(("models--", "datasets--", "spaces--"))
    if not is_cache:
        return False
    shared = "/".join([*repo[:-1], "blobs"])
    is_shared = real.startswith(f"{shared}/") and os.path.isfile(os.path.join(shared, _SHARED_BLOBS_MARK))
    return is_shared or real.startswith("/".join([*repo, "blobs"]) + "/")
