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
        assert "'model' (2 tensors, 440 bytes), 'model_ema' (2 tensors, 440 bytes). Pass one " in done.stderr
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


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """What a program has saved of a run, with the arguments that it was called with."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    path = tmp_path / "trained.pt"
    value = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7, "object": slice(1)}
    torch.save(value, path)
    return path


def test_a_run_is_made_of_a_file_with_an_optimizer(trained: Path, tmp_path: Path, run: Run) -> None:
    made = tmp_path / "run" / "checkpoint-00000007"
    refused = run("convert", trained, tmp_path / "run")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "has objects of 'builtins.slice', which can't be read without running code (object)" in refused.stderr
    assert not (tmp_path / "run").exists()

    done = run("convert", trained, tmp_path / "run", "--not-strict")
    assert done.returncode == 0
    assert done.stdout.splitlines()[:4] == [
        f"read     {trained}",
        f"written  {made}",
        "step     7",
        "parts    model, optimizer",
    ]
    assert done.stderr.startswith(f"hfshard: note: 'object' in '{trained}' is of 'builtins.slice'")
    assert run("verify", tmp_path / "run").returncode == 0
    again = run("convert", trained, tmp_path / "run", "--not-strict")
    assert (again.returncode, again.stdout) == (2, "")
    assert f"'{made}' is there already" in again.stderr

    found = run("convert", trained, tmp_path / "run", "--not-strict", "--step", "8", "--format", "json").stdout
    assert json.loads(found)["step"] == 8
    bad = run("convert", trained, tmp_path / "run", "--part", "model")
    assert (bad.returncode, "'model' is not NAME=KEY" in bad.stderr) == (2, True)
    bad = run("convert", trained, tmp_path / "run", "--not-strict", "--part", "optimiser=optimizer")
    assert (bad.returncode, "keys names 'optimiser', which is none of the parts" in bad.stderr) == (2, True)


def test_the_weights_of_a_run_are_taken_alone(trained: Path, tmp_path: Path, run: Run) -> None:
    value = torch.load(trained, weights_only=False)
    del value["object"]
    torch.save(value, trained)
    done = run("convert", trained, tmp_path / "weights", "--weights")
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["model.safetensors"]
