"""Bytes of `pytorch_model.bin` compared with the checksums that torch.save wrote: loaded, verified, converted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import hfshard
from hfshard.errors import CheckpointChangedError, DamagedCheckpointError, IntegrityError
from hfshard.storage.weights.pickles.pickle_file import PickleFile
from tests.resharding.helpers import floats, write_bins

DAMAGED = r"pytorch_model-00002-of-00003\.bin' is damaged: its record '.*/data/\d+' does not match the zip's own"


def flip(path: Path) -> None:
    """Flip one bit of a tensor's bytes."""
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"/data/") + 200] ^= 1
    path.write_bytes(raw)


@pytest.fixture
def bins(tmp_path: Path) -> Path:
    """Three pickled shards; one bit of the second is flipped."""
    bins = write_bins(tmp_path / "bins", floats(), files=3)
    flip(bins / "pytorch_model-00002-of-00003.bin")
    return bins


def test_flipped_bit_of_a_pickle_is_found(bins: Path, tmp_path: Path) -> None:
    hfshard.load_state_dict(bins)
    with pytest.raises(IntegrityError, match=DAMAGED):
        hfshard.load_state_dict(bins, verify="full")
    for target in (bins, tmp_path / "new"):
        with pytest.raises(IntegrityError, match=DAMAGED):
            hfshard.reshard_checkpoint(bins, target)
    assert sorted(os.listdir(tmp_path)) == ["bins"]
    assert not list(bins.glob("*.safetensors"))


def test_every_damaged_pickle_is_reported(bins: Path) -> None:
    flip(bins / "pytorch_model-00003-of-00003.bin")

    report = hfshard.verify_checkpoint(bins)

    assert [os.path.basename(problem.file) for problem in report.problems] == [
        "pytorch_model-00002-of-00003.bin",
        "pytorch_model-00003-of-00003.bin",
    ]
    assert report.checked_bytes == (bins / "pytorch_model-00001-of-00003.bin").stat().st_size
    assert report.warnings == ()
    assert hfshard.verify_checkpoint(bins, level="structure").ok


def test_whole_pickles_load_in_full(tmp_path: Path) -> None:
    bins = write_bins(tmp_path / "bins", floats(), files=2)

    assert hfshard.load_state_dict(bins, verify="full").keys() == floats().keys()
    assert hfshard.verify_checkpoint(bins).warnings == ()


@pytest.mark.parametrize("kind", ["old", "without checksums"])
def test_pickle_without_checksums_can_not_be_verified_in_full(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    try:
        torch.serialization.set_crc32_options(compute_crc32=False)
        torch.save(floats(), path, _use_new_zipfile_serialization=kind != "old")
    finally:
        torch.serialization.set_crc32_options(compute_crc32=True)

    with pytest.raises(DamagedCheckpointError, match=r"pytorch_model\.bin' can't be verified in full"):
        hfshard.load_state_dict(tmp_path, verify="full")
    report = hfshard.verify_checkpoint(tmp_path)
    assert report.ok
    assert report.checked_bytes == 0
    assert report.warnings == ("'pytorch_model.bin' is a pickle whose bytes were not verified: only that it loads.",)
    hfshard.reshard_checkpoint(tmp_path, tmp_path)


def test_pickle_that_was_replaced_is_not_compared(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(floats(), path)
    pickled = PickleFile(str(path), str(tmp_path))
    torch.save(floats() | {"more": torch.ones(1)}, path)

    with pytest.raises(CheckpointChangedError, match=r"'.*pytorch_model\.bin' was replaced"):
        pickled.check_every_byte()
