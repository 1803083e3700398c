"""Folders below a directory, opened part by part without following links: nothing is written outside."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from hfshard.errors import SaveDirectoryError
from hfshard.storage.disk.fsops import sync

_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NO_FOLDER: Final = frozenset({errno.ELOOP, errno.ENOTDIR, errno.ENXIO})
"""What `open` answers where there is a link or a file in place of a folder."""


@contextmanager
def open_folder(directory: str, below: str, made: list[str] | None = None) -> Iterator[int]:
    """Open a folder below a directory, whose own path may have links.

    Args:
        directory: It must exist.
        below: Relative path in it, without `..`; "" for the directory itself.
        made: Missing folders are made, durably, and their paths are added here. None: they are an error.

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
            f"'{path}' is {what}, and a file is to be written into a folder of this name. Remove or rename it, or "
            "choose another directory.",
            path=path,
        ) from error
    made.append(path)  # before it is there: Ctrl-C may come between
    os.mkdir(part, dir_fd=fd)
    sync(fd, os.path.dirname(path))
    return os.open(part, _FLAGS | os.O_NOFOLLOW, dir_fd=fd)
