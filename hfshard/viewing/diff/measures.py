"""Measures by how much the values of two tensors differ, block by block, in bounded memory."""

from __future__ import annotations

import math
import sys
from typing import Final

import torch

from hfshard.viewing.diff.chunk_sums import ChunkAdder, can_add
from hfshard.viewing.diff.numbers import differing, differing_integers, has_fraction, integer_difference, numbers_in
from hfshard.viewing.diff.report import ValueDiff

_CHUNK: Final = 30_848
"""Elements that are measured at once where some are NaN or infinite, or hard to square: torch starts threads of its own
for 32,768."""


class ValueMeasure:
    """What is known of the values of two tensors, as far as they were read."""

    def __init__(self, dtype_a: torch.dtype, dtype_b: torch.dtype) -> None:
        """Begin with no element.

        Args:
            dtype_a, dtype_b: Those that `is_number` accepts.
        """
        self._dtypes = dtype_a, dtype_b
        self._wide = torch.complex128 if dtype_a.is_complex or dtype_b.is_complex else torch.float64
        self._adder = ChunkAdder(dtype_a, dtype_b) if can_add(dtype_a, dtype_b) else None
        self._squares = [_ScaledSum(), _ScaledSum(), _ScaledSum()]  # of a, b, and b - a
        self._product = _ScaledSum()
        self._elements = self._changed = 0
        self._max_abs = 0.0
        self._nan = [0, 0]
        self._inf = [0, 0]

    def add(self, block_a: memoryview, block_b: memoryview) -> None:
        """Take in the bytes of the same elements of both."""
        a, b = numbers_in(block_a, self._dtypes[0]), numbers_in(block_b, self._dtypes[1])
        self._elements += len(a)
        step = _CHUNK if self._adder is None else self._adder.elements
        for at in range(0, len(a), step):
            self._add_chunk(a[at : at + step], b[at : at + step])

    def result(self) -> ValueDiff:
        """What was measured."""
        squares_a, squares_b, squares_d = self._squares
        cosine = None
        if squares_a.value and squares_b.value:
            exponent = self._product.exponent - (squares_a.exponent + squares_b.exponent) // 2
            length = math.sqrt(squares_a.value) * math.sqrt(squares_b.value)
            cosine = max(-1.0, min(1.0, _scaled(self._product.value / length, exponent)))
        return ValueDiff(
            elements=self._elements,
            changed=self._changed,
            max_abs=self._max_abs,
            relative_norm=_relative_norm(squares_d, squares_a),
            cosine=cosine,
            nan_a=self._nan[0],
            nan_b=self._nan[1],
            inf_a=self._inf[0],
            inf_b=self._inf[1],
        )

    def _add_chunk(self, a: torch.Tensor, b: torch.Tensor) -> None:
        sums = None if self._adder is None else self._adder.add(a, b)
        if sums is None:
            for at in range(0, len(a), _CHUNK):
                self._add_any(a[at : at + _CHUNK], b[at : at + _CHUNK])
            return
        for total, square in zip(self._squares, (sums.square_a, sums.square_b, sums.square_d), strict=True):
            total.add(square)
        self._product.add(sums.product)
        self._max_abs = max(self._max_abs, sums.max_abs)
        self._changed += sums.changed

    def _add_any(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Take in numbers that may be NaN or infinite, or whose squares a float may not have."""
        wide_a, wide_b = a.to(self._wide), b.to(self._wide)
        are_integers = not (has_fraction(a.dtype) or has_fraction(b.dtype))
        changed = differing_integers(a, b) if are_integers else differing(wide_a, wide_b)
        self._changed += int(changed.count_nonzero())
        for side, wide in enumerate((wide_a, wide_b)):
            self._nan[side] += int(wide.isnan().count_nonzero())
            self._inf[side] += int(wide.isinf().count_nonzero())
        is_finite = wide_a.isfinite() & wide_b.isfinite()
        real_a, exponent_a = _shrunk(_reals(wide_a[is_finite]))
        real_b, exponent_b = _shrunk(_reals(wide_b[is_finite]))
        if not len(real_a):
            return
        self._squares[0].add(_square(real_a), 2 * exponent_a)
        self._squares[1].add(_square(real_b), 2 * exponent_b)
        self._product.add(float((real_a * real_b).sum()), exponent_a + exponent_b)
        exponent = max(exponent_a, exponent_b)
        if are_integers:
            difference, exponent = integer_difference(a, b), 0
        else:
            difference = _times(real_b, exponent_b - exponent) - _times(real_a, exponent_a - exponent)
        difference, more = _shrunk(difference)
        self._squares[2].add(_square(difference), 2 * (exponent + more))
        lengths = difference.view(-1, 2).norm(dim=1) if self._wide.is_complex else difference.abs()
        self._max_abs = max(self._max_abs, _scaled(float(lengths.max()), exponent + more))


class _ScaledSum:
    """A sum of numbers that float64 may not have: value * 2**exponent."""

    def __init__(self) -> None:
        self.value = 0.0
        self.exponent = 0

    def add(self, value: float, exponent: int = 0) -> None:
        """Add value * 2**exponent."""
        if not value:
            return
        if not self.value or exponent > self.exponent:
            self.value = math.ldexp(self.value, self.exponent - exponent)
            self.exponent = exponent
        self.value += math.ldexp(value, exponent - self.exponent)


def _relative_norm(difference: _ScaledSum, of: _ScaledSum) -> float:
    if not difference.value:
        return 0.0
    if not of.value:
        return math.inf
    norm = _scaled(math.sqrt(difference.value / of.value), (difference.exponent - of.exponent) // 2)
    return min(norm, sys.float_info.max)  # infinity is for a of zero


def _square(values: torch.Tensor) -> float:
    """Of the 2-norm; not by `torch.dot`, which waits for threads of its own however short the tensors are."""
    norm = float(torch.linalg.vector_norm(values))
    return norm * norm  # where `**` raises, this is infinite


def _reals(values: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(values).flatten() if values.is_complex() else values


def _shrunk(values: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Numbers whose largest is near 1, and the power of two by which they were divided."""
    largest = float(values.abs().max()) if len(values) else 0.0
    exponent = math.frexp(largest)[1]
    return _times(values, -exponent), exponent


def _times(values: torch.Tensor, exponent: int) -> torch.Tensor:
    """Multiply by a power of two, in two steps: it may be one that float64 does not have."""
    half = exponent // 2
    return values * math.ldexp(1.0, half) * math.ldexp(1.0, exponent - half)


def _scaled(value: float, exponent: int) -> float:
    try:
        return math.ldexp(value, exponent)
    except OverflowError:
        return math.inf
