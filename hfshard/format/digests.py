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
"""What is checked before any tensor is returned."""


class Hasher(Protocol):
    """What hashlib's and xxhash's objects have in common."""

    def update(self, data: Any, /) -> None:
        """Take in more bytes."""

    def hexdigest(self) -> str:
        """The digest of what was taken in, in lower-case hex."""


HASHERS: Final[dict[str, Callable[[], Hasher]]] = {"sha256": hashlib.sha256, "xxh3": xxhash.xxh3_128}
"""sha256 is what the Hub uses, and anybody can check it; xxh3 is as fast as memory."""


def check_checksum(checksum: str | None) -> None:
    """Refuse an unknown kind of checksum.

    Raises:
        InvalidArgumentError: It is neither None nor a key of `HASHERS`.
    """
    if checksum is not None and checksum not in tuple(HASHERS):
        raise InvalidArgumentError(f"checksum must be 'sha256', 'xxh3' or None, got {checksum!r}.")


def check_verify_level(verify: str) -> None:
    """Refuse an unknown value of `verify`.

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
    """The digest of one tensor's bytes, which tells whether this tensor of a damaged file is damaged."""
    hasher = tensor_hasher()
    for block in blocks:
        hasher.update(block)
    return hasher.hexdigest()


def small_tensor_digest(raw: bytes) -> str:
    """`tensor_digest` of a tensor whose bytes are all at hand, in a third of the time."""
    return xxhash.xxh3_64_hexdigest(raw)


TENSOR_DIGEST_HEX: Final = 16
"""Hex digits of `tensor_digest`."""


def fingerprint_positions(count: int) -> Sequence[int]:
    """The positions of the tensors that go into the fingerprint: all, or 1,024 evenly chosen ones."""
    if count <= FINGERPRINT_TENSORS:
        return range(count)
    return [position * count // FINGERPRINT_TENSORS for position in range(FINGERPRINT_TENSORS)]


def md5_of(raw: bytes) -> str:
    """Return the MD5 in hex, which S3 and GCS make the ETag of an object that was put whole."""
    return hashlib.md5(raw, usedforsecurity=False).hexdigest()


def sha256_of(raw: bytes) -> str:
    """The sha256 of a small file's bytes, in hex."""
    return hashlib.sha256(raw).hexdigest()


def zeroed(header: bytes, digests: Sequence[tuple[str, str]]) -> bytes:
    """Replace the digests in a single file's header by zeros: these bytes are hashed for the digests.

    Args:
        header: Everything before the data.
        digests: (key, hex digest) as the file states them.

    Returns:
        The header to hash. A digest that does not occur in it changes nothing.
    """
    for name, digest in digests:
        stated = f'\\"{name}\\":\\"{digest}\\"'.encode()
        blank = f'\\"{name}\\":\\"{"0" * len(digest)}\\"'.encode()
        header = header.replace(stated, blank, 1)
    return header
