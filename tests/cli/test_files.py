"""One file of weights on the command line: looked at, checked, and made a directory of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import hfshard
from tests.cli.conftest import Run


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A run's last checkpoint, with the weights and their average."""
    weights = {"layer.weight": torch.ones(10, 10), "layer.bias": torch.zeros(10)}
    average = {"layer.weight": torch.ones(10, 10) / 2, "layer.bias": torch.zeros(10)}
    path = tmp_path / "old" / "checkpoint.pth.tar"
    path.parent.mkdir()
    torch.save({"epoch": 3, "model": weights, "model_ema": average, "optimizer": {"state": {}}}, path)
    return path


def test_several_sets_of_weights_are_listed_and_one_is_asked_for(old: Path, tmp_path: Path, run: Run) -> None:
    for command in (["inspect", old], ["convert", old, tmp_path / "new"]):
        done = run(*command)
        assert (done.returncode, done.stdout) == (2, "")
        assert "'model' (2 tensors, 440 bytes), 'model_ema' (2 tensors, 440 bytes). Pass one: " in done.stderr
        assert "--key model on the command line" in done.stderr
    assert not (tmp_path / "new").exists()

    text = run("inspect", old, "--key", "model_ema").stdout
    assert "entry file   checkpoint.pth.tar\nfound under  model_ema\n" in text
    found = json.loads(run("inspect", old, "--key", "model", "--format", "json").stdout)
    assert (found["key"], found["total_parameters"]) == ("model", 110)

    done = run("convert", old, tmp_path / "new", "--key", "model_ema")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{old}: " in done.stdout
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model.safetensors"]
    assert hfshard.load_state_dict(tmp_path / "new", verify="full")["layer.weight"].unique().tolist() == [0.5]


def test_a_file_is_verified(old: Path, run: Run) -> None:
    done = run("verify", old)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{old}: whole: 1 file, ")

    raw = bytearray(old.read_bytes())
    raw[raw.index(b"/data/0") + 200] ^= 1
    old.write_bytes(raw)
    done = run("verify", old)
    assert done.returncode == 1
    assert done.stdout.startswith(f"DAMAGED  {old}\n")


def test_a_safetensors_file_is_shown_and_written_again(tmp_path: Path, run: Run) -> None:
    save_file({"a": torch.ones(100), "b": torch.ones(100)}, tmp_path / "adapter.safetensors")
    assert "found under" not in run("inspect", tmp_path / "adapter.safetensors").stdout
    assert run("verify", tmp_path / "adapter.safetensors", "--level", "structure").returncode == 0
    done = run("reshard", tmp_path / "adapter.safetensors", tmp_path / "new", "--max-shard-size", "700B")
    assert done.returncode == 0
    assert hfshard.verify_checkpoint(tmp_path / "new").ok
    done = run("inspect", tmp_path / "adapter.safetensors", "--key", "a")
    assert (done.returncode, done.stdout) == (2, "")
