"""Finds out how two tensors differ: from their digests where both have one, else from their bytes, read once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from hfshard._util.progress import ProgressCallback
from hfshard.format.digests import tensor_digest
from hfshard.viewing.diff.measures import ValueMeasure
from hfshard.viewing.diff.numbers import RoundingCheck, is_number
from hfshard.viewing.diff.pairing import TensorPair
from hfshard.viewing.diff.report import DiffKind, ValueDiff
from hfshard.viewing.diff.sides import ComparedTensor


@dataclass(frozen=True, slots=True)
class Finding:
    """How two tensors differ."""

    kind: DiffKind
    values: ValueDiff | None = None
    read_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked of a comparison."""

    values: bool = False
    """Whether values that differ are measured."""
    trusts_digests: bool = True
    """False: what digests would tell is read."""


def known_finding(pair: TensorPair, asked: Asked) -> Finding | None:
    """How two tensors differ, if that can be told without reading; None where it can't."""
    kind = _known_kind(pair, asked)
    if kind is None or (kind != "same" and asked.values and _is_measurable(pair)):
        return None
    return Finding(kind)


def _known_kind(pair: TensorPair, asked: Asked) -> DiffKind | None:
    a, b = pair.a, pair.b
    if a.facts.dtype != b.facts.dtype:
        if a.facts.shape != b.facts.shape or not (is_number(a.torch_dtype) and is_number(b.torch_dtype)):
            return "changed"
        return None if a.facts.nbytes else "cast"
    if a.facts.nbytes != b.facts.nbytes:
        return "changed"
    has_digests = a.digest is not None and b.digest is not None
    if a.facts.nbytes == 0 or (
        asked.trusts_digests and (a.places & b.places or (has_digests and a.digest == b.digest))
    ):
        return _kind_of_equal(pair)
    return "changed" if has_digests and asked.trusts_digests else None


def _kind_of_equal(pair: TensorPair) -> DiffKind:
    return "same" if pair.a.facts.shape == pair.b.facts.shape else "reshaped"


def _is_measurable(pair: TensorPair) -> bool:
    """Whether the values of two tensors can be compared one by one."""
    has_numbers = is_number(pair.a.torch_dtype) and is_number(pair.b.torch_dtype)
    return has_numbers and prod(pair.a.facts.shape) == prod(pair.b.facts.shape)


def compare(pair: TensorPair, asked: Asked, report: ProgressCallback) -> Finding:
    """Find out how two tensors differ, where that must be read.

    Args:
        pair: Two for which `known_finding` has none.
        asked: What is wanted.
        report: Called with the bytes of each block; ends it early by raising.

    Raises:
        IntegrityError: What was read is not what its digest says.
    """
    known = _known_kind(pair, asked)
    measures = asked.values and _is_measurable(pair)
    has_one_dtype = pair.a.facts.dtype == pair.b.facts.dtype
    unread = [one for one in pair[:2] if one.digest is None]
    if asked.trusts_digests and has_one_dtype and not measures and len(unread) == 1:
        digests = [one.digest or digest_of(one, report) for one in pair[:2]]
        return Finding(
            _kind_of_equal(pair) if digests[0] == digests[1] else "changed", read_bytes=unread[0].facts.nbytes
        )
    checks = _Checks(pair, is_known=known is not None, measures=measures)
    read_bytes = 0
    for block_a, block_b in paired_blocks(pair, report):
        read_bytes += len(block_a) + len(block_b)
        checks.add(block_a, block_b)
        if not checks.holds and not measures and asked.trusts_digests:
            break
    kind = checks.kind(pair) if known is None else known
    values = checks.measure.result() if checks.measure is not None and kind != "same" else None
    return Finding(kind, values, read_bytes)


class _Checks:
    """What is found out about two tensors while their blocks come."""

    def __init__(self, pair: TensorPair, *, is_known: bool, measures: bool) -> None:
        dtype_a, dtype_b = pair.a.torch_dtype, pair.b.torch_dtype
        has_one_dtype = pair.a.facts.dtype == pair.b.facts.dtype
        self.are_equal = has_one_dtype and not is_known
        self.rounding = self.measure = None
        if dtype_a is not None and dtype_b is not None:
            self.rounding = RoundingCheck(dtype_a, dtype_b) if not (has_one_dtype or is_known) else None
            self.measure = ValueMeasure(dtype_a, dtype_b) if measures else None

    @property
    def holds(self) -> bool:
        """Whether they may be the same yet, but for their dtype or shape."""
        return self.are_equal or (self.rounding is not None and self.rounding.holds)

    def add(self, block_a: memoryview, block_b: memoryview) -> None:
        """Take in the bytes of the same elements of both."""
        if self.are_equal:
            raw_a, raw_b = (torch.frombuffer(block, dtype=torch.uint8) for block in (block_a, block_b))
            self.are_equal = torch.equal(raw_a, raw_b)
        if self.rounding is not None and self.rounding.holds:
            self.rounding.add(block_a, block_b)
        if self.measure is not None:
            self.measure.add(block_a, block_b)

    def kind(self, pair: TensorPair) -> DiffKind:
        """How they differ, when all blocks have come."""
        if self.rounding is not None and self.rounding.holds:
            return "cast"
        return _kind_of_equal(pair) if self.are_equal else "changed"


def digest_of(tensor: ComparedTensor, report: ProgressCallback) -> str:
    """Compute the digest of a tensor's bytes (arguments and errors as for `compare`)."""
    return tensor_digest(_reported(tensor.blocks(), report))


def paired_blocks(pair: TensorPair, report: ProgressCallback) -> Iterator[tuple[memoryview, memoryview]]:
    """Read two tensors at once.

    Args:
        pair: The two, with the same number of elements, or of bytes.
        report: As for `compare`.

    Yields:
        Blocks of the same elements; valid until the next ones.
    """
    unit_a = pair.a.torch_dtype.itemsize if pair.a.torch_dtype is not None else 1
    unit_b = pair.b.torch_dtype.itemsize if pair.b.torch_dtype is not None else 1
    blocks_a, blocks_b = pair.a.blocks(), pair.b.blocks()
    rest_a = rest_b = memoryview(b"")
    while True:
        if not rest_a:
            rest_a = next(blocks_a, rest_a)
        if not rest_b:
            rest_b = next(blocks_b, rest_b)
        count = min(len(rest_a) // unit_a, len(rest_b) // unit_b)
        if count == 0:
            return
        report(count * (unit_a + unit_b))
        yield rest_a[: count * unit_a], rest_b[: count * unit_b]
        rest_a, rest_b = rest_a[count * unit_a :], rest_b[count * unit_b :]


def _reported(blocks: Iterator[memoryview], report: ProgressCallback) -> Iterator[memoryview]:
    for block in blocks:
        report(len(block))
        yield block
