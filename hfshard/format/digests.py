"""Checksums of files, and the cheap fingerprint that distinguishes the shards of two saves."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal, Protocol

import xxhash

from hfshard.constants import FINGERPRINT_TENSORS
from hfshard.errors import InvalidArgumentError

Checksum = Literal["sha256", "xxh3"]
Verify = Literal["none", "structure", "full", "sha256"]
"""The checks before any tensor is returned."""

FULL: Final = ("full", "sha256")
"""Levels at which every byte is compared."""


class Hasher(Protocol):
    """The common interface of hashlib's and xxhash's objects."""

    def update(self, data: Any, /) -> None:
        """Hash more bytes."""

    def hexdigest(self) -> str:
        """Return the digest of the bytes so far, in lower-case hex."""


HASHERS: Final[dict[str, Callable[[], Hasher]]] = {"sha256": hashlib.sha256, "xxh3": xxhash.xxh3_128}
"""Kind of checksum -> hasher. The Hub uses sha256, which any tool can check; xxh3 is as fast as memory."""


def check_checksum(checksum: str | None) -> None:
    """Reject an unknown kind of checksum.

    Raises:
        InvalidArgumentError: It is neither None nor a key of `HASHERS`.
    """
    if checksum is not None and checksum not in tuple(HASHERS):
        raise InvalidArgumentError(f"checksum must be 'sha256', 'xxh3' or None, got {checksum!r}.")


def check_verify_level(verify: str) -> None:
    """Reject an unknown value of `verify`.

    Raises:
        InvalidArgumentError: It is not one of `Verify`.
    """
    if verify not in ("none", "structure", "full", "sha256"):
        raise InvalidArgumentError(f"verify must be 'none', 'structure' or 'full' (or 'sha256'), got {verify!r}.")


def new_fingerprint() -> Hasher:
    """Create the hasher for the fingerprint of a file."""
    return xxhash.xxh3_128()


def tensor_hasher() -> Hasher:
    """Create the hasher for the digest of one tensor."""
    return xxhash.xxh3_64()


def tensor_digest(blocks: Iterable[Any]) -> str:
    """Compute the digest of one tensor's bytes, which shows whether this tensor of a damaged file is damaged."""
    hasher = tensor_hasher()
    for block in blocks:
        hasher.update(block)
    return hasher.hexdigest()


def tensor_digest_of_bytes(raw: bytes) -> str:
    """Compute `tensor_digest` of bytes in memory, in a third of the time."""
    return xxhash.xxh3_64_hexdigest(raw)


TENSOR_DIGEST_HEX: Final = 16
"""Hex digits of `tensor_digest`."""


def fingerprint_positions(count: int) -> Sequence[int]:
    """Return the positions of the tensors that go into the fingerprint: all, or 1,024 evenly chosen ones."""
    if count <= FINGERPRINT_TENSORS:
        return range(count)
    return [position * count // FINGERPRINT_TENSORS for position in range(FINGERPRINT_TENSORS)]


def md5_of(raw: bytes) -> str:
    """Return the MD5 in hex, which S3 and GCS use as the ETag of an object that was put in one request."""
    return hashlib.md5(raw, usedforsecurity=False).hexdigest()


def sha256_of(raw: bytes) -> str:
    """Return the sha256 of a small file's bytes, in hex."""
    return hashlib.sha256(raw).hexdigest()


def with_zeroed_digests(header: bytes, digests: Sequence[tuple[str, str]]) -> bytes:
    """Replace the digests in a single file's header by zeros: the digests are computed over these bytes.

    Args:
        header: Everything before the data.
        digests: (key, hex digest) as the file states them.

    Returns:
        The header to hash. A digest that does not occur in it has no effect.
    """
    for name, digest in digests:
        stated = f'\\"{name}\\":\\"{digest}\\"'.encode()
        blank = f'\\"{name}\\":\\"{"0" * len(digest)}\\"'.encode()
        header = header.replace(stated, blank, 1)
    return header
