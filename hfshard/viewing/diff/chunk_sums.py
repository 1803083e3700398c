"""Adds up how two chunks of numbers differ, in a few long passes, so that threads seldom wait for each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

_Floats: TypeAlias = "NDArray[np.floating[Any]]"

_SHORT: Final = frozenset(
    (
        torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.float16, torch.bfloat16,
        torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
    )
)  # fmt: skip
_LONG: Final = frozenset((torch.uint32, torch.int32, torch.float32, torch.float64))

_CHUNK_BYTES: Final = 1024 * 1024
"""Of the floats of one side. Two threads wait for each other at each pass: with a quarter of this, they took twice as
long; and with twice of it, memory is further away than the processor's caches."""

_ROW: Final = 1024
"""Products that are added in the chunk's own dtype, in several sums; the sums of rows are added in float64. A library
of linear algebra starts no threads for rows of this length."""

_PIECE: Final = 32_767
"""Elements that torch converts at once: for more, it starts threads of its own."""

_UPPER_HALF: Final = np.uint32(0xFFFF0000)


@dataclass(frozen=True, slots=True)
class _Precision:
    """A dtype that is computed in, and between which sums of squares lost nothing that counts.

    Below, some of the squares may have been too small for the dtype, above, one was nearly too large.
    """

    dtype: Any
    least: float
    most: float
    like_lengths: float
    """Where squared lengths differ by less, the product of two chunks is as good computed from those and that of their
    difference, which takes no pass."""


_FLOAT32: Final = _Precision(np.float32, 1e-25, 1e37, 4.0)
_FLOAT64: Final = _Precision(np.float64, 1e-200, 1e200, 1e6)


@dataclass(frozen=True, slots=True)
class ChunkSums:
    """What was added up of a and b."""

    square_a: float
    """Of the 2-norm, as the other two squares."""
    square_b: float
    square_d: float
    """Of b - a."""
    product: float
    """The sum of a * b."""
    max_abs: float
    """The largest |b - a|."""
    changed: int
    """Elements that are not equal."""


class ChunkAdder:
    """Adds up chunks of two dtypes, with room of its own: for one thread.

    Two short dtypes, of 8 or 16 bits, are computed in float32, which has their numbers exactly: the largest difference
    is right to 7 digits, sums are to 6. Others are computed in float64.
    """

    def __init__(self, dtype_a: torch.dtype, dtype_b: torch.dtype) -> None:
        """Allocate nothing yet.

        Args:
            dtype_a, dtype_b: Two for which `can_add` is true.
        """
        self._precision = _FLOAT32 if {dtype_a, dtype_b} <= _SHORT else _FLOAT64
        self._are_bfloat16 = dtype_a is torch.bfloat16 and dtype_b is torch.bfloat16
        self._tables = _table(dtype_a, self._precision), _table(dtype_b, self._precision)
        self._room: NDArray[Any] = np.empty((3, 0), self._precision.dtype)
        self._are_unequal = np.empty(0, bool)
        self.elements = _CHUNK_BYTES // self._room.itemsize
        """How many elements a chunk may have."""

    def add(self, a: torch.Tensor, b: torch.Tensor) -> ChunkSums | None:
        """Add up two chunks.

        Args:
            a, b: In one dimension, at most `elements`, as `numbers_in` gives them.

        Returns:
            None where a number is NaN or infinite, or a square may not be in the range of the dtype.
        """
        with np.errstate(all="ignore"):
            return self._add(self._widened(a, b))

    def _add(self, floats: _Floats) -> ChunkSums | None:
        a, b, difference = floats
        np.subtract(b, a, out=difference)
        largest = max(-float(difference.min()), float(difference.max()))
        squares = _sums_of_products(floats, floats)
        if not all(self._has_square(square, one) for square, one in zip(squares, floats, strict=True)):
            return None
        square_a, square_b, square_d = squares
        if not largest:
            return ChunkSums(square_a, square_b, 0.0, square_a, 0.0, 0)
        if max(square_a, square_b) < self._precision.like_lengths * min(square_a, square_b):
            product = (square_a + square_b - square_d) / 2
        else:
            product = _sums_of_products(floats[:1], floats[1:2])[0]
        are_unequal = np.not_equal(difference, 0, out=self._are_unequal[: len(difference)])
        return ChunkSums(square_a, square_b, square_d, product, largest, int(np.count_nonzero(are_unequal)))

    def _has_square(self, square: float, values: _Floats) -> bool:
        if not square:
            return not values.any()
        return self._precision.least <= square < self._precision.most  # not of NaN

    def _widened(self, a: torch.Tensor, b: torch.Tensor) -> _Floats:
        """The numbers of both as floats, in one order; and room for as many, of shape (3, count)."""
        count = len(a)
        if count > self._room.shape[1]:
            self._room = np.empty((3, count), self._precision.dtype)
            self._are_unequal = np.empty(count, bool)
        floats = self._room[:, :count]
        can_part = self._are_bfloat16 and not (count % 2 or a.data_ptr() % 4 or b.data_ptr() % 4)
        for values, wide, table in zip((a, b), floats, self._tables, strict=False):
            if can_part:
                _part_halves(values, wide)
            else:
                _widen(values, wide, table)
        return floats


def can_add(dtype_a: torch.dtype, dtype_b: torch.dtype) -> bool:
    """Whether float64 has all numbers of these dtypes, and differences of them are zero only for equal ones."""
    return {dtype_a, dtype_b} <= _SHORT | _LONG


def _table(dtype: torch.dtype, precision: _Precision) -> _Floats | None:
    """Every number of a dtype of 8 bits."""
    if dtype.itemsize != 1:
        return None
    values = torch.arange(256, dtype=torch.uint8)
    if dtype is not torch.bool:  # it comes as an integer
        values = values.view(dtype)
    return values.to(torch.float64).numpy().astype(precision.dtype)


def _widen(values: torch.Tensor, wide: _Floats, table: _Floats | None) -> None:
    """Convert numbers to floats."""
    if table is not None:
        np.take(table, values.view(torch.uint8).numpy(), out=wide, mode="clip")
    elif values.dtype in (torch.float16, torch.bfloat16):  # numpy lacks the one, and is slow with the other
        target = torch.from_numpy(wide)
        for at in range(0, len(values), _PIECE):
            piece = values[at : at + _PIECE]
            target[at : at + _PIECE].copy_(piece.float() if values.dtype is torch.float16 else piece)
    else:
        np.copyto(wide, values.numpy())


def _part_halves(values: torch.Tensor, wide: _Floats) -> None:
    """Make float32 of an even number of bfloat16: first each second one, then the others.

    A bfloat16 is the upper half of a float32; so this takes half the time of converting them in their order.
    """
    pairs = values.view(torch.uint8).numpy().view(np.uint32)
    bits = wide.view(np.uint32)
    np.bitwise_and(pairs, _UPPER_HALF, out=bits[: len(pairs)])
    np.left_shift(pairs, 16, out=bits[len(pairs) :])


def _sums_of_products(a: _Floats, b: _Floats) -> list[float]:
    """Of each row of one with that of the other."""
    count, length = a.shape
    rows = length // _ROW
    whole = rows * _ROW
    of_rows = np.matmul(a[:, :whole].reshape(count, rows, 1, _ROW), b[:, :whole].reshape(count, rows, _ROW, 1))
    sums = of_rows.reshape(count, rows).sum(1, dtype=np.float64)
    if whole < length:
        sums += [np.dot(one, other) for one, other in zip(a[:, whole:], b[:, whole:], strict=True)]
    return sums.tolist()  # type: ignore[no-any-return]
