"""The numbers of all tensors of a checkpoint, read in bounded memory."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import hfshard
from hfshard.checkpoint.load_options import LoadOptions
from hfshard.checkpoint.locate import CheckpointQuery
from hfshard.errors import IntegrityError
from hfshard.viewing.tensor_values import MeasuredValues, RunningValues, ValueSummary, measure_values
from tests.helpers.memory import MIB, peak_during

MOST_MIB = 30


def measured(place: Path, *, most: int = 10_000) -> MeasuredValues:
    return measure_values(place, CheckpointQuery(), LoadOptions(progress=False), most=most)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("values") / "saved"
    state_dict = {
        "large": torch.arange(3_000_000, dtype=torch.float32),
        "broken": torch.tensor([1.0, math.nan, -math.inf], dtype=torch.bfloat16),
        "complex": torch.tensor([1 + 2j, 3 + 6j], dtype=torch.complex128),
        "fp8": torch.ones(4).to(torch.float8_e5m2),
        "empty": torch.empty(0, 3),
        "fp4": torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "scalar": torch.tensor(7),
    }
    hfshard.save_state_dict({**state_dict, "tied": state_dict["large"]}, directory, max_shard_size="1MB")
    return directory


def test_every_tensor_is_measured_once(saved: Path) -> None:
    found = measured(saved)

    assert list(found.tensors) == ["large", "complex", "scalar", "broken", "fp8", "empty"]
    assert (found.left_out, found.unknown) == (0, 1)
    large = found.tensors["large"]
    assert (large.elements, large.minimum, large.maximum, large.mean) == (3_000_000, 0.0, 2_999_999.0, 1_499_999.5)
    assert sum(large.bins) == 3_000_000
    assert (found.tensors["complex"].elements, found.tensors["complex"].mean) == (4, 3.0)
    assert (found.tensors["broken"].nan, found.tensors["broken"].inf, found.tensors["broken"].mean) == (1, 1, 1.0)
    assert found.tensors["scalar"].bins == (1,)
    assert (large.zeros, large.dead_rows) == (1, 0)


def test_rows_of_zeros_are_those_of_the_first_dimension(tmp_path: Path) -> None:
    state_dict = {
        "weight": torch.tensor([[0.0, 0.0], [0.0, 2.0], [0.0, 0.0]]),
        "complex": torch.tensor([[0j, 0j], [0j, 1j]]),
        "conv": torch.zeros(4, 2, 3, 3),
        "bias": torch.zeros(3),
        "empty": torch.zeros(5, 0),
    }
    hfshard.save_state_dict(state_dict, tmp_path)

    found = measured(tmp_path).tensors

    assert {name: one.dead_rows for name, one in found.items()} == {
        "weight": 2, "complex": 1, "conv": 4, "bias": 0, "empty": 0,
    }  # fmt: skip
    assert {name: one.zeros for name, one in found.items()} == {
        "weight": 5, "complex": 7, "conv": 72, "bias": 3, "empty": 0,
    }  # fmt: skip
    assert found["weight"].norm == 2.0


def test_the_largest_are_read_where_there_are_many(saved: Path) -> None:
    found = measured(saved, most=2)

    assert (list(found.tensors), found.left_out, found.unknown) == (["large", "complex"], 4, 1)


def test_memory_is_that_of_a_few_blocks_and_histograms(tmp_path: Path) -> None:
    """A histogram takes 512 KiB while it is filled: those of all tensors would take 200 MiB, and the large one 48."""
    state_dict = {f"small.{number}": torch.full((100,), float(number)) for number in range(400)}
    hfshard.save_state_dict({**state_dict, "large": torch.ones(12 * MIB)}, tmp_path, checksum="xxh3")
    measured(tmp_path, most=1)  # imports, and the room that the reader keeps
    found = []

    peak = peak_during(lambda: found.append(measured(tmp_path)))

    assert (len(found[0].tensors), found[0].tensors["large"].mean) == (401, 1.0)
    assert peak < MOST_MIB * MIB


def test_damage_is_found_on_the_way(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    hfshard.save_state_dict({"weight": torch.arange(100_000.0)}, tmp_path)
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(raw)

    with pytest.raises(IntegrityError, match=r"Tensor 'weight' of shard .* is damaged"):
        measured(tmp_path)


# Histograms of numbers that come in blocks: as of all at once.


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
