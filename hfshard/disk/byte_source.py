"""Contents of a file to be sent or copied: a file on disk, bytes in memory, or a stream created on demand."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from hfshard._util.progress import ProgressCallback
from hfshard._util.threads import cancellable, run_in_threads
from hfshard.constants import COPY_BYTES, FILES_AT_ONCE
from hfshard.disk.fsops import UNSUPPORTED, copy_mode, sync


class ByteSource(Protocol):
    """Bytes of a known number, with their hash if it is known."""

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def sha256(self) -> str | None:
        """Hex digest; None if it is not known without reading."""

    def open(self) -> io.BufferedIOBase:
        """Return a new reader at the first byte, which can seek."""


@dataclass(frozen=True, slots=True)
class FileSource:
    """A file on disk."""

    path: str
    size: int
    sha256: str | None = None

    def open(self) -> io.BufferedIOBase:
        """Open the file for reading."""
        return open(self.path, "rb")


@dataclass(frozen=True, slots=True)
class BytesSource:
    """A small file in memory."""

    raw: bytes

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.raw)

    @property
    def sha256(self) -> str:
        """Hex digest."""
        return hashlib.sha256(self.raw).hexdigest()

    def open(self) -> io.BufferedIOBase:
        """Return a reader of the bytes."""
        return io.BytesIO(self.raw)


@dataclass(frozen=True, slots=True)
class StreamSource:
    """Bytes that are computed, or a file that is opened, when they are read."""

    size: int
    sha256: str | None
    opener: Callable[[], io.BufferedIOBase]

    def open(self) -> io.BufferedIOBase:
        """Return a new reader, which can seek."""
        return self.opener()


def file_source(path: str, sha256: str | None = None) -> FileSource:
    """Return the contents of a file on disk, with its current size."""
    return FileSource(path, os.stat(path).st_size, sha256)


def read_all(content: ByteSource) -> bytes:
    """Return the bytes of a small file."""
    with content.open() as reader:
        return reader.read()


def sha256_of_source(content: ByteSource, cancelled: threading.Event | None = None) -> str:
    """Return the sha256 in hex: the known one, or else computed by reading everything once.

    Raises:
        InterruptedError: `cancelled` was set.
    """
    if content.sha256 is not None:
        return content.sha256
    with content.open() as reader:
        return sha256_of_reader(reader, None if cancelled is None else cancellable(None, cancelled))


def sha256_of_reader(reader: io.BufferedIOBase, progress_callback: ProgressCallback | None = None) -> str:
    """Compute the sha256 in hex of the rest of a reader.

    Args:
        reader: Any file.
        progress_callback: Called with the number of bytes of each block that was hashed.
    """
    hasher = hashlib.sha256()
    while block := reader.read(COPY_BYTES):
        hasher.update(block)
        if progress_callback is not None:
            progress_callback(len(block))
    return hasher.hexdigest()


def hash_all(contents: Mapping[str, ByteSource], progress_callback: ProgressCallback | None = None) -> dict[str, str]:
    """Read contents, the largest first and several at once, and compute the sha256 of each, in hex.

    Args:
        contents: Name -> contents; a hash that is known is not trusted.
        progress_callback: Called from any thread with the number of bytes of each block that was hashed.
    """

    def hash_one(name: str, cancelled: threading.Event) -> str:
        with contents[name].open() as reader:
            return sha256_of_reader(reader, cancellable(progress_callback, cancelled))

    largest_first = sorted(contents, key=lambda name: -contents[name].size)
    return dict(zip(largest_first, run_in_threads(hash_one, largest_first, FILES_AT_ONCE), strict=True))


def contents_equal(one: ByteSource, other: ByteSource) -> bool:
    """Return whether two contents are equal; they are read only if their sizes are equal."""
    if one.size != other.size:
        return False
    with one.open() as reader, other.open() as other_reader:
        while block := reader.read(COPY_BYTES):
            if block != other_reader.read(COPY_BYTES):
                return False
        return not other_reader.read(1)


class SeekableReader(io.BufferedIOBase):
    """A file for reading whose bytes are computed when they are read; subclasses add `read`."""

    def __init__(self, size: int) -> None:
        """Start at the first of `size` bytes."""
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True: reading may start anywhere."""
        return True

    def tell(self) -> int:
        """Return the position, in bytes from the beginning."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Go to a position, as in a file."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"negative seek position {base + offset}")
        self._position = base + offset
        return self._position


# Copies without copying bytes, if the file system lets two files share blocks (btrfs, XFS).


_FICLONE: Final = 0x40049409
"""The ioctl that lets a file share the blocks of another until one of them is written to (linux/fs.h)."""

_NO_CLONES: Final = UNSUPPORTED | {errno.EINVAL, errno.ENOTTY, errno.EXDEV, errno.EPERM, errno.EACCES, errno.ETXTBSY}
"""Errors of the ioctl if files cannot share blocks. A full or failing disk gives other errors."""


def clone_blocks(source_fd: int, target_fd: int) -> bool:
    """Make an empty file share all blocks of another one.

    Args:
        source_fd: Open for reading.
        target_fd: Open for writing.

    Returns:
        Whether it does. False if the file system cannot; then the target is still empty.

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
        target: The new file; it must not exist.
        like: The status of the file whose mode and group the copy gets; None: the defaults, by the umask.
    """
    with open(source, "rb") as reading, open(target, "xb") as writing:
        if not clone_blocks(reading.fileno(), writing.fileno()):
            shutil.copyfileobj(reading, writing)
            writing.flush()
        copy_mode(writing.fileno(), like)
        sync(writing.fileno(), target)
