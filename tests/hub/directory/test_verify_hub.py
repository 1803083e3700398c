"""A directory hub is checked with every file of its commit, and with what lies around its commits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hfshard
from hfshard.errors import HubNotFoundError
from hfshard.format.file_names import WeightNames
from hfshard.hub.directory.directory_hub import DirectoryHub
from hfshard.hub.directory.verify_hub import verify_hub


@pytest.fixture
def hub(tmp_path: Path) -> DirectoryHub:
    saved, root = tmp_path / "saved", tmp_path / "hub"
    hfshard.save_state_dict({"w": torch.ones(2)}, saved)
    (saved / "notes.txt").write_text("trained twice")
    hfshard.push_checkpoint(saved, root)
    return DirectoryHub.open(str(root))


def test_an_intact_hub_has_no_problem(hub: DirectoryHub) -> None:
    report = verify_hub(hub.root, WeightNames(), level="full", progress=False)

    assert report.ok
    assert report.files == ("model.safetensors", "notes.txt")
    assert report.warnings == ()


def test_a_file_that_no_weights_need_is_compared_too(hub: DirectoryHub) -> None:
    path = Path(hub.snapshot(None)) / "notes.txt"
    path.chmod(0o644)
    path.write_text("trained once!")

    report = verify_hub(hub.root, WeightNames(), level="full", progress=False)

    assert [Path(problem.file).name for problem in report.problems] == ["notes.txt"]
    assert verify_hub(hub.root, WeightNames(), level="structure", progress=False).ok


def test_weights_around_the_commits_are_a_problem_and_other_files_a_warning(hub: DirectoryHub) -> None:
    (Path(hub.root) / "model.safetensors").write_bytes(b"")
    (Path(hub.root) / "todo").write_text("")

    report = verify_hub(hub.root, WeightNames(), level="full", progress=False)

    assert ["belongs to no commit" in problem.message for problem in report.problems] == [True]
    assert report.warnings == (f"'todo' in '{hub.root}' does not belong to the hub.",)


def test_a_directory_that_is_no_hub_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HubNotFoundError, match="is not a directory hub"):
        verify_hub(str(tmp_path), WeightNames(), level="full", progress=False)
