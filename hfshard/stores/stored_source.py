"""An object of a store as the contents of a file: read by ranges, pinned to the bytes that were listed."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Final

from hfshard.disk.byte_source import SeekableReader
from hfshard.stores.protocols import Store, StoredObject

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
