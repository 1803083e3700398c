"""Histograms of numbers that come in blocks: as of all at once."""

from __future__ import annotations

import math

import pytest
import torch

from hfshard.viewing.tensor_values import RunningValues, ValueSummary


def summary_of(*blocks: torch.Tensor) -> ValueSummary:
    running = RunningValues()
    for block in blocks:
        running.add(block)
    return running.summary()


def test_a_few_numbers_by_hand() -> None:
    found = summary_of(torch.tensor([0.0, 1.0]), torch.tensor([3.0, math.nan, -math.inf, math.inf, 0.0]))

    assert (found.elements, found.nan, found.inf) == (7, 1, 2)
    assert (found.minimum, found.maximum, found.mean, found.std) == (0.0, 3.0, 1.0, math.sqrt(1.5))
    assert len(found.bins) == 64
    assert found.low == 0.0
    assert 3.0 < found.high < 3.05
    width = (found.high - found.low) / 64
    expected = [0] * 64
    expected[0] = 2
    expected[int(1 / width)] = 1
    expected[63] = 1
    assert list(found.bins) == expected


@pytest.mark.parametrize("seed", range(4))
def test_blocks_give_the_histogram_of_all_at_once(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(20_000, generator=generator, dtype=torch.float64) * 10.0 ** (seed - 2)
    numbers[7_000] *= 1000 if seed % 2 else 1  # what comes later is much larger

    in_blocks = summary_of(*numbers.split(3_000))
    at_once = summary_of(numbers)

    assert in_blocks.bins == at_once.bins
    assert (in_blocks.low, in_blocks.high) == (at_once.low, at_once.high)
    inner = torch.histc(numbers, bins=len(at_once.bins), min=at_once.low, max=at_once.high)
    assert list(at_once.bins) == inner.int().tolist()
    assert sum(at_once.bins) == 20_000
    assert at_once.mean == pytest.approx(float(numbers.mean()), rel=1e-9, abs=1e-12)
    assert in_blocks.std == pytest.approx(float(numbers.std(correction=0)), rel=1e-9)


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int64, torch.uint64, torch.float16, torch.bfloat16, torch.float8_e4m3fn],
    ids=str,
)
def test_every_dtype_has_one(dtype: torch.dtype) -> None:
    found = summary_of(torch.tensor([0, 1, 1, 1]).to(dtype))

    assert (found.minimum, found.maximum, found.mean) == (0.0, 1.0, 0.75)
    assert (found.bins[0], found.bins[-1], sum(found.bins)) == (1, 3, 4)


@pytest.mark.parametrize(
    ("numbers", "least", "greatest"),
    [
        ([1.0, 1.0], 1.0, 1.0),
        ([0.0], 0.0, 0.0),
        ([-5e-324, 5e-324], -5e-324, 5e-324),
        ([-1.7e308, 1.7e308], -1.7e308, 1.7e308),
        ([1e-300, 1e300], 1e-300, 1e300),
        ([0.999, 1.001] * 50, 0.999, 1.001),
    ],
    ids=["constant", "zero", "smallest", "largest", "both", "a norm"],
)
def test_numbers_at_the_edges(numbers: list[float], least: float, greatest: float) -> None:
    found = summary_of(torch.tensor(numbers, dtype=torch.float64))

    assert (found.minimum, found.maximum) == (least, greatest)
    assert sum(found.bins) == len(numbers)
    assert found.low <= least <= greatest <= found.high
    assert all(math.isfinite(one) for one in (found.low, found.high))


def test_norms_fill_the_bins() -> None:
    found = summary_of(torch.linspace(0.998, 1.002, 1000))

    assert len(found.bins) > 32


def test_without_finite_numbers_there_are_no_bins() -> None:
    assert summary_of(torch.empty(0)) == ValueSummary(0, 0, 0, None, None, None, None, 0.0, 0.0, ())
    assert summary_of(torch.tensor([math.nan, math.inf])) == ValueSummary(2, 1, 1, None, None, None, None, 0.0, 0.0, ())


def test_rows_of_zeros_are_counted_across_blocks() -> None:
    rows = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0], [math.nan, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    for size in (1, 2, 3, 5, 7, 10, 25):
        running = RunningValues(5)
        for block in rows.flatten().split(size):
            running.add(block)

        summary = running.summary()

        assert (summary.dead_rows, summary.zeros, summary.elements, summary.nan) == (3, 23, 25, 1), size
    without_rows = RunningValues()
    without_rows.add(rows)
    assert without_rows.summary().dead_rows == 0


def test_the_norm_is_that_of_the_finite_numbers() -> None:
    running = RunningValues()
    running.add(torch.tensor([3.0, math.inf]))
    running.add(torch.tensor([-4.0, 0.0]))
    assert running.summary().norm == pytest.approx(5.0, rel=1e-12)

    running.add(torch.tensor([1e200], dtype=torch.float64))
    assert running.summary().norm is None
