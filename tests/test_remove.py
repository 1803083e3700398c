"""Removals by path: which directories are refused, with advice, and what the steps of a run are named by."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hfshard
from hfshard.errors import CheckpointNotFoundError, InvalidArgumentError, SaveDirectoryError
from hfshard.remove import plan_removal
from hfshard.training import CheckpointManager, TrainingState

TENSORS = {"a": torch.ones(3)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": 1, "leftovers": True}, "step is for one checkpoint of a run: leave out leftovers and variant."),
        ({"step": 0, "variant": "fp16"}, "step is for one checkpoint of a run: leave out leftovers and variant."),
        ({"step": -1}, "step must be a non-negative int, got -1."),
        ({"step": True}, "step must be a non-negative int, got True."),
        ({"step": "1"}, "step must be a non-negative int, got '1'."),
    ],
)
def test_a_step_with_other_arguments_is_refused(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        plan_removal(tmp_path, **arguments)
    assert str(raised.value) == message


def test_a_file_is_refused_and_a_repo_is_left_to_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hfshard.save_state_dict(TENSORS, tmp_path / "out")
    monkeypatch.chdir(tmp_path)

    with pytest.raises(InvalidArgumentError, match=r"model\.safetensors' is a file\. Pass its directory, and the var"):
        hfshard.remove_checkpoint("out/model.safetensors")
    with pytest.raises(CheckpointNotFoundError, match=r"To delete a repo of the Hub, run: hf repos delete org/name$"):
        hfshard.remove_checkpoint("org/name")
    with pytest.raises(CheckpointNotFoundError) as raised:
        hfshard.remove_checkpoint("./name")
    assert "hf repos delete" not in str(raised.value)
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]


@pytest.mark.parametrize("folder", ["hub/snapshots", "cache/models--org--name/snapshots/abc"])
def test_what_a_hub_or_its_cache_holds_is_refused(folder: str, tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "hfshard-hub.json").write_text('{"format": 1}')
    hfshard.save_state_dict(TENSORS, tmp_path / "saved")
    (tmp_path / folder).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "saved").rename(tmp_path / folder)

    advice = {
        "hub/snapshots": f"is in the directory hub '{tmp_path}/hub'. To remove its commits, run: "
        f"hfshard revisions {tmp_path}/hub --delete REVISION",
        "cache/models--org--name/snapshots/abc": "is in the cache of huggingface_hub. To clear it, run: hf cache rm",
    }
    (tmp_path / "link").symlink_to(tmp_path / folder)
    for path in (tmp_path / folder, tmp_path / "link"):
        with pytest.raises(SaveDirectoryError) as raised:
            hfshard.remove_checkpoint(path)
        assert str(raised.value) == f"'{path}' {advice[folder]}"
    assert list(hfshard.load_state_dict(tmp_path / folder)) == ["a"]


def test_a_plan_removes_nothing_until_it_is_carried_out(tmp_path: Path) -> None:
    hfshard.save_state_dict(TENSORS, tmp_path / "out")
    hfshard.save_state_dict(TENSORS, tmp_path / "out", variant="fp16")

    removal = plan_removal(tmp_path / "out", variant="fp16")
    dry = hfshard.remove_checkpoint(tmp_path / "out", variant="fp16", dry_run=True)
    assert dry == removal.report and not dry.is_done
    assert len(os.listdir(tmp_path / "out")) == 2
    removal.carry_out()

    assert list(dry.removed) == ["model.fp16.safetensors"]
    assert dry.kept == {"model.safetensors": "not part of the checkpoint"}
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]
    assert hfshard.remove_checkpoint(tmp_path / "out").is_done
    assert os.listdir(tmp_path / "out") == []


def test_a_run_is_refused_with_its_steps_and_a_missing_step_is_not_found(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        for step in (3, 12):
            manager.save(step, TrainingState(model=nn.Linear(2, 2)))
    folders = sorted(os.listdir(tmp_path))

    with pytest.raises(InvalidArgumentError) as raised:
        hfshard.remove_checkpoint(tmp_path)
    assert str(raised.value) == (
        f"'{tmp_path}' is a run. Choose one of its checkpoints by step (12, 3), as in: "
        f"hfshard remove {tmp_path} --step 3"
    )
    with pytest.raises(CheckpointNotFoundError):
        hfshard.remove_checkpoint(tmp_path, step=4)
    assert sorted(os.listdir(tmp_path)) == folders
