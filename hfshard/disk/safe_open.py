"""Open files and folders named by untrusted data, within size limits and never outside the directory."""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from hfshard._util.text import shorten_list
from hfshard.constants import COPY_BYTES
from hfshard.disk.fsops import sync
from hfshard.errors import (
    DamagedCheckpointError,
    InvalidArgumentError,
    MissingShardError,
    SaveDirectoryError,
    UnsafePathError,
    repair_hint,
)

Identity = tuple[int, int, int, int]
"""Device, inode, size and mtime (ns) of a file: if one changes, the file was replaced."""

_SHARED_BLOBS_MARK: Final = ".huggingface-shared-blobs"
"""The file with which huggingface_hub 2.4 marks a blobs folder that all repos of a cache share (for Xet)."""

_SHOWN_LINKS: Final = 5

_KERNEL_FILES: Final = ("/proc/", "/sys/")
"""Folders whose files are marked as regular, but have no bytes of their own."""

NO_FILES_LEFT: Final = frozenset({errno.EMFILE, errno.ENFILE})
"""Errors of `open` if the process or the system has too many files open."""


def open_regular(path: str, root: str, real_root: str | None = None) -> int:
    """Open a regular file below `root` for reading; a symbolic link in place of the file is followed.

    Links come from the directory's owner, to weights on another disk or in DVC, git-annex or Nix. Names in untrusted
    files cannot choose them: the folder of the file or link must not be outside `root`.

    Args:
        path: The file's path.
        root: The directory that it must be in.
        real_root: `os.path.realpath` of `root`, if it was computed once for many files; None: compute it.

    Raises:
        MissingShardError: The file, or the target of a link, does not exist.
        UnsafePathError: A folder of the path is a link to outside.
        DamagedCheckpointError: It is, or leads to, a directory, a FIFO, a socket, a device or a file of the kernel; or
            it cannot be opened.
        OSError: The process has too many files open.
    """
    try:
        real, status = _resolved(path, root, real_root)
        # Checked before it is opened: opening a device or a FIFO may have effects.
        if not stat.S_ISREG(status.st_mode) or real.startswith(_KERNEL_FILES):
            raise _irregular(path)
        fd = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _missing(path, root) from error
    except OSError as error:
        if error.errno in NO_FILES_LEFT:
            hint = "close some, or raise the limit, for example: ulimit -n 65536"
            raise OSError(error.errno, f"{error.strerror}: {hint}", path) from error
        todo = f"Run: chmod u+r {path}" if error.errno in (errno.EACCES, errno.EPERM) else repair_hint(path)
        raise DamagedCheckpointError(f"File '{path}' cannot be opened: {error.strerror}. {todo}", path=path) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _irregular(path)
    return fd


def open_reader(path: str, root: str) -> io.BufferedIOBase:
    """Open a regular file below `root` as `open_regular` does, and return a reader of its bytes."""
    return os.fdopen(open_regular(path, root), "rb")


def is_users_link(path: str, root: str) -> bool:
    """Return whether a file is a link that a user created: a snapshot's links in the Hub's cache are not."""
    real_root = os.path.realpath(root)
    return os.path.islink(path) and not _is_blob(os.path.realpath(path), real_root)


def reject_links_to_outside(directory: str, names: Iterable[str], where: str) -> None:
    """Reject links that leave a directory: another user may have created them, to a file that must stay private.

    Args:
        directory: The directory of the links.
        names: Names of files in it.
        where: For the message: what the directory is, and what to do.

    Raises:
        InvalidArgumentError: There are such links; the message names the first ones and their targets.
    """
    root = os.path.realpath(directory)
    found = {path: os.path.realpath(path) for path in (os.path.join(directory, name) for name in sorted(names))}
    is_inside = {path: _lies_in(real, root) or _is_blob(real, root) for path, real in found.items()}
    outside = [f"'{path}' is a link to '{real}'" for path, real in found.items() if not is_inside[path]]
    if outside:
        raise InvalidArgumentError(f"{shorten_list(outside, _SHOWN_LINKS)}, outside {where}", path=directory)


def _resolved(path: str, root: str, real_root: str | None) -> tuple[str, os.stat_result]:
    """Return a path's real location and its status, with few calls of `realpath`, which checks every folder."""
    folder, name = os.path.split(path)
    real_root = os.path.realpath(root) if real_root is None else real_root
    real_folder = real_root if folder == root else os.path.realpath(folder, strict=True)
    if not _lies_in(real_folder, real_root):
        raise UnsafePathError(
            f"'{path}' is in '{real_folder}', outside the checkpoint's directory: a folder in its path is a link. "
            "Link or copy the file itself, if you trust it.",
            path=path,
            actual=real_folder,
        )
    real = os.path.join(real_folder, name)
    status = os.lstat(real)
    if not stat.S_ISLNK(status.st_mode):
        return real, status
    real = os.path.realpath(real, strict=True)
    return real, os.stat(real)


def _missing(path: str, root: str) -> MissingShardError:
    todo = f"Download or save the checkpoint again, or run 'hfshard verify {root}'."
    if os.path.islink(path):
        target = os.readlink(path)
        todo = f"Fetch its contents (git annex get, dvc pull), or {todo[0].lower()}{todo[1:]}"
        return MissingShardError(f"'{path}' is a link to '{target}', which does not exist. {todo}", path=path)
    return MissingShardError(f"File '{path}' is missing. {todo}", path=path)


def _irregular(path: str) -> DamagedCheckpointError:
    what = f"leads to '{os.path.realpath(path)}', which is not" if os.path.islink(path) else "is not"
    return DamagedCheckpointError(
        f"'{path}' {what} a regular file, and a checkpoint consists of regular files. {repair_hint(path)}", path=path
    )


def identity_of(status: os.stat_result) -> Identity:
    """Return the values that distinguish a file from one that replaces it."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def read_small(path: str, root: str, limit: int) -> tuple[bytes, Identity]:
    """Read a complete text file of at most `limit` bytes, opened by `open_regular`.

    Raises:
        DamagedCheckpointError: It is larger, or contains zero bytes.
        Everything that `open_regular` raises.
    """
    fd = open_regular(path, root)
    try:
        status = os.fstat(fd)
        if status.st_size > limit:
            raise DamagedCheckpointError(
                f"'{path}' has {status.st_size} bytes, but such a file has at most {limit}. {repair_hint(path)}",
                path=path,
            )
        return read_text(fd, limit, path), identity_of(status)
    finally:
        os.close(fd)


def read_text(fd: int, limit: int, path: str) -> bytes:
    """Read text from a file's position to its end, at most `limit` bytes.

    JSON has no zero bytes. A file created by `truncate`, or one that lost its blocks in a power failure, has nothing
    else: a hundred megabytes of them are rejected after the first four.

    Raises:
        DamagedCheckpointError: It contains a zero byte.
    """
    blocks, left = [], limit
    while left and (block := os.read(fd, min(left, COPY_BYTES))):
        if b"\0" in block:
            raise DamagedCheckpointError(
                f"'{path}' is damaged: it contains zero bytes, as after a power failure. {repair_hint(path)}",
                path=path,
            )
        blocks.append(block)
        left -= len(block)
    return b"".join(blocks)


def _lies_in(real: str, real_root: str) -> bool:
    return real == real_root or real.startswith(real_root.rstrip("/") + "/")


def _is_blob(real: str, real_root: str) -> bool:
    """Return whether a file is a blob that the Hub's cache keeps for the snapshot `real_root`."""
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


# Folders below a directory, opened part by part without following links, so that nothing is written outside.


_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NO_FOLDER: Final = frozenset({errno.ELOOP, errno.ENOTDIR, errno.ENXIO})
"""Errors of `open` for a link or a file in place of a folder."""


@contextmanager
def open_folder(directory: str, below: str, made: list[str] | None = None) -> Iterator[int]:
    """Open a folder below a directory, whose own path may have links.

    Args:
        directory: It must exist.
        below: Relative path in it, without `..`; "" for the directory itself.
        made: Missing folders are created, durably, and their paths are added here. None: they are an error.

    Yields:
        The folder's file descriptor.

    Raises:
        SaveDirectoryError: A part of `below` is a link or a file.
    """
    fd, path = os.open(directory, _FLAGS), directory
    try:
        for part in below.split("/") if below else ():
            path = os.path.join(path, part)
            inner = _open_part(fd, part, path, made)
            os.close(fd)
            fd = inner
        yield fd
    finally:
        os.close(fd)


def _open_part(fd: int, part: str, path: str, made: list[str] | None) -> int:
    try:
        return os.open(part, _FLAGS | os.O_NOFOLLOW, dir_fd=fd)
    except FileNotFoundError:
        if made is None:
            raise
    except OSError as error:
        if error.errno not in _NO_FOLDER:
            raise
        what = "a link" if os.path.islink(path) else "a file"
        raise SaveDirectoryError(
            f"'{path}' is {what}, but a save needs a folder of this name. Remove or rename it, or "
            "choose another directory.",
            path=path,
        ) from error
    made.append(path)  # before it exists: Ctrl-C may come in between
    os.mkdir(part, dir_fd=fd)
    sync(fd, os.path.dirname(path))
    return os.open(part, _FLAGS | os.O_NOFOLLOW, dir_fd=fd)
