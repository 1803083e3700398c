"""Xet's metadata shards, as clients upload them: which terms a file is made of, and which chunks a xorb holds.

Source: xet-core, xet_core_structures/src/metadata_shard (header version 2).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

TAG = b"HFRepoMetaData\0" + bytes([85, 105, 103, 69, 106, 123, 129, 87, 131, 165, 189, 217, 92, 205, 209, 74, 169])
HEADER_VERSION = 2
FOOTER_VERSION = 1
FOOTER_BYTES = 200
# Headers and entries of both sections: a hash, and four numbers (or two, or none) in the rest.
RECORD = struct.Struct("<32s4I")
_HEADER = struct.Struct("<32sQQ")
_BOOKEND = b"\xff" * 32
_HAS_VERIFICATION = 1 << 31
_HAS_METADATA = 1 << 30


@dataclass(frozen=True, slots=True)
class Term:
    """Chunks of one xorb that lie one after another in a file."""

    xorb: str
    begin: int
    end: int
    """Index of the chunk after the last."""
    size: int
    """Bytes, unpacked."""


@dataclass(frozen=True, slots=True)
class FileRecipe:
    """How a file is made."""

    hash: str
    terms: tuple[Term, ...]
    sha256: str | None
    """None: its writer did not say."""

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return sum(term.size for term in self.terms)


@dataclass(frozen=True, slots=True)
class XorbListing:
    """The chunks of a xorb, as a shard lists them."""

    hash: str
    record: bytes
    """The header and the entries, as they came."""

    @property
    def chunk_hashes(self) -> list[str]:
        """Of all its chunks, in order."""
        return [hash_text(chunk) for chunk, *_ in RECORD.iter_unpack(self.record[RECORD.size :])]


def hash_text(raw: bytes) -> str:
    """Write a hash as Xet does: as four little-endian numbers of 64 bits."""
    return "".join(f"{number:016x}" for number in struct.unpack("<4Q", raw))


def hash_bytes(text: str) -> bytes:
    """Undo `hash_text`."""
    return struct.pack("<4Q", *(int(text[at : at + 16], 16) for at in range(0, 64, 16)))


def parse_shard(raw: bytes) -> tuple[list[FileRecipe], list[XorbListing]]:
    """Read a shard, with or without its footer.

    Raises:
        ValueError: It is none.
    """
    try:
        tag, version, _ = _HEADER.unpack_from(raw)
        if tag != TAG or version != HEADER_VERSION:
            raise ValueError("This is no shard of version 2.")
        files, position = _files(raw, _HEADER.size)
        return files, _xorbs(raw, position)
    except struct.error as error:
        raise ValueError(f"The shard ends too soon: {error}") from None


def _files(raw: bytes, position: int) -> tuple[list[FileRecipe], int]:
    files: list[FileRecipe] = []
    while True:
        file_hash, flags, count, *_ = RECORD.unpack_from(raw, position)
        position += RECORD.size
        if file_hash == _BOOKEND:
            return files, position
        terms = [_term(raw, position + RECORD.size * number) for number in range(count)]
        position += RECORD.size * count * (2 if flags & _HAS_VERIFICATION else 1)
        sha256 = None
        if flags & _HAS_METADATA:
            sha256 = hash_text(RECORD.unpack_from(raw, position)[0])
            position += RECORD.size
        files.append(FileRecipe(hash_text(file_hash), tuple(terms), sha256))


def _term(raw: bytes, position: int) -> Term:
    xorb, _, size, begin, end = RECORD.unpack_from(raw, position)
    return Term(hash_text(xorb), begin, end, size)


def _xorbs(raw: bytes, position: int) -> list[XorbListing]:
    xorbs: list[XorbListing] = []
    while True:
        xorb, _, count, *_ = RECORD.unpack_from(raw, position)
        if xorb == _BOOKEND:
            return xorbs
        size = RECORD.size * (1 + count)
        record = raw[position : position + size]
        if len(record) < size:
            raise ValueError("The shard ends within a xorb.")
        xorbs.append(XorbListing(hash_text(xorb), record))
        position += size


def file_shard(recipe: FileRecipe) -> bytes:
    """Write the shard that registers a file, with nothing to verify it by and without a list of chunks."""
    bookend = RECORD.pack(_BOOKEND, 0, 0, 0, 0)
    header = RECORD.pack(hash_bytes(recipe.hash), 0, len(recipe.terms), 0, 0)
    terms = [RECORD.pack(hash_bytes(one.xorb), 0, one.size, one.begin, one.end) for one in recipe.terms]
    return _HEADER.pack(TAG, HEADER_VERSION, 0) + header + b"".join(terms) + bookend + bookend


def dedup_shard(records: Iterable[bytes], expires: int) -> bytes:
    """Write the shard that answers a query for a chunk: no files, some xorbs, and no key over the chunks' hashes.

    Args:
        records: Of `XorbListing`.
        expires: Seconds since 1970; clients forget it then.
    """
    bookend = RECORD.pack(_BOOKEND, 0, 0, 0, 0)
    header = _HEADER.pack(TAG, HEADER_VERSION, FOOTER_BYTES)
    body = bookend + b"".join(records) + bookend
    end = len(header) + len(body)
    footer = struct.pack(
        "<9Q32sQQ48s4Q",
        FOOTER_VERSION,
        len(header),
        len(header) + len(bookend),
        *(end, 0) * 3,  # Empty tables, by which one would find files, xorbs and chunks.
        bytes(32),
        0,
        expires,
        bytes(48),
        *(0, 0, 0, end),
    )
    return header + body + footer
