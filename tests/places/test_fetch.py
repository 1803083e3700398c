"""A pull over shards of the same names: whenever it is killed, every reader finds the old checkpoint or the new one."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import load_torch_model
from safetensors.torch import load_file, save_file
from torch import nn

import hfshard
from hfshard.errors import CommitUndoneError, CommitUnfinishedError, NotEnoughSpaceError, SaveDirectoryError
from tests.helpers.memory import MIB, peak_during
from tests.hub.models import files_of

CHANGING = ("rename", "replace", "unlink", "link")
"""What changes the names of files."""


class Three(nn.Module):
    """Three parameters, a shard each."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.full((300,), value))
        self.b = nn.Parameter(torch.zeros(9))
        self.c = nn.Parameter(torch.full((30,), value))


@pytest.fixture
def repo(tmp_path: Path) -> str:
    """A hub whose main has the new checkpoint in three shards, of which the second is as in the old one."""
    folder = tmp_path / "pushed"
    hfshard.save_state_dict(Three(2.0).state_dict(), folder, max_shard_size=1)
    (folder / "config.json").write_text('{"new": true}')
    hfshard.push_checkpoint(folder, tmp_path / "hub")
    return str(tmp_path / "hub")


def by_hfshard(directory: Path) -> None:
    """The old checkpoint, as hfshard saves it."""
    hfshard.save_state_dict(Three(1.0).state_dict(), directory, max_shard_size=1)
    (directory / "config.json").write_text('{"new": false}')


def by_others(directory: Path, value: float = 1.0) -> None:
    """The same, as other programs do: without checksums."""
    directory.mkdir()
    names = {key: f"model-0000{number}-of-00003.safetensors" for number, key in enumerate("abc", 1)}
    for key, tensor in Three(value).state_dict().items():
        save_file({key: tensor}, directory / names[key])
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 1356, "tied": "a"}, "weight_map": names})
    )
    (directory / "config.json").write_text('{"new": false}')


def values_by_all(directory: Path) -> list[float]:
    """The value that hfshard, huggingface_hub and a plain reader of the index find, none of them that of two saves."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    theirs = Three(0.0)
    load_torch_model(theirs, directory, strict=True)
    by_index = {key: load_file(directory / file)[key] for key, file in index.items()}
    found = [hfshard.load_state_dict(directory), theirs.state_dict(), by_index]
    values = [{float(value) for key in "ac" for value in state[key].unique()} for state in found]
    assert [len(one) for one in values] == [1, 1, 1]
    return [one.pop() for one in values]


def pull_and_die(repo: str, target: Path, at: int, variant: str | None = None) -> bool:
    """Pull in a child that dies before the call of this number which changes names; whether it did."""
    child = os.fork()
    if child == 0:
        left = at

        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def called(*arguments: Any, **options: Any) -> Any:
                nonlocal left
                left -= 1
                if left < 0:
                    os._exit(9)
                return call(*arguments, **options)

            return called

        try:
            for name in CHANGING:
                setattr(os, name, counted(getattr(os, name)))
            hfshard.pull_checkpoint(repo, target, variant=variant)
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9)
    return status == 9


@pytest.mark.parametrize("save_old", [by_hfshard, by_others])
def test_a_pull_that_is_killed_leaves_one_of_the_two_checkpoints(
    save_old: Callable[[Path], None], repo: str, tmp_path: Path
) -> None:
    save_old(tmp_path / "old")
    new = files_of(tmp_path / "pushed")
    found: list[list[float]] = []
    was_killed = True
    while was_killed:
        target = tmp_path / f"target-{len(found)}"
        shutil.copytree(tmp_path / "old", target)
        was_killed = pull_and_die(repo, target, len(found))
        found.append(values_by_all(target))
        hfshard.pull_checkpoint(repo, target)
        assert files_of(target) == new

    for by_reader in zip(*found, strict=True):
        assert by_reader == tuple(sorted(by_reader))
        assert set(by_reader) == {1.0, 2.0}
    assert len(found) > 10


def test_another_version_is_pulled_over_what_a_killed_pull_leaves_and_may_be_killed_too(
    repo: str, tmp_path: Path
) -> None:
    third = tmp_path / "third"
    hfshard.save_state_dict(Three(3.0).state_dict(), third, max_shard_size=1)
    (third / "config.json").write_text('{"third": true}')
    hfshard.push_checkpoint(third, tmp_path / "other")
    by_hfshard(tmp_path / "old")
    number = 0
    was_killed = True
    while was_killed:
        target = tmp_path / f"target-{number}"
        shutil.copytree(tmp_path / "old", target)
        was_killed = pull_and_die(repo, target, number)
        before = values_by_all(target)
        pull_and_die(str(tmp_path / "other"), target, 7 * number % 31)
        assert all(value in (old, 3.0) for value, old in zip(values_by_all(target), before, strict=True))
        hfshard.pull_checkpoint(str(tmp_path / "other"), target)
        assert files_of(target) == files_of(third)
        number += 3

    assert number > 10


def killed_when(repo: str, old: Path, place: Path, is_wanted: Callable[[Path], bool]) -> Path:
    """Copies of a directory, into which a pull is killed at one call after the other, until one is as wanted."""
    for number in range(60):
        target = place / f"{old.name}-{number}"
        shutil.copytree(old, target)
        pull_and_die(repo, target, number)
        if is_wanted(target):
            return target
    raise AssertionError("no call leaves what is wanted")


def test_shards_get_names_that_no_earlier_killed_pull_has_given(repo: str, tmp_path: Path) -> None:
    by_others(tmp_path / "old")
    by_others(tmp_path / "third", 3.0)  # with an index of the same bytes
    (tmp_path / "third" / "config.json").write_text('{"third": true}')
    hfshard.push_checkpoint(tmp_path / "third", tmp_path / "other")
    index = "model.safetensors.index.json"

    def is_aside(target: Path) -> bool:
        return (target / index).read_bytes() != (tmp_path / "old" / index).read_bytes()

    def is_between(target: Path) -> bool:
        config = (target / "config.json").read_text()
        return "third" in config and "transformers_weights" in config

    first = killed_when(repo, tmp_path / "old", tmp_path, is_aside)
    second = killed_when(str(tmp_path / "other"), first, tmp_path, is_between)
    number = 0
    was_killed = True
    while was_killed:
        target = tmp_path / f"target-{number}"
        shutil.copytree(second, target)
        was_killed = pull_and_die(repo, target, number)
        values_by_all(target)  # of one save each
        number += 2
    assert files_of(target) == files_of(tmp_path / "pushed")


@pytest.mark.parametrize("word", ["named", "damaged"])
def test_shards_of_an_index_that_cannot_be_rewritten_stay(word: str, repo: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    by_others(target)
    index = "model.safetensors.index.json"
    if word == "named":
        (target / "config.json").write_text(json.dumps({"transformers_weights": index}))
    else:  # as hfshard reads it; others find the shards
        read = json.loads((target / index).read_text())
        (target / index).write_text(json.dumps({**read, "metadata": {"hfshard": 1}}))
    before = files_of(target)

    with pytest.raises(SaveDirectoryError):
        hfshard.pull_checkpoint(repo, target)

    assert files_of(target) == before


def test_a_killed_pull_of_a_variant_never_leaves_the_config_of_one_and_the_weights_of_the_other(tmp_path: Path) -> None:
    for folder, value in (("pushed", 2.0), ("old", 1.0)):
        hfshard.save_state_dict(Three(value).state_dict(), tmp_path / folder, max_shard_size=1, variant="fp16")
        (tmp_path / folder / "config.json").write_text(json.dumps({"value": value}))
    hfshard.push_checkpoint(tmp_path / "pushed", tmp_path / "hub")
    found: list[float] = []
    was_killed = True
    while was_killed:
        target = tmp_path / f"target-{len(found)}"
        shutil.copytree(tmp_path / "old", target)
        was_killed = pull_and_die(str(tmp_path / "hub"), target, len(found), "fp16")
        found.append(json.loads((target / "config.json").read_text())["value"])
        state = hfshard.load_state_dict(target, variant="fp16")
        assert {float(value) for key in "ac" for value in state[key].unique()} == {found[-1]}

    assert found == sorted(found)
    assert set(found) == {1.0, 2.0}


@pytest.mark.parametrize("save_old", [by_hfshard, by_others])
def test_a_pull_that_fails_leaves_the_old_checkpoint_under_its_names(
    save_old: Callable[[Path], None], repo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    save_old(target)
    before = files_of(target)
    rename = os.rename
    failures = 0
    while True:
        left = failures

        def failing(source: Any, target: Any, **options: Any) -> None:
            nonlocal left
            if not os.fspath(source).endswith(".kept"):
                left -= 1
                if left == -1:
                    raise OSError(errno.EIO, os.strerror(errno.EIO), target)
            rename(source, target, **options)

        monkeypatch.setattr(os, "rename", failing)
        try:
            hfshard.pull_checkpoint(repo, target)
            break
        except CommitUnfinishedError:
            break  # after the commit
        except CommitUndoneError:
            monkeypatch.undo()
            assert files_of(target) == before
        failures += 1
    monkeypatch.undo()
    hfshard.pull_checkpoint(repo, target)

    assert failures > 5
    assert files_of(target) == files_of(tmp_path / "pushed")


def test_a_pull_that_cannot_restore_the_old_index_keeps_the_shards_that_the_new_one_names(
    repo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    by_hfshard(target)
    rename = os.rename

    def failing(source: str, target: str, **options: Any) -> None:
        is_index = target.endswith("index.json")
        if target.endswith("model-00003-of-00003.safetensors") or (is_index and source.endswith(".kept")):
            raise OSError(errno.EIO, os.strerror(errno.EIO), target)
        rename(source, target, **options)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(CommitUndoneError):
        hfshard.pull_checkpoint(repo, target)
    monkeypatch.undo()

    assert values_by_all(target) == [1.0, 1.0, 1.0]


def test_a_pull_that_is_undone_flushes_what_it_puts_back_before_it_removes_what_replaced_it(
    repo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    by_hfshard(target)
    rename, unlink, fsync = os.rename, os.unlink, os.fsync
    done: list[str] = []

    def renaming(source: str, target: str, **options: Any) -> None:
        if target.endswith("model-00003-of-00003.safetensors") and not source.endswith(".kept"):
            done.clear()
            raise OSError(errno.EIO, os.strerror(errno.EIO), target)
        done.append(f"put back {os.path.basename(target)}")
        rename(source, target, **options)

    def unlinking(path: str, **options: Any) -> None:
        if os.path.dirname(path) == str(target):
            done.append(f"remove {re.sub('-[0-9a-f]{16}', '-RANDOM', os.path.basename(path))}")
        unlink(path, **options)

    def flushing(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}") == str(target):
            done.append("flush")
        fsync(fd)

    monkeypatch.setattr(os, "rename", renaming)
    monkeypatch.setattr(os, "unlink", unlinking)
    monkeypatch.setattr(os, "fsync", flushing)
    with pytest.raises(CommitUndoneError):
        hfshard.pull_checkpoint(repo, target)

    assert done == [
        "put back model-00002-of-00003.safetensors",
        "remove model-00001-of-00003.safetensors",
        "flush",
        "put back model-00003-of-00003.safetensors",
        "put back model-00001-of-00003.safetensors",
        "flush",
        "put back model.safetensors.index.json",
        "flush",
        "remove model-00003-of-00003-RANDOM.safetensors",
        "remove model-00001-of-00003-RANDOM.safetensors",
    ]


@pytest.mark.parametrize("save_old", [by_hfshard, by_others])
def test_a_pull_that_fails_restores_shards_that_are_links(
    save_old: Callable[[Path], None], repo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    save_old(target)
    (target / "blobs").mkdir()
    shards = sorted(target.glob("model-*"))
    for shard in shards:
        shard.rename(target / "blobs" / shard.name)
        shard.symlink_to(f"blobs/{shard.name}")
    rename = os.rename

    def failing(source: str, target: str, **options: Any) -> None:
        if target.endswith("model-00003-of-00003.safetensors") and source.endswith(".weights"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), target)
        rename(source, target, **options)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(CommitUndoneError):
        hfshard.pull_checkpoint(repo, target)
    monkeypatch.undo()

    assert [os.readlink(shard) for shard in shards] == [f"blobs/{shard.name}" for shard in shards]
    assert values_by_all(target) == [1.0, 1.0, 1.0]


def test_the_space_of_old_shards_is_free_though_the_staging_directory_stays(
    repo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    by_hfshard(target)

    def interrupted(path: str, *_: Any, **__: Any) -> None:
        if os.path.isdir(path):
            raise KeyboardInterrupt
        os.unlink(path)

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hfshard.pull_checkpoint(repo, target)
    left = [path for path in target.rglob("*.kept") if path.stat().st_size > 4096]

    assert left == []
    assert values_by_all(target) == [2.0, 2.0, 2.0]


def test_a_pull_that_is_refused_renames_nothing(repo: str, tmp_path: Path) -> None:
    (tmp_path / "pushed" / "2_Dense").mkdir()
    (tmp_path / "pushed" / "2_Dense" / "config.json").write_text("{}")
    hfshard.push_checkpoint(tmp_path / "pushed", repo)
    target = tmp_path / "target"
    by_hfshard(target)
    (target / "2_Dense").write_text("mine")
    before = files_of(target)

    with pytest.raises(SaveDirectoryError, match="is a file, but a save needs a folder of this name"):
        hfshard.pull_checkpoint(repo, target)

    assert files_of(target) == before


def test_weights_in_folders_are_copied_like_the_checkpoint_and_take_space(
    repo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hfshard.save_state_dict({"w": torch.ones(8 * MIB)}, tmp_path / "pushed" / "2_Dense")
    hfshard.push_checkpoint(tmp_path / "pushed", repo)
    full = os.statvfs_result((4096, 4096, 4096, 4096, 4096, 1000, 100, 100, 0, 255))  # 16 MiB are free

    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda _path: full)
        with pytest.raises(NotEnoughSpaceError, match="16,777,216 are free"):
            hfshard.pull_checkpoint(repo, tmp_path / "target")
    assert not (tmp_path / "target").exists()

    assert peak_during(lambda: hfshard.pull_checkpoint(repo, tmp_path / "target")) < 24 * MIB
    assert files_of(tmp_path / "target") == files_of(tmp_path / "pushed")


def test_shards_that_another_index_names_too_stay(repo: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    by_others(target)
    shutil.copy(target / "model.safetensors.index.json", target / "ema.safetensors.index.json")
    before = files_of(target)

    with pytest.raises(SaveDirectoryError, match=r"'model-00003-of-00003\.safetensors' with other contents"):
        hfshard.pull_checkpoint(repo, target)
    with pytest.raises(
        SaveDirectoryError, match=r"which has a file of this name with different contents.*new directory"
    ):
        hfshard.pull_checkpoint(repo, target, overwrite=True)

    assert files_of(target) == before


def test_a_shard_that_comes_between_the_checks_of_a_pull_stays(
    repo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    hfshard.save_state_dict(Three(1.0).state_dict(), target)
    flock = fcntl.flock
    locks = 0

    def locking(fd: int, operation: int) -> None:
        nonlocal locks
        if operation != fcntl.LOCK_UN and os.readlink(f"/proc/self/fd/{fd}").startswith(str(target)):
            locks += 1
            if locks == 2:
                save_file(Three(1.0).state_dict(), target / "model-00003-of-00003.safetensors")
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", locking)
    with pytest.raises(SaveDirectoryError, match=r"00003\.safetensors' cannot be pulled into"):
        hfshard.pull_checkpoint(repo, target)

    assert load_file(target / "model-00003-of-00003.safetensors")["a"][0] == 1.0


def test_a_pull_of_what_is_there_removes_the_weights_that_outrank_it(repo: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    hfshard.pull_checkpoint(repo, target)
    save_file(Three(1.0).state_dict(), target / "model.safetensors")

    hfshard.pull_checkpoint(repo, target)

    assert files_of(target) == files_of(tmp_path / "pushed")
    assert values_by_all(target) == [2.0, 2.0, 2.0]


def test_pickles_that_are_there_are_pulled_again(tmp_path: Path) -> None:
    (tmp_path / "pushed").mkdir()
    torch.save(Three(1.0).state_dict(), tmp_path / "pushed" / "pytorch_model.bin")
    hfshard.push_checkpoint(tmp_path / "pushed", tmp_path / "hub")

    for _ in range(2):
        hfshard.pull_checkpoint(str(tmp_path / "hub"), tmp_path / "target")

        assert files_of(tmp_path / "target") == files_of(tmp_path / "pushed")


def test_shards_in_a_folder_are_pulled(tmp_path: Path) -> None:
    folder = tmp_path / "pushed"
    by_others(folder)
    (folder / "shards").mkdir()
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for key, name in index["weight_map"].items():
        (folder / name).rename(folder / "shards" / name)
        index["weight_map"][key] = f"shards/{name}"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    hfshard.push_checkpoint(folder, tmp_path / "hub")

    for _ in range(2):
        hfshard.pull_checkpoint(str(tmp_path / "hub"), tmp_path / "target")

        assert files_of(tmp_path / "target") == files_of(folder)
    assert values_by_all(tmp_path / "target") == [1.0, 1.0, 1.0]


def test_a_single_file_with_another_config_is_refused_where_there_are_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, target = tmp_path / "pushed", tmp_path / "target"
    for place, value in ((folder, 2.0), (target, 1.0)):
        hfshard.save_state_dict(Three(value).state_dict(), place)
        (place / "config.json").write_text(json.dumps({"value": value}))
    hfshard.push_checkpoint(folder, tmp_path / "hub")
    before = files_of(target)

    def refuse(*_: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(SaveDirectoryError, match="has another config, on a file system without hard links"):
        hfshard.pull_checkpoint(str(tmp_path / "hub"), target)

    assert files_of(target) == before
