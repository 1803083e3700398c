"""Removals from directories: what goes, what stays, and what every reader finds when one is killed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import hfshard
from hfshard.disk.fsops import locked_directory
from hfshard.errors import (
    CheckpointChangedError,
    CheckpointNotFoundError,
    DirectoryLockedError,
    InvalidArgumentError,
    SaveDirectoryError,
)
from hfshard.remove import plan_removal
from tests.commit.test_commit_plan_guide import NEW, OLD, by_hub, by_transformers, state_dict
from tests.commit.test_directory_commit import ONE_FILE, SHARDS, listing, save

INDEX = "model.safetensors.index.json"


class Killed(BaseException):
    """What ends a removal at a system call."""


@contextmanager
def killed_at(number: int) -> Iterator[None]:
    """Let the n-th removal of a file in the block end the process, as it were."""
    unlink, left = os.unlink, [number]

    def counted(*args: Any, **keywords: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        unlink(*args, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "unlink", counted)
        yield


def test_a_checkpoint_goes_with_its_configs_and_other_files_stay(tmp_path: Path) -> None:
    save(tmp_path, OLD, SHARDS)
    for name in ("generation_config.json", "model.sig", "tokenizer.json", "README.md", "modeling.py"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "notes").mkdir()

    dry = hfshard.remove_checkpoint(tmp_path, dry_run=True)
    before = sorted(os.listdir(tmp_path))
    done = hfshard.remove_checkpoint(tmp_path)

    assert len(before) == 11
    assert sorted(os.listdir(tmp_path)) == ["README.md", "modeling.py", "notes", "tokenizer.json"]
    assert list(done.removed) == [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        INDEX,
        "config.json",
        "generation_config.json",
        "model.sig",
    ]
    assert list(done.kept) == ["README.md", "modeling.py", "notes/", "tokenizer.json"]
    assert (dry.removed, dry.kept, dry.is_done, done.is_done) == (done.removed, done.kept, False, True)
    assert done.removed["model.sig"] == 2


@pytest.mark.parametrize("variant", [None, "fp16"])
def test_variants_next_to_it_stay_with_the_config_that_they_share(variant: str | None, tmp_path: Path) -> None:
    save(tmp_path, OLD, SHARDS)
    hfshard.save_state_dict(state_dict(NEW), tmp_path, variant="fp16", max_shard_size=SHARDS)
    other = "fp16" if variant is None else None

    done = hfshard.remove_checkpoint(tmp_path, variant=variant)

    assert len(done.removed) == 4
    assert done.kept["config.json"] == "other weights stay, and may need it"
    assert hfshard.load_state_dict(tmp_path, variant=other, verify="full").keys() == {"a", "b", "c"}
    with pytest.raises(CheckpointNotFoundError):
        hfshard.load_state_dict(tmp_path, variant=variant)
    hfshard.remove_checkpoint(tmp_path, variant=other)
    assert os.listdir(tmp_path) == []


def _shards(folder: Path) -> None:
    save(folder, OLD, SHARDS)


def _single_file(folder: Path) -> None:
    save(folder, OLD, ONE_FILE)


def _single_file_and_old_pickles(folder: Path) -> None:
    save(folder, OLD, ONE_FILE)
    torch.save(state_dict(NEW), folder / "pytorch_model.bin")


def _shards_under_a_single_file(folder: Path) -> None:
    save(folder, NEW, SHARDS)
    save_file(state_dict(OLD), folder / "model.safetensors", metadata={"format": "pt"})


def _shards_and_one_of_a_killed_save(folder: Path) -> None:
    save(folder, OLD, SHARDS)
    save_file(state_dict(NEW), folder / "model-00001-of-00001.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "make",
    [
        _shards,
        _single_file,
        _single_file_and_old_pickles,
        _shards_under_a_single_file,
        _shards_and_one_of_a_killed_save,
    ],
)
def test_a_removal_that_is_killed_leaves_the_checkpoint_or_none(make: Any, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    make(tmp_path / "made")
    before = (by_transformers(tmp_path / "made"), by_hub(tmp_path / "made"))
    assert before[0] == "old"

    for number in range(20):
        place = Path(shutil.copytree(tmp_path / "made", tmp_path / f"{number}"))
        try:
            with killed_at(number):
                hfshard.remove_checkpoint(place)
        except Killed:
            is_killed = True
        else:
            is_killed = False
        seen = (by_transformers(place), by_hub(place))
        assert seen[0] in (before[0], "error")
        assert seen[1] in (before[1], "error")
        if not is_killed:
            break
        if os.listdir(place) != []:
            hfshard.remove_checkpoint(place)
            assert os.listdir(place) == []
    assert not is_killed
    assert os.listdir(place) == []
    assert number >= 2


def test_a_config_that_a_killed_removal_left_stays_if_it_was_changed_or_belongs_to_other_weights(
    tmp_path: Path,
) -> None:
    for name in ("changed", "other weights", "saved again"):
        save(tmp_path / name, OLD, ONE_FILE)
        with killed_at(1), pytest.raises(Killed):
            hfshard.remove_checkpoint(tmp_path / name)
        assert (tmp_path / name / "config.json").exists()
    (tmp_path / "changed" / "config.json").write_text('{"a": 1}')
    save_file(state_dict(NEW), tmp_path / "other weights" / "model.fp16.safetensors")
    save(tmp_path / "saved again", NEW, ONE_FILE)
    (tmp_path / "saved again" / "model.safetensors").unlink()

    with pytest.raises(CheckpointNotFoundError):
        hfshard.remove_checkpoint(tmp_path / "saved again")
    for name in ("changed", "other weights"):
        assert list(hfshard.remove_checkpoint(tmp_path / name).removed) == [".cache/huggingface/hfshard/removal.json"]
        with pytest.raises(CheckpointNotFoundError):
            hfshard.remove_checkpoint(tmp_path / name)

    for name in ("changed", "other weights", "saved again"):
        assert (tmp_path / name / "config.json").exists()


def test_a_damaged_index_goes_with_the_shards_that_have_its_names(tmp_path: Path) -> None:
    save(tmp_path, OLD, SHARDS)
    (tmp_path / INDEX).write_bytes(b"{")

    hfshard.remove_checkpoint(tmp_path)

    assert os.listdir(tmp_path) == []


def test_shards_that_another_index_names_stay(tmp_path: Path) -> None:
    save(tmp_path, OLD, SHARDS)
    shutil.copy(tmp_path / INDEX, tmp_path / "mine.safetensors.index.json")

    done = hfshard.remove_checkpoint(tmp_path)

    assert list(done.removed) == [INDEX]
    assert hfshard.load_state_dict(tmp_path / "mine.safetensors.index.json", verify="full").keys() == {"a", "b", "c"}


def test_weights_that_a_config_names_are_refused(tmp_path: Path) -> None:
    save_file(state_dict(OLD), tmp_path / "mine.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text('{"transformers_weights": "mine.safetensors"}')

    with pytest.raises(InvalidArgumentError, match=r"names 'mine.safetensors' as the model's weights"):
        hfshard.remove_checkpoint(tmp_path)

    assert sorted(os.listdir(tmp_path)) == ["config.json", "mine.safetensors"]


def test_what_changed_since_it_was_shown_is_not_removed(tmp_path: Path) -> None:
    save(tmp_path, OLD, SHARDS)
    removal = plan_removal(tmp_path)
    save(tmp_path, NEW, SHARDS)

    with pytest.raises(CheckpointChangedError, match="changed after its files were listed"):
        removal.carry_out()

    assert by_transformers(tmp_path) == "new"


def test_a_directory_in_which_a_process_saves_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, OLD, SHARDS)
    monkeypatch.setattr("hfshard.commit.removal.LOCK_WAIT_SECONDS", 0.0)

    with locked_directory(str(tmp_path), wait_seconds=0), pytest.raises(DirectoryLockedError):
        hfshard.remove_checkpoint(tmp_path)

    assert by_transformers(tmp_path) == "old"


def test_leftovers_of_killed_saves_go_and_the_checkpoint_stays(tmp_path: Path) -> None:
    save(tmp_path, OLD, SHARDS)
    before = listing(tmp_path)
    hfshard.save_state_dict(state_dict(NEW), tmp_path / "other", max_shard_size=SHARDS)
    left = "model-00001-of-00009.safetensors"
    shutil.copy(tmp_path / "other" / "model-00001-of-00003.safetensors", tmp_path / left)
    staging = tmp_path / ".cache/huggingface/hfshard"
    staging.mkdir(parents=True)
    (staging / "1.safetensors").write_bytes(b"12345")

    dry = hfshard.remove_checkpoint(tmp_path, leftovers=True, dry_run=True)
    done = hfshard.remove_checkpoint(tmp_path, leftovers=True)
    again = hfshard.remove_checkpoint(tmp_path, leftovers=True)

    assert dry.removed == {left: 4104, ".cache/huggingface/hfshard/1.safetensors": 5}
    assert (done.removed, again.removed) == (dry.removed, {})
    assert again.kept["config.json"] == again.kept[INDEX] == "not a leftover of a save"
    shutil.rmtree(tmp_path / "other")
    assert listing(tmp_path) == before
    assert not (tmp_path / ".cache").exists()


def test_a_place_without_a_checkpoint_is_an_error_and_nothing_goes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"")

    with pytest.raises(CheckpointNotFoundError, match="only leftovers of a killed save"):
        hfshard.remove_checkpoint(tmp_path)
    with pytest.raises(InvalidArgumentError, match="is a file"):
        hfshard.remove_checkpoint(tmp_path / "config.json")

    assert sorted(os.listdir(tmp_path)) == ["config.json", "model-00001-of-00002.safetensors"]


def test_hubs_are_refused_by_name(tmp_path: Path) -> None:
    hfshard.save_state_dict(state_dict(OLD), tmp_path / "out")
    hfshard.push_checkpoint(tmp_path / "out", str(tmp_path / "hub"))
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    shutil.copytree(tmp_path / "out", snapshot)

    with pytest.raises(SaveDirectoryError, match=r"hfshard revisions .*/hub --delete REVISION"):
        hfshard.remove_checkpoint(tmp_path / "hub")
    with pytest.raises(SaveDirectoryError, match="hf cache rm"):
        hfshard.remove_checkpoint(snapshot)
    with pytest.raises(CheckpointNotFoundError, match="hf repos delete org/name"):
        hfshard.remove_checkpoint("org/name")
