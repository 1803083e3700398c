"""A relative path is where it was when the call began, whoever changes the working directory; and it may be gone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hfshard
from hfshard.cli.main import main
from hfshard.hub.directory.directory_hub import DirectoryHub
from hfshard.training import TrainingState

OLD, NEW = 1.0, 2.0


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full((4,), value) for name in "abc"}


def module(value: float) -> nn.Module:
    made = nn.Module()
    for name, tensor in tensors(value).items():
        made.register_parameter(name, nn.Parameter(tensor))
    return made


def state(value: float) -> TrainingState:
    return TrainingState(model=module(value))


def furnish(place: Path, value: float) -> None:
    """Put into a working directory all that a verb may look for in it."""
    hfshard.save_state_dict(tensors(value), place / "out", max_shard_size=1)
    hfshard.save_state_dict(tensors(value - 0.5), place / "whole")
    hfshard.push_checkpoint(place / "out", DirectoryHub.create(place / "hub").root)
    hfshard.CheckpointManager(place / "run").save(1, state(value))


def listing(place: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(place)): path.read_bytes() if path.is_file() else None for path in place.glob("**/*")}


@pytest.fixture(scope="module")
def furnished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two working directories: `here`, where the call is made, and `there`, where the process goes meanwhile."""
    place = tmp_path_factory.mktemp("working-directories")
    furnish(place / "here", OLD)
    furnish(place / "there", 9.0)
    return place


def manage(place: str) -> str:
    with hfshard.CheckpointManager("run", push_to_hub="./hub@runs") as manager:
        path = manager.save(2, state(NEW))
        os.chdir(place)
        assert manager.restore(state(0.0), "run/checkpoint-00000002") == 2
    assert DirectoryHub.open(f"{place}/hub").resolve("runs")
    return path


def load_all(place: str) -> dict[str, torch.Tensor]:
    hfshard.load_model(made := module(0.0), "out")
    os.chdir(place)
    assert made.state_dict()["a"][0] == OLD
    return hfshard.load_state_dict("out", verify="full")


def check(loaded: dict[str, torch.Tensor], value: float) -> bool:
    return all(torch.equal(tensor, torch.full((4,), value)) for tensor in loaded.values()) and len(loaded) == 3


VERBS: dict[str, Callable[[str], Any]] = {
    "save_state_dict": lambda _: hfshard.save_state_dict(tensors(NEW), "out", max_shard_size=1),
    "save_model": lambda _: hfshard.save_model(module(NEW), "out", max_shard_size=1),
    "reshard": lambda _: hfshard.reshard_checkpoint("whole", "./out", 1),
    "reshard in place": lambda _: hfshard.reshard_checkpoint("out", "out", "1GB"),
    "reshard with little disk": lambda _: hfshard.reshard_checkpoint("out", "out", 4200, low_disk=True),
    "push": lambda _: hfshard.push_checkpoint("out", "./hub", revision="pushed", commit_message="New"),
    "pull": lambda _: hfshard.pull_checkpoint("hub", "pulled"),
    "load": load_all,
    "verify": lambda _: hfshard.verify_checkpoint("out"),
    "manager": manage,
    "command line": lambda _: main(["reshard", "whole", "out", "--max-shard-size", "4200", "--no-progress"]),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_changed_working_directory_leads_nowhere_else(
    verb: str, furnished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(furnished, tmp_path, dirs_exist_ok=True)
    here, there = tmp_path / "here", tmp_path / "there"
    before = listing(there)
    monkeypatch.chdir(here)
    kept = os.open

    def open_elsewhere(*arguments: Any, **keywords: Any) -> int:
        os.chdir(there)  # as another thread does, from the first file that is opened on
        return kept(*arguments, **keywords)

    monkeypatch.setattr(os, "open", open_elsewhere)
    result = VERBS[verb](str(here))
    monkeypatch.undo()

    assert listing(there) == before
    if verb in ("save_state_dict", "save_model"):
        assert check(hfshard.load_state_dict(here / "out"), NEW)
        assert len(list((here / "out").glob("*.safetensors"))) == 4  # one more, as the old names were taken
    elif verb == "pull":
        assert result == str(here / "pulled")
        assert check(hfshard.load_state_dict(here / "pulled"), OLD)
    elif verb == "load":
        assert check(result, OLD)
    elif verb == "verify":
        assert result.ok
        assert result.checked_bytes
    elif verb == "manager":
        assert result == str(here / "run" / "checkpoint-00000002")
    elif verb == "push":
        assert DirectoryHub.open(here / "hub").resolve("pushed")
    else:
        assert check(hfshard.load_state_dict(here / "out"), OLD if "in place" in verb or "disk" in verb else OLD - 0.5)
        assert hfshard.verify_checkpoint(here / "out").ok


def test_absolute_paths_need_no_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    furnish(tmp_path / "new", OLD)
    furnish(tmp_path / "new", NEW)
    hfshard.reshard_checkpoint(tmp_path / "new" / "out", tmp_path / "new" / "other", "1GB")
    pulled = hfshard.pull_checkpoint(str(tmp_path / "new" / "hub"), tmp_path / "pulled", verify="full")
    with hfshard.CheckpointManager(tmp_path / "new" / "run") as manager:
        assert manager.restore_latest(state(0.0)) == 1

    assert check(hfshard.load_state_dict(pulled, verify="full", read="pread"), NEW)
    assert hfshard.verify_checkpoint(tmp_path / "new" / "other").ok
    assert main(["inspect", pulled]) == 0
    with pytest.raises(hfshard.errors.InvalidPathError, match="save_directory='out' is a relative path, and the"):
        hfshard.save_state_dict(tensors(NEW), "out")


def test_a_tilde_is_the_home_directory_for_every_verb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)

    hfshard.save_state_dict(tensors(OLD), "~/out")
    hfshard.save_model(module(OLD), Path("~/model"))
    hfshard.reshard_checkpoint("~/out", "~/sharded", 1)
    hfshard.push_checkpoint("~/sharded", "~/hub")

    assert check(hfshard.load_state_dict("~/model"), OLD)
    assert hfshard.verify_checkpoint("~/sharded").ok
    assert hfshard.pull_checkpoint("~/hub", "~/pulled") == str(home / "pulled")
    assert hfshard.CheckpointManager("~/run").root == str(home / "run")
    assert main(["verify", "~/pulled"]) == main(["inspect", "~/pulled"]) == 0
    assert sorted(path.name for path in home.iterdir()) == ["hub", "model", "out", "pulled", "sharded"]
    assert not list(here.iterdir())
