"""Finds out how two tensors differ: from their digests where both have one, else from their bytes, read once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hfshard._util.progress import ProgressCallback
from hfshard.storage.format.integrity import tensor_digest
from hfshard.viewing.diff.pairing import TensorPair
from hfshard.viewing.diff.report import DiffKind, ValueDiff
from hfshard.viewing.diff.sides import ComparedTensor


@dataclass(frozen=True, slots=True)
class Finding:
    """How two tensors differ."""

    kind: DiffKind
    values: ValueDiff | None = None
    read_bytes: int = 0


def known_kind(pair: TensorPair, *, trusts_digests: bool = True) -> DiffKind | None:
    """How two tensors differ, if that can be told without reading; None where it can't."""
    a, b = pair.a, pair.b
    if a.facts.dtype != b.facts.dtype:
        return "changed"
    if a.facts.nbytes != b.facts.nbytes:
        return "changed"
    has_digests = a.digest is not None and b.digest is not None
    if a.facts.nbytes == 0 or (trusts_digests and (a.places & b.places or (has_digests and a.digest == b.digest))):
        return _kind_of_equal(pair)
    return "changed" if has_digests and trusts_digests else None


def _kind_of_equal(pair: TensorPair) -> DiffKind:
    return "same" if pair.a.facts.shape == pair.b.facts.shape else "reshaped"


def compare(pair: TensorPair, report: ProgressCallback, *, trusts_digests: bool = True) -> Finding:
    """Find out how two tensors differ, reading what is needed.

    Args:
        pair: The two.
        report: Called with the bytes of each block; ends it early by raising.
        trusts_digests: False: every byte of both is read.

    Raises:
        IntegrityError: What was read is not what its digest says.
    """
    known = known_kind(pair, trusts_digests=trusts_digests)
    if known is not None:
        return Finding(known)
    a, b = pair.a, pair.b
    if trusts_digests and (a.digest is None) != (b.digest is None):
        digests = [one.digest or digest_of(one, report) for one in (a, b)]
        read = a.facts.nbytes if a.digest is None else b.facts.nbytes
        return Finding(_kind_of_equal(pair) if digests[0] == digests[1] else "changed", read_bytes=read)
    is_equal, read_bytes = True, 0
    for block_a, block_b in paired_blocks(pair, 1, 1, report):
        read_bytes += len(block_a) + len(block_b)
        is_equal = is_equal and torch.equal(as_bytes(block_a), as_bytes(block_b))
        if not is_equal and trusts_digests:
            break
    return Finding(_kind_of_equal(pair) if is_equal else "changed", read_bytes=read_bytes)


def digest_of(tensor: ComparedTensor, report: ProgressCallback) -> str:
    """Compute the digest of a tensor's bytes (arguments and errors as for `compare`)."""
    return tensor_digest(_reported(tensor.blocks(), report))


def paired_blocks(
    pair: TensorPair, bytes_a: int, bytes_b: int, report: ProgressCallback
) -> Iterator[tuple[memoryview, memoryview]]:
    """Read two tensors at once.

    Args:
        pair: The two, with the same number of elements.
        bytes_a, bytes_b: Of one element.
        report: Called with the bytes of each block; ends it early by raising.

    Yields:
        Blocks of the same elements; valid until the next ones.
    """
    blocks_a, blocks_b = pair.a.blocks(), pair.b.blocks()
    rest_a = rest_b = memoryview(b"")
    while True:
        if not rest_a:
            rest_a = next(blocks_a, rest_a)
        if not rest_b:
            rest_b = next(blocks_b, rest_b)
        count = min(len(rest_a) // bytes_a, len(rest_b) // bytes_b)
        if count == 0:
            return
        report(count * (bytes_a + bytes_b))
        yield rest_a[: count * bytes_a], rest_b[: count * bytes_b]
        rest_a, rest_b = rest_a[count * bytes_a :], rest_b[count * bytes_b :]


def as_bytes(block: memoryview) -> torch.Tensor:
    """Look at a block as a tensor."""
    return torch.frombuffer(block, dtype=torch.uint8)


def _reported(blocks: Iterator[memoryview], report: ProgressCallback) -> Iterator[memoryview]:
    for block in blocks:
        report(len(block))
        yield block
