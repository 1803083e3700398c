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
from hfshard.viewing.tensor_values import MeasuredValues, measure_values
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
