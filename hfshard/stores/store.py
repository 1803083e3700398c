"""The `Store` protocol: what a checkpoint asks of a store, and an object of one as the contents of a file."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final, Protocol

from hfshard._util.addresses import StoreAddress
from hfshard.disk.byte_source import SeekableReader


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object as it was listed or put: later reads are of these very bytes, or an error."""

    name: str
    """Below the store's prefix, with "/" between its parts."""
    size: int
    """Bytes."""
    etag: str
    """Another one for other bytes; what it is made of is the service's own matter."""
    put_at: datetime | None = field(default=None, compare=False)
    """When it was put, by the service's clock; None where the answer does not say it."""


class ObjectWriter(Protocol):
    """A large object that is sent in parts; nobody sees it before `finish`."""

    def write(self, block: memoryview) -> None:
        """Send the next bytes, which may change when this returns. It waits while too much is under way.

        Raises:
            StoreError: The service refused or failed, after retries.
        """

    def finish(self) -> StoredObject:
        """Make the object of the bytes that were written, replacing one of its name.

        Raises:
            StoreError: It was not made; or nobody can tell, which the message says.
        """

    def abort(self) -> None:
        """Give up, and remove what was sent. May be called at any time, more than once, and after an error."""


class Store(Protocol):
    """The objects below one prefix of a bucket. Used by several threads at once.

    All names are those below the prefix. What fails for a while is tried again in here, with backoff; what is raised is
    final.

    Raises (all of them):
        StoreAccessError: No credentials, or they do not permit it.
        StoreNotFoundError: There is no such bucket.
        StoreConnectionError: The service can't be reached, or stopped answering.
        StoreError: It refused or failed in another way.
    """

    @property
    def address(self) -> StoreAddress:
        """Where it is."""

    def list_objects(self, folder: str = "", *, recursive: bool = False) -> dict[str, StoredObject]:
        """List the objects of a folder by name; empty where there are none.

        Args:
            folder: Below the prefix; "" is the prefix itself.
            recursive: Also those in its folders, as deep as they are; else only those directly in it.
        """

    def folders(self, folder: str = "") -> list[str]:
        """Name the folders directly in a folder, sorted; what is in them is not listed."""

    def neighbors(self) -> list[str]:
        """Name the folders next to the place, sorted; none where it is a bucket. It takes a listing of that level."""

    def find(self, name: str) -> StoredObject | None:
        """Ask for one object."""

    def read_into(self, found: StoredObject, begin: int, target: memoryview) -> None:
        """Fill memory with the bytes of an object from `begin` on.

        Raises:
            CheckpointChangedError: The object has other bytes now, or is gone.
        """

    def read(self, found: StoredObject) -> bytes:
        """The bytes of a small object; raises as `read_into`."""

    def put(self, name: str, raw: bytes) -> StoredObject:
        """Put a small object, whole or not at all, replacing one of that name.

        Raises:
            StoreError: It was refused; or nobody can tell whether it was done, or will be: then `may_be_done` is set.
        """

    def open_writer(self, name: str, size: int) -> ObjectWriter:
        """Begin a large object of so many bytes."""

    def copy(self, source: StoredObject, target: str) -> StoredObject:
        """Copy an object on the server, replacing one of that name; raises as `read_into`.

        Returns:
            The copy.
        """

    def delete(self, names: Collection[str]) -> None:
        """Delete objects; those that are missing already are no error."""

    def sweep_uploads(self, is_left: Callable[[str], bool]) -> int:
        """Remove what unfinished uploads below the prefix have left, as deep as it lies, where the service keeps it.

        Nobody can tell by looking whether an upload is under way or was left by a process that was killed. A caller
        knows which ones can no longer be part of the checkpoint; their writers get a StoreError.

        Args:
            is_left: Whether the upload of an object of this name below the prefix is to go: no file of others.

        Returns:
            How many were removed.
        """


def neighbors_of(address: StoreAddress, open_at: Callable[[StoreAddress], Store]) -> list[str]:
    """Name the folders next to a place, as `Store.neighbors` does."""
    parent, _, name = address.prefix.rpartition("/")
    if not name:
        return []
    return [folder for folder in open_at(replace(address, prefix=parent)).folders() if folder != name]


# An object of a store as the contents of a file: read by ranges, pinned to the bytes that were listed.


_READ_BYTES: Final = 8 << 20
"""What is asked for at once: a request takes some 50 ms, in which a fast line carries as much."""


@dataclass(frozen=True, slots=True)
class StoredSource:
    """The contents of an object, as it was listed."""

    store: Store
    found: StoredObject
    sha256: str | None = None

    @property
    def size(self) -> int:
        """Bytes."""
        return self.found.size

    def open(self) -> io.BufferedIOBase:
        """Return a new reader, which can seek; reading raises as `Store.read_into`."""
        return _ObjectReader(self.store, self.found)


class _ObjectReader(SeekableReader):
    """Reads one object, ahead of what is asked for by at most one block."""

    def __init__(self, store: Store, found: StoredObject) -> None:
        super().__init__(found.size)
        self._store = store
        self._found = found
        self._block = memoryview(b"")
        self._block_start = 0

    def read(self, size: int | None = -1, /) -> bytes:
        """Read the next `size` bytes, or fewer at the end; all that are left if it is None or negative."""
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
        """Let go of the block."""
        self._block = memoryview(b"")
        super().close()

    def _read_past_block(self, count_bytes: int) -> bytes:
        room = bytearray(count_bytes)
        self._store.read_into(self._found, self._position, memoryview(room))
        self._position += count_bytes
        return bytes(room)

    def _buffered(self, limit: int) -> memoryview:
        """Between 1 and `limit` bytes at the position, which are asked for if they are not there yet."""
        offset = self._position - self._block_start
        if not 0 <= offset < len(self._block):
            room = memoryview(bytearray(min(_READ_BYTES, self._size - self._position)))
            self._store.read_into(self._found, self._position, room)
            self._block, self._block_start, offset = room, self._position, 0
        return self._block[offset : offset + limit]
