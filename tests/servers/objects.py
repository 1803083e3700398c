"""Contents on disk: a repository's objects by sha256, and the names that git and git-lfs give them."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

# Bodies and files move in pieces of this size, so that no transfer holds a whole file.
PIECE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of a Hub commit."""

    size: int
    sha256: str
    oid: str
    """git's name of the blob: of the contents, or of the pointer file for LFS."""
    is_lfs: bool

    @property
    def etag(self) -> str:
        """What the Hub tells clients that cache this file: the sha256 for LFS, else git's name."""
        return self.sha256 if self.is_lfs else self.oid


def lfs_pointer(sha256: str, size: int) -> bytes:
    """Write the pointer file that git holds in place of an LFS file."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()


def git_blob_oid(content: bytes) -> str:
    """Name contents as git does."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def lfs_entry(sha256: str, size: int) -> Entry:
    """Describe an LFS file."""
    return Entry(size, sha256, git_blob_oid(lfs_pointer(sha256, size)), is_lfs=True)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old contents or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    os.replace(file.name, path)


class Contents:
    """A directory of contents, each in a file that a digest names."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def path(self, digest: str) -> Path:
        """Where the contents with this digest are (or would be)."""
        return self.directory / digest

    def has(self, digest: str) -> bool:
        """Say whether the contents are stored."""
        return self.path(digest).is_file()


class Objects(Contents):
    """Contents by their sha256."""

    def add(self, pieces: Iterable[bytes], sha256: str | None = None, size: int | None = None) -> str:
        """Store contents piece by piece.

        Raises:
            ValueError: They have another digest or size than was said; nothing is stored.
        """
        with self._temporary() as (incoming, file):
            digest, length = hashlib.sha256(), 0
            for piece in pieces:
                file.write(piece)
                digest.update(piece)
                length += len(piece)
            file.flush()
            if (sha256 or digest.hexdigest()) != digest.hexdigest() or (length if size is None else size) != length:
                raise ValueError(f"Expected {size} bytes with sha256 {sha256}, got {length} with {digest.hexdigest()}.")
            os.replace(incoming, self.path(digest.hexdigest()))
        return digest.hexdigest()

    def add_regular(self, content: bytes) -> Entry:
        """Store the contents of a file that git itself holds."""
        return Entry(len(content), self.add([content]), git_blob_oid(content), is_lfs=False)

    @contextmanager
    def _temporary(self) -> Iterator[tuple[Path, BinaryIO]]:
        handle, name = tempfile.mkstemp(dir=self.directory, prefix=".incoming-")
        try:
            with open(handle, "wb") as file:
                yield Path(name), file
        finally:
            Path(name).unlink(missing_ok=True)


def pieces_of(path: Path, start: int = 0, length: int | None = None) -> Iterator[bytes]:
    """Read `length` bytes of a file from `start`, in pieces."""
    with path.open("rb") as file:
        file.seek(start)
        left = path.stat().st_size - start if length is None else length
        while left > 0 and (piece := file.read(min(PIECE_BYTES, left))):
            left -= len(piece)
            yield piece
