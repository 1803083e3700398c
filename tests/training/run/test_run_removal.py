"""Removals from runs in directories: one checkpoint, and what killed saves have left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch import nn

import hfshard
from hfshard.errors import DirectoryLockedError
from hfshard.training import CheckpointManager, TrainingState
from hfshard.training.run import run_directory
from tests.commit.test_removal import Killed, killed_at

FILES = ["model.safetensors", "state.safetensors", "training_state.json", "checkpoint.json"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run of three checkpoints."""
    with CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 2, 3):
            manager.save(step, TrainingState(model=nn.Linear(2, 2)))
    return tmp_path / "run"


@pytest.mark.parametrize("by_step", [True, False])
def test_one_checkpoint_of_a_run_goes(root: Path, by_step: bool) -> None:
    if by_step:
        report = hfshard.remove_checkpoint(root, step=2)
    else:
        report = hfshard.remove_checkpoint(root / "checkpoint-00000002")

    assert sorted(report.removed) == sorted(FILES)
    assert sorted(os.listdir(root)) == ["checkpoint-00000001", "checkpoint-00000003"]
    assert CheckpointManager(root).restore_latest(TrainingState(model=nn.Linear(2, 2))) == 3


def test_files_of_the_user_stay_in_its_folder(root: Path) -> None:
    folder = root / "checkpoint-00000003"
    (folder / "notes.txt").write_text("keep")
    (folder / "plots").mkdir()

    report = hfshard.remove_checkpoint(root, step=3)

    assert list(report.removed) == FILES
    assert report.kept == {"notes.txt": "not part of the checkpoint", "plots/": "not part of the checkpoint"}
    assert sorted(os.listdir(folder)) == ["notes.txt", "plots"]
    assert CheckpointManager(root).restore_latest(TrainingState(model=nn.Linear(2, 2))) == 2


@pytest.mark.parametrize("has_notes", [False, True])
def test_a_removal_that_is_killed_leaves_the_checkpoint_or_none(root: Path, has_notes: bool) -> None:
    if has_notes:
        (root / "checkpoint-00000003" / "notes.txt").write_text("keep")
    with killed_at(2), pytest.raises(Killed):
        hfshard.remove_checkpoint(root, step=3)

    assert CheckpointManager(root).restore_latest(TrainingState(model=nn.Linear(2, 2))) == 2
    if has_notes:
        hfshard.remove_checkpoint(root, step=3)
        assert os.listdir(root / "checkpoint-00000003") == ["notes.txt"]
    else:
        left_over = hfshard.remove_checkpoint(root, leftovers=True)
        assert len(left_over.removed) >= 3
        assert sorted(os.listdir(root)) == ["checkpoint-00000001", "checkpoint-00000002"]


def test_a_copy_of_a_checkpoint_elsewhere_goes(root: Path, tmp_path: Path) -> None:
    (root / "checkpoint-00000002").rename(tmp_path / "best")

    hfshard.remove_checkpoint(tmp_path / "best")

    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_a_damaged_checkpoint_goes(root: Path) -> None:
    (root / "checkpoint-00000002" / "checkpoint.json").write_text("{")

    hfshard.remove_checkpoint(root, step=2)

    assert sorted(os.listdir(root)) == ["checkpoint-00000001", "checkpoint-00000003"]


def test_a_run_that_a_manager_saves_into_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_directory, "_WAIT_SECONDS", 0.0)
    with CheckpointManager(root) as manager:
        manager.save(4, TrainingState(model=nn.Linear(2, 2)))
        with pytest.raises(DirectoryLockedError, match="Another CheckpointManager is saving into"):
            hfshard.remove_checkpoint(root, step=2)

    assert len(os.listdir(root)) == 4


def test_leftovers_of_killed_saves_go_and_what_was_moved_aside_comes_back(root: Path) -> None:
    for name in (".tmp-9-1", ".removed-8-1"):
        (root / name).mkdir()
        (root / name / "model.safetensors").write_bytes(b"123")
    (root / "checkpoint-00000003").rename(root / ".replaced-3-1")

    report = hfshard.remove_checkpoint(root, leftovers=True)

    assert report.removed == {
        ".removed-8-1/": 0,
        ".removed-8-1/model.safetensors": 3,
        ".tmp-9-1/": 0,
        ".tmp-9-1/model.safetensors": 3,
    }
    assert report.kept[".replaced-3-1/"] == "a checkpoint that a killed save was replacing: it is restored"
    assert sorted(os.listdir(root)) == ["checkpoint-00000001", "checkpoint-00000002", "checkpoint-00000003"]
