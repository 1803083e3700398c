"""The store of the bucket server by itself: packed chunks, shards, and ranges of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.servers.bucket.cas import Cas
from tests.servers.bucket.lz4 import unpack_chunk
from tests.servers.bucket.shards import TAG, dedup_shard, hash_bytes, hash_text, parse_shard

# The hash of a file, of its xorb and of a chunk, as texts: number 1, 2, 3 in the first of their four places.
FILE, XORB, CHUNK = (f"{number:016x}" + "0" * 48 for number in (1, 2, 3))
SHA256 = "ab" * 32
RECORD_OF_NONE = b"\xff" * 32 + bytes(16)


def plain_chunk(data: bytes) -> bytes:
    return b"\0" + len(data).to_bytes(3, "little") + b"\0" + len(data).to_bytes(3, "little") + data


CHUNKS = [b"abcd", b"efghij", b"k", b"lmno"]
XORB_BYTES = b"".join(map(plain_chunk, CHUNKS))


def numbers(*values: int) -> bytes:
    return b"".join(value.to_bytes(4, "little") for value in values)


def shard(terms: list[tuple[int, int, int]]) -> bytes:
    """A shard with one file of (bytes, first chunk, chunk after the last), with verification and metadata."""
    header = TAG + (2).to_bytes(8, "little") + bytes(8)
    file = hash_bytes(FILE) + numbers(3 << 30, len(terms), 0, 0)
    file += b"".join(hash_bytes(XORB) + numbers(0, *term) for term in terms)
    file += bytes(48) * len(terms) + hash_bytes(SHA256) + bytes(16)
    xorb = hash_bytes(XORB) + numbers(0, 1, 15, len(XORB_BYTES)) + hash_bytes(CHUNK) + numbers(0, 4, 0, 0)
    return header + file + RECORD_OF_NONE + xorb + RECORD_OF_NONE


@pytest.fixture
def cas(tmp_path: Path) -> Cas:
    """A store with a file "efghij" + "k", "lmno", "abcd", in three terms of one xorb."""
    store = Cas(tmp_path)
    assert store.add_xorb(XORB, [XORB_BYTES[:10], XORB_BYTES[10:]])
    store.add_shard(shard([(7, 1, 3), (4, 3, 4), (4, 0, 1)]))
    return store


@pytest.mark.parametrize(
    ("begin", "end", "expected", "fetched"),
    [
        (0, 15, b"efghijklmnoabcd", [(0, 4)]),
        (0, 1, b"e", [(1, 2)]),
        (6, 7, b"k", [(2, 3)]),
        (5, 8, b"jkl", [(1, 4)]),
        (12, 15, b"bcd", [(0, 1)]),
        (9, 13, b"noab", [(0, 1), (3, 4)]),
    ],
)
def test_a_range_takes_its_chunks_and_no_others(
    cas: Cas, begin: int, end: int, expected: bytes, fetched: list[tuple[int, int]]
) -> None:
    recipe = cas.recipe(FILE)
    assert recipe is not None

    assert b"".join(cas.pieces(recipe, begin, end)) == expected
    assert cas.reconstruct(recipe, begin, end).fetches == {XORB: fetched}


def test_files_are_found_by_digest_and_xorbs_by_chunk(cas: Cas) -> None:
    recipe, listing = cas.by_sha256(SHA256), cas.listing_of_chunk(CHUNK)
    assert recipe is not None and recipe.hash == FILE
    assert listing is not None
    assert parse_shard(dedup_shard([listing], 0))[1][0].chunk_hashes == [CHUNK]


def test_shards_of_what_was_not_uploaded_are_refused(cas: Cas, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no chunks 3 to 5"):
        cas.add_shard(shard([(4, 3, 5)]))
    with pytest.raises(ValueError, match="have not 5 bytes"):
        cas.add_shard(shard([(5, 3, 4)]))
    with pytest.raises(ValueError, match="was not uploaded"):
        Cas(tmp_path / "other").add_shard(shard([(4, 3, 4)]))
    with pytest.raises(ValueError, match="ends too soon"):
        cas.add_shard(shard([(4, 3, 4)])[:-150])
    with pytest.raises(ValueError, match="ends within a chunk"):
        cas.add_xorb(FILE, [XORB_BYTES[:-1]])
    assert cas.recipe(FILE) is not None and not cas.xorbs.has(FILE)


def test_hashes_are_written_as_four_little_endian_numbers() -> None:
    assert hash_text(bytes(range(32))) == "07060504030201000f0e0d0c0b0a090817161514131211101f1e1d1c1b1a1918"
    assert hash_bytes(hash_text(bytes(range(32)))) == bytes(range(32))


def packed_chunk(scheme: int, block: bytes, size: int, flag: int = 0) -> bytes:
    frame = bytes.fromhex("04224d18 60 40 82") + (len(block) | flag).to_bytes(4, "little") + block + bytes(4)
    return b"\0" + len(frame).to_bytes(3, "little") + bytes([scheme]) + size.to_bytes(3, "little") + frame


@pytest.mark.parametrize(
    ("chunk", "expected"),
    [
        (plain_chunk(b"plain"), b"plain"),
        # 3 literals, and 15 + 4 + 2 bytes from 3 back; then 2 literals.
        (packed_chunk(1, b"\x3fabc\x03\x00\x02\x20de", 26), b"abc" * 8 + b"de"),
        # 15 + 1 literals, and 4 bytes from 16 back.
        (packed_chunk(1, b"\xf0\x010123456789abcdef\x10\x00", 20), b"0123456789abcdef0123"),
        (packed_chunk(1, b"stored", 6, flag=1 << 31), b"stored"),
        # First bytes 0, 4 and 8, second ones 1, 5 and 9, then 2 and 6, 3 and 7.
        (packed_chunk(2, b"0481592637", 10, flag=1 << 31), b"0123456789"),
    ],
)
def test_chunks_are_unpacked(chunk: bytes, expected: bytes) -> None:
    assert unpack_chunk(memoryview(chunk)) == expected
