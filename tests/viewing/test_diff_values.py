"""What is measured of two tensors' values, by numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from hfshard.tensors.stored_tensor import bytes_view
from hfshard.viewing.diff_values import ValueMeasure
from hfshard.viewing.results import ValueDiff


def measured(a: torch.Tensor, b: torch.Tensor) -> ValueDiff:
    measure = ValueMeasure(a.dtype, b.dtype)
    measure.add(bytes_view(a), bytes_view(b))
    return measure.result()


def assert_close(found: ValueDiff, expected: ValueDiff) -> None:
    """The counts and the largest difference are exact."""
    assert dataclasses.replace(found, relative_norm=0.0, cosine=None) == dataclasses.replace(
        expected, relative_norm=0.0, cosine=None
    )
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
