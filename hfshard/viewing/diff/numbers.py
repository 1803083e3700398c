"""Blocks of bytes as numbers: which dtypes are numbers, and which numbers are others rounded."""

from __future__ import annotations

from typing import Final

import torch

from hfshard.tensors.stored_tensor import PLAIN_DTYPES

_NUMBERS: Final = PLAIN_DTYPES | {torch.complex128, torch.complex32}
"""All but F4, which torch has no arithmetic for."""


def is_number(dtype: torch.dtype | None) -> bool:
    """Whether tensors of this dtype can be read as numbers."""
    return dtype in _NUMBERS


def numbers_in(block: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """Look at the bytes of a tensor as numbers, in one dimension; complex halves as complex floats.

    Args:
        block: A multiple of an element.
        dtype: One that `is_number` accepts. A bool is true unless it is zero, and comes as an integer: 0 or 1.
    """
    raw = torch.frombuffer(block, dtype=torch.uint8)
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()  # a file may have a tensor at any byte
    if dtype is torch.bool:
        return raw.ne(0).view(torch.uint8)
    if dtype is torch.complex32:  # torch warns of each tensor of this dtype
        return torch.view_as_complex(raw.view(torch.float16).float().view(-1, 2))
    return raw.view(dtype)


class RoundingCheck:
    """Finds out whether the numbers of one tensor are those of another one, rounded to its dtype.

    To a floating or complex dtype, numbers are rounded as torch's `.to` does it, and equal then; two NaN are equal.
    Integers and bools are not rounded: they must be the same numbers, and so must be those of floats that were cast.
    """

    def __init__(self, dtype_a: torch.dtype, dtype_b: torch.dtype) -> None:
        """Begin with nothing compared.

        Args:
            dtype_a, dtype_b: Two different ones that `is_number` accepts.
        """
        self.dtype_a, self.dtype_b = dtype_a, dtype_b
        self._b_is_rounded = _rounds(dtype_a, dtype_b)
        self._a_is_rounded = _rounds(dtype_b, dtype_a)
        self._are_equal = not (has_fraction(dtype_a) or has_fraction(dtype_b))

    @property
    def holds(self) -> bool:
        """Whether all numbers so far are those of the other one."""
        return self._b_is_rounded or self._a_is_rounded or self._are_equal

    def add(self, block_a: memoryview, block_b: memoryview) -> None:
        """Take in the bytes of the same elements of both."""
        a, b = numbers_in(block_a, self.dtype_a), numbers_in(block_b, self.dtype_b)
        if self._are_equal:
            self._are_equal = not bool(differing_integers(a, b).any())
        if self._b_is_rounded:
            self._b_is_rounded = _are_equal_numbers(_rounded(a, self.dtype_b), b)
        if self._a_is_rounded:
            self._a_is_rounded = _are_equal_numbers(a, _rounded(b, self.dtype_a))


def differing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where numbers of one dtype, or of float64 or complex128, are not equal; two NaN are."""
    differs = a.ne(b)
    if has_fraction(a.dtype):
        differs &= ~(a.isnan() & b.isnan())
    return differs


def differing_integers(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where integers of any two dtypes are not equal."""
    bits_a, bits_b = _int64_bits(a), _int64_bits(b)
    differs = bits_a.ne(bits_b)
    if (a.dtype is torch.uint64) != (b.dtype is torch.uint64):
        differs |= bits_a.lt(0)  # one is negative, the other too large for an int64
    return differs


def integer_difference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """b - a of integers of any two dtypes, as float64: right to 53 bits, and zero only where they are equal."""
    wide = b.to(torch.float64) - a.to(torch.float64)
    exact = (_int64_bits(b) - _int64_bits(a)).to(torch.float64)  # wraps around where it is too large for an int64
    return torch.where(wide.abs() < 2.0**62, exact, wide)


def has_fraction(dtype: torch.dtype) -> bool:
    """Whether it is floating or complex."""
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
