"""Measure how much the values of two tensors differ, block by block, in bounded memory."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from hfshard.tensors.stored_tensor import PLAIN_DTYPES
from hfshard.viewing.results import ValueDiff

_CHUNK: Final = 30_848
"""Elements that are measured at once if some are NaN or infinite, or hard to square: torch starts its own threads at
32,768."""


class ValueMeasure:
    """Running measurement of the values of two tensors."""

    def __init__(self, dtype_a: torch.dtype, dtype_b: torch.dtype) -> None:
        """Begin with no elements.

        Args:
            dtype_a, dtype_b: Dtypes that `is_numeric_dtype` accepts.
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
        """Add the bytes of the same elements of both."""
        a, b = numbers_in(block_a, self._dtypes[0]), numbers_in(block_b, self._dtypes[1])
        self._elements += len(a)
        step = _CHUNK if self._adder is None else self._adder.elements
        for at in range(0, len(a), step):
            self._add_chunk(a[at : at + step], b[at : at + step])

    def result(self) -> ValueDiff:
        """Return the measurement so far."""
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
            norms=(squares_a.root(), squares_d.root()),
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
        """Add numbers that may be NaN or infinite, or whose squares may be outside the range of a float."""
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
    """A sum of numbers that may be outside the range of float64: value * 2**exponent."""

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

    def root(self) -> float:
        """Return the square root of a sum of squares, whose exponent is even."""
        return _scaled(math.sqrt(self.value), self.exponent // 2)


def _relative_norm(difference: _ScaledSum, of: _ScaledSum) -> float:
    if not difference.value:
        return 0.0
    if not of.value:
        return math.inf
    norm = _scaled(math.sqrt(difference.value / of.value), (difference.exponent - of.exponent) // 2)
    return min(norm, sys.float_info.max)  # infinity means that a is zero


def _square(values: torch.Tensor) -> float:
    """Compute the squared 2-norm without `torch.dot`, which waits for its own threads even for short tensors."""
    norm = float(torch.linalg.vector_norm(values))
    return norm * norm  # `**` would raise on overflow; this gives infinity


def _reals(values: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(values).flatten() if values.is_complex() else values


def _shrunk(values: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Scale numbers so that the largest is near 1, and return the exponent of two that they were divided by."""
    largest = float(values.abs().max()) if len(values) else 0.0
    exponent = math.frexp(largest)[1]
    return _times(values, -exponent), exponent


def _times(values: torch.Tensor, exponent: int) -> torch.Tensor:
    """Multiply by a power of two in two steps, since float64 may not represent it."""
    half = exponent // 2
    return values * math.ldexp(1.0, half) * math.ldexp(1.0, exponent - half)


def _scaled(value: float, exponent: int) -> float:
    try:
        return math.ldexp(value, exponent)
    except OverflowError:
        return math.inf


# Blocks of bytes as numbers: numeric dtypes, and checks whether numbers are others rounded.


_NUMBERS: Final = PLAIN_DTYPES | {torch.complex128, torch.complex32}
"""All dtypes but F4, for which torch has no arithmetic."""


def is_numeric_dtype(dtype: torch.dtype | None) -> bool:
    """Return whether tensors of this dtype can be read as numbers."""
    return dtype in _NUMBERS


def numbers_in(block: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """View a tensor's bytes as numbers in one dimension; complex halves are converted to complex floats.

    Args:
        block: Bytes of any number of complete elements.
        dtype: A dtype that `is_numeric_dtype` accepts. A bool is true unless it is zero, and is returned as 0 or 1.
    """
    raw = torch.frombuffer(block, dtype=torch.uint8)
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()  # a tensor may start at any byte of a file
    if dtype is torch.bool:
        return raw.ne(0).view(torch.uint8)
    if dtype is torch.complex32:  # torch warns about each tensor of this dtype
        return torch.view_as_complex(raw.view(torch.float16).float().view(-1, 2))
    return raw.view(dtype)


class RoundingCheck:
    """Check of whether one tensor's numbers are another's, rounded to its dtype.

    For a floating-point or complex dtype, numbers are rounded as by torch's `.to` and must then be equal; two NaN are
    equal. Nothing is rounded to an integer or bool dtype: numbers cast to one must be the same, also those of floats.
    """

    def __init__(self, dtype_a: torch.dtype, dtype_b: torch.dtype) -> None:
        """Begin with nothing compared.

        Args:
            dtype_a, dtype_b: Two different dtypes that `is_numeric_dtype` accepts.
        """
        self.dtype_a, self.dtype_b = dtype_a, dtype_b
        self._b_is_rounded = _rounds(dtype_a, dtype_b)
        self._a_is_rounded = _rounds(dtype_b, dtype_a)
        self._are_equal = not (has_fraction(dtype_a) or has_fraction(dtype_b))

    @property
    def holds(self) -> bool:
        """True if all numbers so far are those of the other tensor."""
        return self._b_is_rounded or self._a_is_rounded or self._are_equal

    def add(self, block_a: memoryview, block_b: memoryview) -> None:
        """Add the bytes of the same elements of both."""
        a, b = numbers_in(block_a, self.dtype_a), numbers_in(block_b, self.dtype_b)
        if self._are_equal:
            self._are_equal = not bool(differing_integers(a, b).any())
        if self._b_is_rounded:
            self._b_is_rounded = _are_equal_numbers(_rounded(a, self.dtype_b), b)
        if self._a_is_rounded:
            self._a_is_rounded = _are_equal_numbers(a, _rounded(b, self.dtype_a))


def differing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a mask of unequal numbers of one dtype, or of float64 or complex128; two NaN are equal."""
    differs = a.ne(b)
    if has_fraction(a.dtype):
        differs &= ~(a.isnan() & b.isnan())
    return differs


def differing_integers(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a mask of unequal integers of any two dtypes."""
    bits_a, bits_b = _int64_bits(a), _int64_bits(b)
    differs = bits_a.ne(bits_b)
    if (a.dtype is torch.uint64) != (b.dtype is torch.uint64):
        differs |= bits_a.lt(0)  # one is negative, the other too large for an int64
    return differs


def integer_difference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute b - a of integers of any two dtypes as float64: correct to 53 bits, and zero only if they are equal."""
    wide = b.to(torch.float64) - a.to(torch.float64)
    exact = (_int64_bits(b) - _int64_bits(a)).to(torch.float64)  # wraps around if it is too large for an int64
    return torch.where(wide.abs() < 2.0**62, exact, wide)


def has_fraction(dtype: torch.dtype) -> bool:
    """Return whether a dtype is floating-point or complex."""
    return dtype.is_floating_point or dtype.is_complex


def _int64_bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int64) if values.dtype is torch.uint64 else values.to(torch.int64)


def _rounds(source: torch.dtype, target: torch.dtype) -> bool:
    return target.is_complex or (target.is_floating_point and not source.is_complex)


def _rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.complex32:
        pairs = torch.view_as_real(values.to(torch.complex128))
        return torch.view_as_complex(pairs.to(torch.float16).float())
    return values.to(dtype)


def _are_equal_numbers(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype.itemsize == 1:  # not all 8-bit floats can be compared
        a, b = a.float(), b.float()
    return torch.equal(a, b) or not bool(differing(a, b).any())


# Sums over two chunks of numbers, in a few long passes, so that threads seldom wait for each other.


_Floats: TypeAlias = "NDArray[np.floating[Any]]"

_SHORT: Final = frozenset(
    (
        torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.float16, torch.bfloat16,
        torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
    )
)  # fmt: skip
_LONG: Final = frozenset((torch.uint32, torch.int32, torch.float32, torch.float64))

_CHUNK_BYTES: Final = 1024 * 1024
"""Bytes of the floats of one side. Two threads wait for each other at each pass: a quarter of this took twice as long,
and twice as much does not fit the processor's caches."""

_ROW: Final = 1024
"""Products that are added in the chunk's own dtype, in several sums; the rows' sums are added in float64. A linear
algebra library starts no threads for rows of this length."""

_PIECE: Final = 32_767
"""Elements that torch converts at once: for more, it starts its own threads."""

_UPPER_HALF: Final = np.uint32(0xFFFF0000)


@dataclass(frozen=True, slots=True)
class _Precision:
    """A dtype for computing, and the range in which its sums of squares are accurate.

    Below the range, some squares may have been too small for the dtype; above it, one was nearly too large.
    """

    dtype: Any
    least: float
    most: float
    like_lengths: float
    """If squared lengths differ by a smaller factor, the product of two chunks is computed equally well from them and
    the squared length of the difference, which takes no pass."""


_FLOAT32: Final = _Precision(np.float32, 1e-25, 1e37, 4.0)
_FLOAT64: Final = _Precision(np.float64, 1e-200, 1e200, 1e6)


@dataclass(frozen=True, slots=True)
class ChunkSums:
    """Sums over a chunk of a and b."""

    square_a: float
    """The squared 2-norm of a."""
    square_b: float
    square_d: float
    """The squared 2-norm of b - a."""
    product: float
    """The sum of a * b."""
    max_abs: float
    """The largest |b - a|."""
    changed: int
    """Elements that are not equal."""


class ChunkAdder:
    """Adder of chunks of two dtypes, with its own buffers: for one thread.

    Two short dtypes, of 8 or 16 bits, are computed in float32, which represents their numbers exactly: the largest
    difference is correct to 7 digits, and sums to 6. Others are computed in float64.
    """

    def __init__(self, dtype_a: torch.dtype, dtype_b: torch.dtype) -> None:
        """Allocate nothing yet.

        Args:
            dtype_a, dtype_b: Dtypes for which `can_add` is true.
        """
        self._precision = _FLOAT32 if {dtype_a, dtype_b} <= _SHORT else _FLOAT64
        self._are_bfloat16 = dtype_a is torch.bfloat16 and dtype_b is torch.bfloat16
        self._tables = _table(dtype_a, self._precision), _table(dtype_b, self._precision)
        self._room: NDArray[Any] = np.empty((3, 0), self._precision.dtype)
        self._are_unequal = np.empty(0, bool)
        self.elements = _CHUNK_BYTES // self._room.itemsize
        """The most elements that a chunk may have."""

    def add(self, a: torch.Tensor, b: torch.Tensor) -> ChunkSums | None:
        """Add up two chunks.

        Args:
            a, b: At most `elements` numbers in one dimension, as returned by `numbers_in`.

        Returns:
            The sums, or None if a number is NaN or infinite, or a square may be outside the dtype's range.
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
        return self._precision.least <= square < self._precision.most  # false for NaN

    def _widened(self, a: torch.Tensor, b: torch.Tensor) -> _Floats:
        """Convert the numbers of both to floats in the same order, with a third row as a buffer: shape (3, count)."""
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
    """Return whether float64 represents all numbers of these dtypes, and differences are zero only for equal ones."""
    return {dtype_a, dtype_b} <= _SHORT | _LONG


def _table(dtype: torch.dtype, precision: _Precision) -> _Floats | None:
    """Return every number of an 8-bit dtype; None for other dtypes."""
    if dtype.itemsize != 1:
        return None
    values = torch.arange(256, dtype=torch.uint8)
    if dtype is not torch.bool:  # a bool is passed as an integer
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
    """Convert an even number of bfloat16 to float32: first every second one, then the others.

    A bfloat16 is the upper half of a float32, so this takes half the time of converting them in order.
    """
    pairs = values.view(torch.uint8).numpy().view(np.uint32)
    bits = wide.view(np.uint32)
    np.bitwise_and(pairs, _UPPER_HALF, out=bits[: len(pairs)])
    np.left_shift(pairs, 16, out=bits[len(pairs) :])


def _sums_of_products(a: _Floats, b: _Floats) -> list[float]:
    """Compute the sum of products of each row of a with the same row of b."""
    count, length = a.shape
    rows = length // _ROW
    whole = rows * _ROW
    of_rows = np.matmul(a[:, :whole].reshape(count, rows, 1, _ROW), b[:, :whole].reshape(count, rows, _ROW, 1))
    sums = of_rows.reshape(count, rows).sum(1, dtype=np.float64)
    if whole < length:
        sums += [np.dot(one, other) for one, other in zip(a[:, whole:], b[:, whole:], strict=True)]
    return sums.tolist()  # type: ignore[no-any-return]
