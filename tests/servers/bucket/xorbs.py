"""Xorbs, the blocks of chunks that Xet's clients upload: kept as they came, and read by chunk."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from tests.servers.bucket.lz4 import unpack_chunk
from tests.servers.objects import Contents, replace_file

# Version, 3 bytes of packed length, scheme, 3 bytes of unpacked length.
CHUNK_HEADER_BYTES = 8
# Clients refuse chunks of more than twice as many.
PLAIN_CHUNK_BYTES = 64 * 1024
# What stands in a header's place where the footer begins, if the client sent one.
_FOOTER = b"XETBLOB"


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """Where the chunks of a xorb lie, packed and unpacked: each list has one more than there are chunks."""

    packed: list[int]
    unpacked: list[int]


def chunk_table(raw: bytes) -> ChunkTable:
    """Walk through the headers of a xorb's chunks.

    Raises:
        ValueError: It is no xorb.
    """
    packed, unpacked, position = [0], [], 0
    while position < len(raw) and raw[position : position + len(_FOOTER)] != _FOOTER:
        header = int.from_bytes(raw[position : position + CHUNK_HEADER_BYTES], "little")
        unpacked.append(header >> 40)
        position += CHUNK_HEADER_BYTES + (header >> 8 & 0xFFFFFF)
        packed.append(position)
    if position > len(raw) or not unpacked:
        raise ValueError("The xorb ends within a chunk.")
    return ChunkTable(packed, list(accumulate(unpacked, initial=0)))


def plain_xorb(raw: bytes) -> tuple[bytes, int]:
    """Write bytes as a xorb of chunks that are not packed; gives it, and the number of chunks."""
    chunks = [raw[start : start + PLAIN_CHUNK_BYTES] for start in range(0, len(raw), PLAIN_CHUNK_BYTES)]
    headers = [b"\0" + len(one).to_bytes(3, "little") for one in chunks]  # the version or the scheme, and a length
    return b"".join(head * 2 + one for head, one in zip(headers, chunks, strict=True)), len(chunks)


class XorbStore(Contents):
    """Xorbs by their hashes."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._tables: dict[str, ChunkTable] = {}

    def add(self, xorb: str, pieces: Iterable[bytes]) -> bool:
        """Store a xorb that comes in pieces; False: it was there.

        Raises:
            ValueError: It is none.
        """
        was_there = self.has(xorb)
        content = b"".join(pieces)
        self._tables[xorb] = chunk_table(content)
        replace_file(self.path(xorb), content)
        return not was_there

    def table(self, xorb: str) -> ChunkTable:
        """Where its chunks lie."""
        return self._tables[xorb]

    def unpack(self, xorb: str, begin: int, end: int) -> bytes:
        """The bytes of some of its chunks."""
        packed = self.table(xorb).packed
        with self.path(xorb).open("rb") as file:
            file.seek(packed[begin])
            raw = memoryview(file.read(packed[end] - packed[begin]))
        starts = [position - packed[begin] for position in packed[begin : end + 1]]
        return b"".join(unpack_chunk(raw[one:after]) for one, after in pairwise(starts))
