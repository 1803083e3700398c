"""Two checkpoints compared: names, contents, ties, and which bytes are read to tell."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import hfshard

WEIGHTS = {
    "embed.weight": torch.arange(32.0).view(8, 4),
    "layers.0.weight": torch.ones(4, 4),
    "layers.0.bias": torch.zeros(4),
    "head.weight": torch.arange(8.0),
}


def kinds_of(report: hfshard.CheckpointDiff) -> dict[str, str]:
    return {tensor.name: tensor.kind for tensor in report.tensors}


def test_equal_checkpoints_are_the_same_whatever_their_shards_and_nothing_is_read(tmp_path: Path) -> None:
    hfshard.save_state_dict(WEIGHTS, tmp_path / "a")
    hfshard.save_state_dict(dict(reversed(WEIGHTS.items())), tmp_path / "b", max_shard_size="100B")

    report = hfshard.diff_checkpoints(tmp_path / "a", tmp_path / "b")

    assert report.is_same
    assert report.counts == {"same": 4}
    assert report.read_bytes == 0
    assert (report.a, report.b) == (str(tmp_path / "a"), str(tmp_path / "b"))


@pytest.mark.parametrize("form", ["hfshard", "safetensors", "bin"])
def test_each_kind_is_told_by_name(tmp_path: Path, form: str) -> None:
    other = {
        "embed.weight": WEIGHTS["embed.weight"],
        "layers.0.weight": torch.full((4, 4), 2.0),
        "decoder.0.bias": WEIGHTS["layers.0.bias"],
        "classifier.weight": torch.ones(3),
    }
    hfshard.save_state_dict(WEIGHTS, tmp_path / "a")
    if form == "hfshard":
        hfshard.save_state_dict(other, tmp_path / "b")
    elif form == "safetensors":
        (tmp_path / "b").mkdir()
        save_file(other, tmp_path / "b" / "model.safetensors")
    else:
        (tmp_path / "b").mkdir()
        torch.save(other, tmp_path / "b" / "pytorch_model.bin")

    report = hfshard.diff_checkpoints(tmp_path / "a", tmp_path / "b")

    assert kinds_of(report) == {
        "embed.weight": "same",
        "layers.0.weight": "changed",
        "decoder.0.bias": "renamed",
        "classifier.weight": "only_in_b",
        "head.weight": "only_in_a",
    }
    assert [tensor.a.name for tensor in report.tensors if tensor.kind == "renamed" and tensor.a] == ["layers.0.bias"]
    assert not report.is_same
    # Of the side without digests only what the other one has by name, or in the same dtype and shape: 128 + 64 + 16.
    assert report.read_bytes == (0 if form == "hfshard" else 208)
