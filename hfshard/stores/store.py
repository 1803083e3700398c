"""The `Store` protocol: the operations that checkpoints need, and a store's objects as file contents."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final, Protocol

from hfshard._util.arguments import StoreAddress
from hfshard.disk.byte_source import SeekableReader


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object as it was listed or put: later reads return exactly these bytes, or raise."""

    name: str
    """Name below the store's prefix, with "/" between its parts."""
    size: int
    """Bytes."""
    etag: str
    """Identifies the bytes: other bytes have another ETag. Its form is up to the service."""
    put_at: datetime | None = field(default=None, compare=False)
    """Time of the put, by the service's clock; None if the response does not give it."""


class ObjectWriter(Protocol):
    """A large object that is sent in parts; it is not visible before `finish`."""

    def write(self, block: memoryview) -> None:
        """Send the next bytes; the caller can reuse their memory on return. Wait while too much is in flight.

        Raises:
            StoreError: The service refused or failed, after retries.
        """

    def finish(self) -> StoredObject:
        """Create the object from the bytes that were written, replacing one of the same name.

        Raises:
            StoreError: It was not created, or the outcome is unknown; the message says which.
        """

    def abort(self) -> None:
        """Give up, and remove what was sent. Can be called at any time, more than once, and after an error."""


class Store(Protocol):
    """The objects below one prefix of a bucket. Several threads use it at once.

    All names are relative to the prefix. Transient failures are retried inside, with backoff; an error that is raised
    is final.

    Raises (all of them):
        StoreAccessError: There are no credentials, or they do not permit the request.
        StoreNotFoundError: There is no such bucket.
        StoreConnectionError: The service cannot be reached, or stopped responding.
        StoreError: The service refused or failed in another way.
    """

    @property
    def address(self) -> StoreAddress:
        """The store's address."""

    def list_objects(self, folder: str = "", *, recursive: bool = False) -> dict[str, StoredObject]:
        """List the objects of a folder by name; empty if there are none.

        Args:
            folder: Below the prefix; "" is the prefix itself.
            recursive: Include its folders at any depth; otherwise list only objects directly in it.
        """

    def folders(self, folder: str = "") -> list[str]:
        """Name the folders directly in a folder, sorted, without listing their contents."""

    def neighbors(self) -> list[str]:
        """Name the folders next to the place, sorted; none if it is a bucket. This lists that level."""

    def find(self, name: str) -> StoredObject | None:
        """Look up one object; None if it does not exist."""

    def read_into(self, found: StoredObject, begin: int, target: memoryview) -> None:
        """Fill memory with an object's bytes from `begin` on.

        Raises:
            CheckpointChangedError: The object now has other bytes, or is gone.
        """

    def read(self, found: StoredObject) -> bytes:
        """Return the bytes of a small object; raises CheckpointChangedError as `read_into` does."""

    def put(self, name: str, raw: bytes) -> StoredObject:
        """Put a small object completely or not at all, replacing one of that name.

        Raises:
            StoreError: The put was refused, or it is unknown whether it was or will be done: then `may_be_done` is set.
        """

    def open_writer(self, name: str, size: int, replaced: StoredObject | None = None) -> ObjectWriter:
        """Begin a large object of `size` bytes.

        Args:
            name: Its name.
            size: Its bytes.
            replaced: The object of this name that was listed: after a lost response, that one is not the new one.
        """

    def copy(self, source: StoredObject, target: str) -> StoredObject:
        """Copy an object on the server, replacing one of that name; raises CheckpointChangedError as `read_into` does.

        Returns:
            The copy.
        """

    def delete(self, names: Collection[str]) -> None:
        """Delete objects; a missing one is not an error."""

    def sweep_uploads(self, is_left: Callable[[str], bool]) -> int:
        """Remove what unfinished uploads have left at any depth below the prefix, where the service keeps it.

        An upload that is in progress looks the same as one that a killed process has left. The caller knows which ones
        can no longer be part of the checkpoint; their writers get a StoreError.

        Args:
            is_left: Return whether to remove the upload of an object of this name below the prefix; it must never
                select another program's file.

        Returns:
            The number of uploads removed.
        """


def neighbors_of(address: StoreAddress, open_at: Callable[[StoreAddress], Store]) -> list[str]:
    """Name the folders next to a place, as `Store.neighbors` does."""
    parent, _, name = address.prefix.rpartition("/")
    if not name:
        return []
    return [folder for folder in open_at(replace(address, prefix=parent)).folders() if folder != name]


# A stored object as file contents: read by ranges, pinned to the bytes that were listed.


_READ_BYTES: Final = 8 << 20
"""Bytes per request: a request takes about 50 ms, in which a fast line carries this many."""


class _ObjectReads(Protocol):
    """The part of a `Store` that reads."""

    def read_into(self, found: Any, begin: int, target: memoryview) -> None:
        """Fill memory with an object's bytes from `begin` on."""


@dataclass(frozen=True, slots=True)
class StoredSource:
    """The contents of an object, as it was listed."""

    store: _ObjectReads
    found: StoredObject
    sha256: str | None = None

    @property
    def size(self) -> int:
        """Bytes."""
        return self.found.size

    def open(self) -> io.BufferedIOBase:
        """Return a new seekable reader; its reads raise CheckpointChangedError as `Store.read_into` does."""
        return _ObjectReader(self.store, self.found)


class _ObjectReader(SeekableReader):
    """Reader of one object that reads ahead by at most one block."""

    def __init__(self, store: _ObjectReads, found: StoredObject) -> None:
        super().__init__(found.size)
        self._store = store
        self._found = found
        self._block = memoryview(b"")
        self._block_start = 0

    def read(self, size: int | None = -1, /) -> bytes:
        """Read the next `size` bytes, or fewer at the end; all remaining bytes if it is None or negative."""
        left = max(0, self._size - self._position)
        left = left if size is None or size < 0 else min(size, left)
        if left > _READ_BYTES:
            return self._read_past_block(left)
        parts = []
        while left:
            view = self._buffered(left)
            parts.append(view.tobytes())
            self._position += len(view)
            left -= len(view)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Release the block."""
        self._block = memoryview(b"")
        super().close()

    def _read_past_block(self, count_bytes: int) -> bytes:
        room = bytearray(count_bytes)
        self._store.read_into(self._found, self._position, memoryview(room))
        self._position += count_bytes
        return bytes(room)

    def _buffered(self, limit: int) -> memoryview:
        """Return 1 to `limit` bytes at the position, requesting them if they are not buffered."""
        offset = self._position - self._block_start
        if not 0 <= offset < len(self._block):
            room = memoryview(bytearray(min(_READ_BYTES, self._size - self._position)))
            self._store.read_into(self._found, self._position, room)
            self._block, self._block_start, offset = room, self._position, 0
        return self._block[offset : offset + limit]
