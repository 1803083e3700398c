"""What holds for a re-shard of any state dict, from any size to any size."""

from __future__ import annotations

import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import hfshard
from tests.flows.test_whole_properties import LIMITS, PACKINGS
from tests.flows.test_whole_properties import SETTINGS as OF_SAVES
from tests.helpers.random_state_dicts import Sample, assert_same, random_tensor, state_dicts

SETTINGS = settings(OF_SAVES, max_examples=20)
SAME_SIZES = (torch.float32, torch.int32, torch.uint32)
"""Dtypes of one size: a file has them in the order of the state dict."""


@st.composite
def small_tensors(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Up to thirty tensors of at most 1,000 bytes, so that each fits into every file."""
    count, seed = draw(st.integers(1, 30)), draw(st.integers(0, 2**32))
    return {
        f"t{draw(st.integers(0, 10**6))}.{number}": random_tensor(
            seed + number, draw(st.sampled_from(SAME_SIZES)), (draw(st.integers(0, 250)),)
        )
        for number in range(count)
    }


def files_in(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


@SETTINGS
@given(small_tensors(), *[st.integers(4096 + 1500, 4096 + 9000)] * 2, st.booleans())
def test_where_the_order_is_known_the_files_are_those_of_a_save(
    state_dict: dict[str, torch.Tensor], old: int, new: int, is_in_place: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, want = Path(folder) / "source", Path(folder) / "want"
        hfshard.save_state_dict(state_dict, source, max_shard_size=old)
        hfshard.save_state_dict(state_dict, want, max_shard_size=new)
        target = source if is_in_place else Path(folder) / "target"
        hfshard.reshard_checkpoint(source, target, new)
        found = files_in(target)
        if is_in_place and found.keys() != files_in(want).keys():
            # Names of the old files were still in use: there is one file more, and the rest has the bytes of the save.
            assert len(found) == len(files_in(want)) + 1
            assert hfshard.verify_checkpoint(target).ok
        else:
            assert found == files_in(want)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@SETTINGS
@given(state_dicts(), LIMITS, LIMITS, PACKINGS, st.sampled_from(["elsewhere", "in place", "low disk"]))
def test_every_bit_and_every_tie_come_through(sample: Sample, old: int, new: int, packing: str, how: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "source", Path(folder) / ("target" if how == "elsewhere" else "source")
        hfshard.save_state_dict(sample.state_dict, source, max_shard_size=old, packing=packing)  # type: ignore[arg-type]
        hfshard.reshard_checkpoint(source, target, new, low_disk=how == "low disk")
        loaded = hfshard.load_state_dict(target, verify="full")
        assert loaded.keys() == sample.state_dict.keys()
        for name, tensor in sample.state_dict.items():
            assert_same(loaded[name], tensor, name)
        for name, other in sample.tied.items():
            assert loaded[name] is loaded[other] or loaded[name].numel() == 0
        for path in target.glob("*.safetensors"):
            size = path.stat().st_size
            raw = path.read_bytes()
            assert size <= new or raw.count(b'"data_offsets"') <= 1
