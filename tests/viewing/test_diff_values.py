"""What is measured of two tensors' values, by numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from hfshard.tensors.stored_tensor import bytes_view
from hfshard.viewing.diff_values import ChunkAdder, ValueMeasure, can_add
from hfshard.viewing.results import ValueDiff


def measured(a: torch.Tensor, b: torch.Tensor) -> ValueDiff:
    measure = ValueMeasure(a.dtype, b.dtype)
    measure.add(bytes_view(a), bytes_view(b))
    return measure.result()


def assert_close(found: ValueDiff, expected: ValueDiff) -> None:
    """The counts and the largest difference are exact."""
    assert replace(found, relative_norm=0.0, cosine=None) == replace(expected, relative_norm=0.0, cosine=None)
    assert (found.relative_norm, found.cosine) == pytest.approx((expected.relative_norm, expected.cosine), rel=1e-14)


def test_three_of_four_elements_changed() -> None:
    found = measured(torch.tensor([3.0, 4.0, 0.0, 0.0]), torch.tensor([0.0, 4.0, 3.0, 4.0]))
    expected = ValueDiff(4, 3, 4.0, math.sqrt(34) / 5, 16 / (5 * math.sqrt(41)), 0, 0, 0, 0)
    assert_close(found, expected)
    assert found.norms == pytest.approx((5.0, math.sqrt(34)), rel=1e-15)


def test_nan_and_inf_are_counted_and_left_out() -> None:
    nan, inf = math.nan, math.inf
    a = torch.tensor([nan, nan, inf, inf, 1.0, 2.0], dtype=torch.bfloat16)
    b = torch.tensor([nan, 5.0, inf, -inf, 1.0, 4.0], dtype=torch.bfloat16)
    expected = ValueDiff(6, 3, 2.0, 2 / math.sqrt(5), 9 / math.sqrt(5 * 17), 2, 1, 2, 2)
    assert_close(measured(a, b), expected)


def test_squares_may_leave_the_range_of_float64() -> None:
    huge = measured(torch.tensor([3e200, 4e200], dtype=torch.float64), torch.tensor([3e200, 0.0], dtype=torch.float64))
    assert (huge.max_abs, huge.relative_norm, huge.cosine) == pytest.approx((4e200, 0.8, 0.6), rel=1e-15)
    assert huge.norms == pytest.approx((5e200, 4e200), rel=1e-15)
    tiny = measured(torch.tensor([3e-300], dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
    assert (tiny.max_abs, tiny.relative_norm, tiny.cosine) == (3e-300, 1.0, None)
    opposite = measured(torch.tensor([1.5e308], dtype=torch.float64), torch.tensor([-1.5e308], dtype=torch.float64))
    assert (opposite.max_abs, opposite.relative_norm, opposite.cosine) == (math.inf, 2.0, -1.0)


def test_zeros_have_no_angle() -> None:
    tiny, huge = (torch.full((3,), value, dtype=torch.float64) for value in (5e-324, 1e300))
    assert measured(tiny, huge).relative_norm == 1.7976931348623157e308  # infinity is for zeros
    assert measured(torch.zeros(3), torch.ones(3)) == ValueDiff(3, 3, 1.0, math.inf, None, 0, 0, 0, 0)
    assert measured(torch.zeros(3), -torch.zeros(3)) == ValueDiff(3, 0, 0.0, 0.0, None, 0, 0, 0, 0)


def test_large_integers_are_told_apart() -> None:
    a = torch.tensor([2**60, 2**60, -1])
    assert measured(a, torch.tensor([2**60 + 1, 2**60, -1])).changed == 1
    assert measured(a, torch.tensor([2**60, 2**60, 2**64 - 1], dtype=torch.uint64)).changed == 1


@pytest.mark.parametrize(
    ("dtypes", "a", "b", "max_abs"),
    [
        ((torch.int64, torch.int64), 2**53, 2**53 + 1, 1.0),
        ((torch.int64, torch.int64), 2**63 - 1, -(2**63) + 2, 2.0**64),
        ((torch.uint64, torch.uint64), 2**64 - 1, 2**64 - 4, 3.0),
        ((torch.uint64, torch.int64), 2**63 + 1, 2**63 - 2, 3.0),
        ((torch.uint64, torch.int64), 2**64 - 1, -(2**63), 1.5 * 2.0**64),
    ],
)
def test_differences_of_large_integers_are_exact(
    dtypes: tuple[torch.dtype, torch.dtype], a: int, b: int, max_abs: float
) -> None:
    found = measured(torch.tensor([a, 7], dtype=dtypes[0]), torch.tensor([b, 7], dtype=dtypes[1]))
    assert (found.changed, found.max_abs) == (1, max_abs)
    assert found.relative_norm == pytest.approx(max_abs / a, rel=1e-14)


def test_complex_numbers_have_moduli() -> None:
    found = measured(torch.tensor([3 + 4j, 1 + 0j]), torch.tensor([0 + 0j, 1 + 0j]))
    assert_close(found, ValueDiff(2, 1, 5.0, 5 / math.sqrt(26), 1 / math.sqrt(26), 0, 0, 0, 0))


def test_many_chunks_add_up() -> None:
    a = torch.ones(100_000)
    b = a.clone()
    b[::10] = 3.0
    expected = ValueDiff(100_000, 10_000, 2.0, math.sqrt(0.4), 1.2 / math.sqrt(1.8), 0, 0, 0, 0)
    assert_close(measured(a, b), expected)


@pytest.mark.parametrize("scale", [1.0, 1e-90, 1e-110, 1e90, 1e110])
def test_numbers_of_float64_of_any_size(scale: float) -> None:
    a = torch.tensor([3.0, 4.0, 0.0, 0.0], dtype=torch.float64) * scale
    b = torch.tensor([3.0, 0.0, -0.0, 3e-200], dtype=torch.float64) * scale
    assert_close(measured(a, b), ValueDiff(4, 2, 4.0 * scale, 0.8, 0.6, 0, 0, 0, 0))


def test_the_least_difference_of_float64_is_one() -> None:
    a = torch.ones(4, dtype=torch.float64)
    b = a.clone()
    b[1] += 2**-52
    found = measured(a, b)
    assert (found.changed, found.max_abs, found.relative_norm) == (1, 2**-52, 2**-53)
    least = torch.tensor([5e-324], dtype=torch.float64)
    assert measured(-least, least) == ValueDiff(1, 1, 1e-323, 2.0, -1.0, 0, 0, 0, 0)


# Long tensors of every dtype are measured as float64 would measure them, whatever their length and place.


SHORT = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.int16, torch.bool)
LONG = (torch.float32, torch.float64, torch.int32)
EDGES = (1, 1023, 1024, 300_001)
"""Elements: below, at and above a row, and more than a chunk, an odd number."""


def numbers(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def as_dtype(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        return values.to(dtype)
    return values > 0 if dtype is torch.bool else (values * 20).to(dtype)


def in_float64(a: torch.Tensor, b: torch.Tensor) -> ValueDiff:
    """All at once, of finite numbers."""
    a, b = a.double(), b.double()
    difference = b - a
    cosine = float(a @ b / (a.norm() * b.norm()))
    relative = float(difference.norm() / a.norm())
    changed = int(difference.count_nonzero())
    return ValueDiff(len(a), changed, float(difference.abs().max()), relative, cosine, 0, 0, 0, 0)


def assert_near(found: ValueDiff, expected: ValueDiff, digits: float) -> None:
    assert replace(found, max_abs=0.0, relative_norm=0.0, cosine=None) == replace(
        expected, max_abs=0.0, relative_norm=0.0, cosine=None
    )
    assert found.max_abs == pytest.approx(expected.max_abs, rel=1e-7)
    assert found.relative_norm == pytest.approx(expected.relative_norm, rel=digits)
    assert found.cosine == pytest.approx(expected.cosine, rel=digits)


@pytest.mark.parametrize("count", EDGES)
@pytest.mark.parametrize("dtype", SHORT + LONG, ids=str)
def test_long_tensors_are_measured_as_in_float64(dtype: torch.dtype, count: int) -> None:
    assert can_add(dtype, dtype)
    a = as_dtype(numbers(count, 1) + 2, dtype)
    b = as_dtype(numbers(count, 1) + 2 + 0.1 * numbers(count, 2), dtype)
    assert_near(measured(a, b), in_float64(a, b), 1e-6 if dtype in SHORT else 1e-12)


@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float16), (torch.bfloat16, torch.float32), (torch.float8_e5m2, torch.bfloat16)]
)
def test_two_dtypes_are_compared_in_their_order(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    a, b = numbers(300_000, 3).to(dtypes[0]), (numbers(300_000, 3) * 1.01).to(dtypes[1])
    assert_near(measured(a, b), in_float64(a, b), 1e-6)


def test_one_element_that_changed_a_little_is_found() -> None:
    a = numbers(400_000, 4).bfloat16()
    b = a.clone()
    b[399_999] += 0.25
    expected = in_float64(a, b)
    assert (expected.changed, expected.max_abs) == (1, 0.25)
    assert_near(measured(a, b), expected, 1e-6)


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_tensors_may_begin_at_any_byte(offset: int) -> None:
    a, b = numbers(2048, 5).bfloat16(), numbers(2048, 6).bfloat16()
    moved = bytearray(offset) + bytearray(bytes_view(a))
    measure = ValueMeasure(a.dtype, b.dtype)
    measure.add(memoryview(moved)[offset:], bytes_view(b))
    assert_near(measure.result(), in_float64(a, b), 1e-6)


@pytest.mark.parametrize("factor", [1e-30, 1e30])
def test_squares_may_leave_the_range_of_float32(factor: float) -> None:
    a, b = (numbers(5000, seed).mul(factor).bfloat16() for seed in (7, 8))
    assert ChunkAdder(torch.bfloat16, torch.bfloat16).add(a, b) is None
    assert_near(measured(a, b), in_float64(a, b), 1e-12)


def test_a_difference_too_small_for_float32_is_measured() -> None:
    a = torch.ones(5000, dtype=torch.bfloat16)
    a[0] = 0
    b = a.clone()
    b[0] = 2.0**-60
    expected = ValueDiff(5000, 1, 2.0**-60, 2.0**-60 / math.sqrt(4999), 1.0, 0, 0, 0, 0)
    assert_near(measured(a, b), expected, 1e-12)


def test_tensors_at_right_angles_and_of_other_lengths() -> None:
    a, b = torch.zeros(4096, dtype=torch.bfloat16), torch.zeros(4096, dtype=torch.bfloat16)
    a[:2048], b[2048:] = 1.0, 1024.0
    assert_near(measured(a, b), ValueDiff(4096, 4096, 1024.0, math.sqrt(1 + 1024**2), 0.0, 0, 0, 0, 0), 1e-6)


def test_one_nan_among_many_chunks_is_left_out() -> None:
    a = numbers(600_000, 9).bfloat16()
    b = (a.float() * 1.5).bfloat16()
    kept = torch.ones(600_000, dtype=torch.bool)
    a[300_000], b[5], b[599_999] = math.nan, math.inf, math.nan
    kept[[300_000, 5, 599_999]] = False
    among = in_float64(a[kept], b[kept])
    expected = replace(among, elements=600_000, changed=among.changed + 3, nan_a=1, nan_b=1, inf_b=1)
    assert_near(measured(a, b), expected, 1e-6)


def test_zeros_of_either_sign_are_equal() -> None:
    a = torch.zeros(3000, dtype=torch.bfloat16)
    assert measured(a, -a) == ValueDiff(3000, 0, 0.0, 0.0, None, 0, 0, 0, 0)
    a[7] = 3.0
    b = a.clone()
    b[8] = -0.0
    assert measured(a, b) == ValueDiff(3000, 0, 0.0, 0.0, 1.0, 0, 0, 0, 0)
