"""Pickles that are re-sharded become safetensors, or are refused."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

import hfshard
from hfshard.errors import DamagedCheckpointError, InvalidArgumentError, UnsafePickleError
from tests.helpers.evil import Evil
from tests.helpers.random_state_dicts import random_tensor
from tests.saving.helpers import files_in, floats, weights_in, write_bins

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("size", ["9KB", "1MB"])
@pytest.mark.parametrize("is_in_place", [False, True], ids=["elsewhere", "in place"])
def test_pickles_become_the_files_of_a_save(files: int, size: str, is_in_place: bool, tmp_path: Path) -> None:
    state_dict = {**floats(), "t": random_tensor(1, torch.float32, (20, 10)).t(), "e": torch.empty(0)}
    old = write_bins(tmp_path / "old", state_dict, files=files)
    hfshard.save_state_dict(state_dict, tmp_path / "want", max_shard_size=size)
    target = old if is_in_place else tmp_path / "new"
    hfshard.reshard_checkpoint(old, target, size)
    assert files_in(target) == files_in(tmp_path / "want")


def test_ties_of_a_pickle_are_stored_once(tmp_path: Path) -> None:
    embed = torch.ones(30, 4)
    old = write_bins(tmp_path / "old", {"embed": embed, "head": embed, "part": embed[:3]})
    index = hfshard.reshard_checkpoint(old, old)
    assert index.tied_names == {"head": "embed"}
    assert index.total_size == 480 + 48
    assert weights_in(old) == ["model.safetensors"]


def test_an_unsafe_pickle_is_refused_by_the_name_of_what_it_asks_for(tmp_path: Path) -> None:
    old = write_bins(tmp_path / "old", {"w": Evil()})
    with pytest.raises(UnsafePickleError, match=r"asks for 'posix\.system'"):
        hfshard.reshard_checkpoint(old, tmp_path / "new")
    assert weights_in(old) == ["pytorch_model.bin"]
    assert not (tmp_path / "new").exists()


def test_pickles_that_are_outranked_are_not_converted_in_place(tmp_path: Path) -> None:
    old = write_bins(tmp_path / "old", floats())
    hfshard.save_state_dict({"other": torch.ones(2)}, tmp_path / "safe")
    shutil.copy(tmp_path / "safe" / "model.safetensors", old)
    with pytest.raises(InvalidArgumentError, match=r"also has 'model\.safetensors', which is loaded instead"):
        hfshard.reshard_checkpoint(old, old, use_safetensors=False)
    assert weights_in(old) == ["model.safetensors", "pytorch_model.bin"]
    hfshard.reshard_checkpoint(old, tmp_path / "new", use_safetensors=False)
    assert hfshard.load_state_dict(tmp_path / "new").keys() == floats().keys()
    with pytest.raises(InvalidArgumentError, match=r"low_disk is for safetensors"):
        hfshard.reshard_checkpoint(old, old, use_safetensors=False, low_disk=True)


def test_a_damaged_pickle_is_refused(tmp_path: Path) -> None:
    old = write_bins(tmp_path / "old", floats())
    (old / "pytorch_model.bin").write_bytes((old / "pytorch_model.bin").read_bytes()[:-2000])
    with pytest.raises(DamagedCheckpointError, match=r"pytorch_model\.bin"):
        hfshard.reshard_checkpoint(old, old)
    assert os.listdir(old) == ["pytorch_model.bin"]
