"""Whatever is wrong with a path, an argument or a state dict: one `HfshardError`, and nothing is left behind."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hfshard
from hfshard.errors import AccessDeniedError, FileError, HfshardError, InvalidArgumentError, UnstorableTensorError
from hfshard.hub import DirectoryHub
from hfshard.training import CheckpointManager, TrainingState

WEIGHTS = {"a": torch.ones(3), "b": torch.zeros(2)}
LONG = "x" * 300
TEXTS: tuple[Any, ...] = (5, b"x", "a\0b", "\ud800")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    hfshard.save_state_dict(WEIGHTS, tmp_path / "saved", max_shard_size=4110)
    return tmp_path / "saved"


def _state() -> TrainingState:
    return TrainingState(nn.Linear(1, 1))


def _verbs(saved: Path) -> dict[str, Callable[[Any], object]]:
    """Every public function that takes a path, as a function of it."""
    hub = saved.parent / "hub"
    new = saved.parent / "new"
    return {
        "save_state_dict": lambda path: hfshard.save_state_dict(WEIGHTS, path),
        "save_model": lambda path: hfshard.save_model(nn.Linear(1, 1), path),
        "load_state_dict": lambda path: hfshard.load_state_dict(path, local_files_only=True),
        "load_model": lambda path: hfshard.load_model(nn.Linear(1, 1), path, local_files_only=True),
        "verify_checkpoint": hfshard.verify_checkpoint,
        "reshard from": lambda path: hfshard.reshard_checkpoint(path, new, local_files_only=True),
        "reshard to": lambda path: hfshard.reshard_checkpoint(saved, path),
        "push from": lambda path: hfshard.push_checkpoint(path, hub),
        "push to": lambda path: hfshard.push_checkpoint(saved, path),
        "pull from": lambda path: hfshard.pull_checkpoint(path, new, local_files_only=True),
        "manager.save": lambda path: CheckpointManager(path).save(1, _state()),
        "manager.restore": lambda path: CheckpointManager(path).restore(_state()),
        "hub.open": DirectoryHub.open,
        "hub.create": DirectoryHub.create,
    }


def test_what_is_no_path_is_one_error_of_every_verb(saved: Path) -> None:
    hfshard.push_checkpoint(saved, saved.parent / "hub")
    (saved.parent / "file").touch()
    paths = ["", None, *TEXTS, saved.parent / "file/below", saved.parent / LONG]
    for name, verb in _verbs(saved).items():
        for path in paths:
            try:
                verb(path)
            except HfshardError:
                continue
            pytest.fail(f"{name} took {path!r:.50}")
    assert sorted(os.listdir(saved.parent)) == ["file", "hub", "saved"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who may do less")
def test_missing_rights_name_the_file_and_are_a_permission_error_too() -> None:
    with tempfile.TemporaryDirectory() as open_to_all:  # pytest's own is for its user alone
        os.chmod(open_to_all, 0o755)
        _check_rights(Path(open_to_all, "closed"))


def _check_rights(closed: Path) -> None:
    verbs = {name: verb for name, verb in _verbs(closed).items() if name in ("save_state_dict", "load_state_dict")}
    for verb in verbs.values():  # what they import is not for everybody to read
        verb(closed)
    closed.chmod(0o000)
    os.seteuid(65534)
    try:
        for name, verb in verbs.items():
            with pytest.raises(PermissionError, match=f"'{closed}'") as caught:
                verb(closed)
            assert isinstance(caught.value, AccessDeniedError), name
            assert (caught.value.errno, caught.value.path) == (13, str(closed))
    finally:
        os.seteuid(0)


def test_error_of_the_system_keeps_its_number(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="File name too long") as caught:
        hfshard.save_state_dict(WEIGHTS, tmp_path / LONG)

    assert caught.value.errno == 36
    assert caught.value.path == str(tmp_path / LONG)


@pytest.mark.parametrize("text", [*TEXTS, LONG], ids=["int", "bytes", "nul", "surrogate", "long"])
def test_odd_texts_are_refused_before_anything_is_written(saved: Path, text: Any) -> None:
    hub = saved.parent / "hub"
    calls: list[Callable[[], object]] = [
        lambda: hfshard.save_state_dict(WEIGHTS, saved.parent / "new", variant=text),
        lambda: hfshard.plan_shards(WEIGHTS, variant=text),
        lambda: hfshard.load_state_dict(saved, variant=text),
        lambda: hfshard.load_state_dict(saved, subfolder=text),
        lambda: hfshard.verify_checkpoint(saved, subfolder=text),
    ]
    if text != LONG:
        calls += [
            lambda: hfshard.push_checkpoint(saved, hub, revision=text),
            lambda: hfshard.push_checkpoint(saved, hub, path_in_repo=text),
            lambda: hfshard.push_checkpoint(saved, hub, commit_message=text),
            lambda: hfshard.load_state_dict(saved, revision=text),
        ]
    for call in calls:
        with pytest.raises(HfshardError):
            call()

    assert os.listdir(saved.parent) == ["saved"]


@pytest.mark.parametrize("device", ["nonsense", -5, object(), "cuda:99", None, b"cpu", ["cpu"], 1.5])
def test_what_is_no_device_is_refused(saved: Path, device: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="device must be one that torch has here"):
        hfshard.load_state_dict(saved, device=device)


@pytest.mark.parametrize("keys", [5, [5], object(), 1.5, b"a", [None]])
def test_what_are_no_keys_are_refused(saved: Path, keys: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="keys must be names, globs, or a function of the name"):
        hfshard.load_state_dict(saved, keys=keys)


def test_lazy_modules_are_refused_by_name(saved: Path) -> None:
    new = saved.parent / "new"
    lazy = nn.Sequential(nn.LazyLinear(3))
    calls: list[Callable[[], object]] = [
        lambda: hfshard.save_model(lazy, new),
        lambda: hfshard.save_state_dict(lazy.state_dict(), new),
        lambda: hfshard.plan_shards(lazy.state_dict()),
        lambda: hfshard.load_model(lazy, saved),
        lambda: CheckpointManager(new).save(1, TrainingState(lazy)),
    ]
    for call in calls:
        with pytest.raises(UnstorableTensorError, match=r"'0\.weight' has no shape yet"):
            call()

    assert not new.exists()


@pytest.mark.parametrize("state_dict", [None, [1], 5])
def test_what_is_no_state_dict_is_refused(tmp_path: Path, state_dict: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="state_dict must map names to tensors"):
        hfshard.save_state_dict(state_dict, tmp_path / "new")
    with pytest.raises(InvalidArgumentError, match="state_dict must map names to tensors"):
        hfshard.plan_shards(state_dict)
    with pytest.raises(InvalidArgumentError, match=r"must be an nn\.Module"):
        hfshard.save_model(state_dict, tmp_path / "new")
