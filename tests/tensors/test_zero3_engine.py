"""DeepSpeed: what each call does with what a real engine has partitioned, and with its directories."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hfshard
from hfshard.errors import CheckpointNotFoundError

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="pip install deepspeed")

SHAPES = {"first.weight": [3, 2], "first.bias": [3], "second.weight": [1, 3], "second.bias": [1], "mean": [2]}
REPOSITORY = Path(__file__).parents[2]


def run(command: list[str]) -> None:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a child process has trained with ZeRO-3, called hfshard, and saved the engine."""
    place = tmp_path_factory.mktemp("deepspeed")
    run([sys.executable, "-W", "ignore", "-m", "tests.tensors.zero3_engine", str(place)])
    return place


@pytest.fixture
def found(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "found.json").read_bytes())
    return found


def test_copies_of_partitioned_parameters_are_refused(found: list[dict[str, Any]]) -> None:
    """What has the parameters themselves reads their parts; a copy of what stands in their place has nothing."""
    refused = {name: text for name, text in found[0].items() if text != "done"}

    copies = {f"copies: {way}" for way in ("clones", "with a prefix", "of a child", "dcp.save", "dcp.save, nested")}
    of_a_file = refused.pop("restore of a file")
    assert "the model is spread over ranks" in of_a_file
    assert "torch.empty returns torch.bfloat16 for torch.float32 here" in refused.pop("born so")
    assert refused.keys() == copies | {"load_state_dict, like", "run: of an optimizer"}
    assert "engine.save_checkpoint(directory)" in refused.pop("run: of an optimizer")
    assert all("DeepSpeed ZeRO" in text for text in refused.values()), refused


def test_what_is_gathered_is_saved_and_loaded(found: list[dict[str, Any]]) -> None:
    used = found[1]

    assert {name: float(one) for name, one in used.pop("loaded").items()} == {
        "first.weight": 6, "first.bias": 3, "second.weight": 3, "second.bias": 1, "mean": 2,
    }  # fmt: skip
    assert used == dict.fromkeys(("gathered", "gathered run/checkpoint-00000001", "passed"), SHAPES)


def test_the_directory_is_loaded(folder: Path) -> None:
    loaded = hfshard.load_state_dict(folder / "zero3")

    assert {name: list(one.shape) for name, one in loaded.items()} == SHAPES
    assert all(torch.equal(one.bfloat16(), torch.ones_like(one).bfloat16()) for one in loaded.values())


def test_the_file_of_a_rank_is_not_taken_for_the_model(folder: Path) -> None:
    file = next((folder / "zero3").rglob("*_model_states.pt"))

    with pytest.raises(CheckpointNotFoundError, match=r"has an empty tensor in place of 'first\.weight' and 3 more"):
        hfshard.load_state_dict(file)
