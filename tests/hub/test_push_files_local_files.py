"""What of a directory is pushed, and what is compared before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hfshard
from hfshard.errors import IntegrityError

pytestmark = pytest.mark.compat


def test_single_file_with_a_flipped_bit_is_not_pushed(tmp_path: Path) -> None:
    for checksum in ("sha256", "xxh3"):
        folder = tmp_path / checksum
        hfshard.save_state_dict({"w": torch.ones(100_000)}, folder, checksum=checksum)
        raw = bytearray((folder / "model.safetensors").read_bytes())
        raw[-1] ^= 1
        (folder / "model.safetensors").write_bytes(raw)
        with pytest.raises(IntegrityError, match=r"model\.safetensors"):
            hfshard.push_checkpoint(folder, tmp_path / "hub")
        assert not (tmp_path / "hub").exists()


def test_shards_of_another_checksum_are_compared_before_they_are_pushed(tmp_path: Path) -> None:
    hfshard.save_state_dict({"a": torch.ones(5000), "b": torch.ones(5000)}, tmp_path / "x", max_shard_size="25KB",
                            checksum="xxh3")  # fmt: skip
    assert hfshard.push_checkpoint(tmp_path / "x", tmp_path / "hub").is_new
    shard = tmp_path / "x" / "model-00002-of-00002.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(IntegrityError, match="model-00002-of-00002"):
        hfshard.push_checkpoint(tmp_path / "x", tmp_path / "hub2")
