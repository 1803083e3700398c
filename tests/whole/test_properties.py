"""What holds for any state dict and any limit, over seeded random ones."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors import safe_open
from safetensors.torch import load_file

import hfshard
from hfshard.shards.shard_plan import Packing
from tests.helpers.random_state_dicts import (
    DTYPES,
    Sample,
    assert_same,
    fingerprint,
    random_tensor,
    state_dicts,
)
from tests.helpers.tensor_bytes import bytes_of

SETTINGS = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)

LIMITS = st.one_of(st.integers(1, 9000), st.integers(4096, 80_000), st.just(10**9))
PACKINGS: st.SearchStrategy[Packing] = st.sampled_from(("greedy", "balanced"))


@contextmanager
def saved(sample: Sample, limit: int, packing: Packing) -> Iterator[tuple[Path, hfshard.CheckpointIndex]]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder), hfshard.save_state_dict(sample.state_dict, folder, max_shard_size=limit, packing=packing)


def weights_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


@dataclass(frozen=True, slots=True)
class WeightFile:
    """What the header of a file says of it, and how long the file is."""

    name: str
    tensors: list[str]
    header_bytes: int
    size: int

    @classmethod
    def read(cls, path: Path) -> WeightFile:
        """Read it without the package."""
        raw = path.read_bytes()
        header_bytes = 8 + int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8:header_bytes])
        header.pop("__metadata__")
        return cls(path.name, list(header), header_bytes, len(raw))

    @property
    def is_aligned(self) -> bool:
        """Whether the tensors' bytes begin at a page."""
        return self.header_bytes % 4096 == 0

    def fits(self, limit: int) -> bool:
        """Whether it is not over the limit, or holds but one tensor."""
        return self.size <= limit or len(self.tensors) <= 1


def index_on_disk(folder: Path) -> tuple[int, dict[str, str]] | None:
    """The total size and the file of each tensor, as the index file has them; None where there is no such file."""
    path = folder / "model.safetensors.index.json"
    if not path.exists():
        return None
    index = json.loads(path.read_text("utf-8"))
    return index["metadata"]["total_size"], index["weight_map"]


@SETTINGS
@given(state_dicts(), LIMITS, PACKINGS)
def test_a_save_keeps_to_its_limit_comes_back_to_the_bit_and_is_made_again(
    sample: Sample, limit: int, packing: Packing
) -> None:
    before = fingerprint(sample.state_dict)
    with saved(sample, limit, packing) as (first, index), saved(sample, limit, packing) as (second, again):
        _assert_every_name_lies_in_exactly_one_file_and_no_file_is_over_the_limit(sample, limit, first, index)
        _assert_every_bit_comes_back_and_ties_are_tied_again(sample, first)
        _assert_stock_safetensors_reads_the_same_bits(sample, first, index)
        assert index == again
        assert {f.name: f.read_bytes() for f in first.iterdir()} == {f.name: f.read_bytes() for f in second.iterdir()}
    assert fingerprint(sample.state_dict) == before


def _assert_every_name_lies_in_exactly_one_file_and_no_file_is_over_the_limit(
    sample: Sample, limit: int, folder: Path, index: hfshard.CheckpointIndex
) -> None:
    files = [WeightFile.read(path) for path in weights_in(folder)]
    places: dict[str, list[str]] = {}
    for file in files:
        for name in file.tensors:
            places.setdefault(name, []).append(file.name)
    assert {name: [file] for name, file in index.weight_map.items()} == places
    # What is not stored is tied to what is: together they are all names, each once.
    assert sorted([*index.weight_map, *index.tied_names]) == sorted(sample.state_dict)
    assert [file for file in files if not file.is_aligned or not file.fits(limit)] == []
    assert [file for file in files if not file.tensors and sample.state_dict] == []
    stored = sum(len(bytes_of(sample.state_dict[name])) for name in index.weight_map)
    data_bytes = sum(file.size - file.header_bytes for file in files)
    assert (index.total_size, data_bytes) == (stored, stored)
    assert index_on_disk(folder) == ((stored, index.weight_map) if len(files) > 1 else None)


def _assert_every_bit_comes_back_and_ties_are_tied_again(sample: Sample, folder: Path) -> None:
    loaded = hfshard.load_state_dict(folder, verify="full")
    assert loaded.keys() == sample.state_dict.keys()
    for name, tensor in sample.state_dict.items():
        assert_same(loaded[name], tensor, name)
    for name, other in sample.tied.items():
        assert loaded[name] is loaded[other]
    assert hfshard.verify_checkpoint(folder).problems == ()


def _assert_stock_safetensors_reads_the_same_bits(sample: Sample, folder: Path, index: hfshard.CheckpointIndex) -> None:
    found: dict[str, torch.Tensor] = {}
    for file in weights_in(folder):
        found |= load_file(file)
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata()["format"] == "pt"
    assert found.keys() == index.weight_map.keys()
    for name, tensor in found.items():
        assert_same(tensor, sample.state_dict[name], name)


@SETTINGS
@given(state_dicts(), LIMITS, PACKINGS)
def test_strides_leave_no_trace_in_the_file(sample: Sample, limit: int, packing: Packing) -> None:
    """A strided save and a contiguous one of the same values are the same files."""
    plain = {
        name: random_tensor(0, tensor.dtype, tuple(tensor.shape)) if tensor.numel() == 0 else _contiguous(tensor)
        for name, tensor in sample.state_dict.items()
        if name not in sample.tied
    }
    untied = Sample({name: sample.state_dict[name] for name in plain}, {})
    with saved(untied, limit, packing) as (first, index), saved(Sample(plain, {}), limit, packing) as (second, _):
        if not index.tied_names:  # two views that happen to be one
            assert {f.name: f.read_bytes() for f in first.iterdir()} == {
                f.name: f.read_bytes() for f in second.iterdir()
            }


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    raw = torch.frombuffer(bytearray(bytes_of(tensor)), dtype=torch.uint8)
    if tensor.dtype.itemsize == 1:
        return raw.reshape(tensor.shape).view(tensor.dtype)
    return raw.view(tensor.dtype).reshape(tensor.shape)


@SETTINGS
@given(state_dicts(dtypes=(torch.complex128, torch.complex32, torch.float64, torch.int8)), LIMITS, PACKINGS)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_complex_of_other_widths_comes_back_though_the_format_lacks_it(
    sample: Sample, limit: int, packing: Packing
) -> None:
    with saved(sample, limit, packing) as (folder, _):
        loaded = hfshard.load_state_dict(folder, verify="full")
        for name, tensor in sample.state_dict.items():
            assert_same(loaded[name], tensor, name)
        assert [path.name for path in weights_in(folder) if not WeightFile.read(path).fits(limit)] == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_dtype_comes_back_by_us_and_by_stock_safetensors(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = random_tensor(7, dtype, (3, 4))
    hfshard.save_state_dict({"t": tensor, "u": tensor.t() if dtype.itemsize > 0 else tensor}, tmp_path)
    loaded, stock = hfshard.load_state_dict(tmp_path, verify="full"), load_file(tmp_path / "model.safetensors")
    for found in (loaded, stock):
        assert_same(found["t"], tensor, "t")
        assert_same(found["u"], tensor.t(), "u")
