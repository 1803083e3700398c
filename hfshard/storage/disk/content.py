"""The contents of one file on its way to somewhere: a file on disk, bytes in memory, or a stream made on demand."""

from __future__ import annotations

import hashlib
import io
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

from hfshard.constants import COPY_BYTES

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Content(Protocol):
    """Bytes whose number is known, and whose hash may be."""

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def sha256(self) -> str | None:
        """In hex, where it is known without reading."""

    def open(self) -> io.BufferedIOBase:
        """A new reader from the first byte, that can seek."""


@dataclass(frozen=True, slots=True)
class FileContent:
    """A file on disk."""

    path: str
    size: int
    sha256: str | None = None

    def open(self) -> io.BufferedIOBase:
        """Open the file for reading."""
        return open(self.path, "rb")


@dataclass(frozen=True, slots=True)
class BytesContent:
    """A small file in memory."""

    raw: bytes

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.raw)

    @property
    def sha256(self) -> str:
        """In hex."""
        return hashlib.sha256(self.raw).hexdigest()

    def open(self) -> io.BufferedIOBase:
        """A reader over the bytes."""
        return io.BytesIO(self.raw)


@dataclass(frozen=True, slots=True)
class StreamContent:
    """Bytes that are made when they are read."""

    size: int
    sha256: str
    opener: Callable[[], io.BufferedIOBase]

    def open(self) -> io.BufferedIOBase:
        """A new reader, that can seek."""
        return self.opener()


def file_content(path: str, sha256: str | None = None) -> FileContent:
    """The contents of a file on disk, as large as it is now."""
    return FileContent(path, os.stat(path).st_size, sha256)


def sha256_of_content(content: Content, stop: threading.Event | None = None) -> str:
    """The sha256 in hex: as it is known, else by reading all of it once.

    Raises:
        InterruptedError: `stop` was set.
    """
    if content.sha256 is not None:
        return content.sha256
    with content.open() as reader:
        return sha256_of_reader(reader, stop)


def sha256_of_reader(reader: io.BufferedIOBase, stop: threading.Event | None = None) -> str:
    """The sha256 in hex of all that is left in a reader; raises as `sha256_of_content`."""
    hasher = hashlib.sha256()
    while block := reader.read(COPY_BYTES):
        if stop is not None and stop.is_set():
            raise InterruptedError("another file failed, or Ctrl-C came")
        hasher.update(block)
    return hasher.hexdigest()


def stoppable(on_bytes: Callable[[int], object] | None, stop: threading.Event) -> Callable[[int], None]:
    """What to tell the bytes of a long work to, so that it ends early when another one failed, or Ctrl-C came."""

    def tell(count_bytes: int) -> None:
        if stop.is_set():
            raise InterruptedError("another file failed, or Ctrl-C came")
        if on_bytes is not None:
            on_bytes(count_bytes)

    return tell


def in_threads(
    work: Callable[[_Item, threading.Event], _Result], items: Iterable[_Item], threads: int
) -> list[_Result]:
    """Do some work for all items, several at once; an error or Ctrl-C sets the event that the others look at.

    Raises:
        The first error, in the order of the items.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(threads, thread_name_prefix="hfshard-hash") as pool:
        futures = [pool.submit(work, item, stop) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
