"""What is in a save directory: a disk that fails to read is no damage."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import hfshard
from hfshard.commit.directory_state import note_pending_deletes, read_directory_state
from hfshard.constants import STAGING_DIRECTORY
from hfshard.format.file_names import WeightNames

BIN_INDEX = "pytorch_model.bin.index.json"


@pytest.fixture
def pickled(tmp_path: Path) -> Path:
    """Two pickled shards with their index."""
    for number, name in enumerate("ab", 1):
        torch.save({name: torch.ones(2)}, tmp_path / f"pytorch_model-{number:05d}-of-00002.bin")
    weight_map = {name: f"pytorch_model-{number:05d}-of-00002.bin" for number, name in enumerate("ab", 1)}
    (tmp_path / BIN_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tmp_path


@pytest.mark.parametrize(("call", "number"), [("open", errno.EIO), ("open", errno.EACCES), ("read", errno.EIO)])
def test_an_index_that_the_disk_fails_to_read_is_not_taken_for_damage(
    call: str, number: int, pickled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(path.name for path in pickled.iterdir())
    kept = getattr(os, call)

    def failing(file: Any, *arguments: Any, **keywords: Any) -> Any:
        if (os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else str(file)).endswith(BIN_INDEX):
            raise OSError(number, os.strerror(number))
        return kept(file, *arguments, **keywords)

    monkeypatch.setattr(os, call, failing)
    with pytest.raises((hfshard.HfshardError, OSError), match=os.strerror(number)):
        hfshard.save_state_dict({"a": torch.zeros(2)}, pickled)

    monkeypatch.undo()
    assert sorted(path.name for path in pickled.iterdir()) == before
    hfshard.save_state_dict({"a": torch.zeros(2)}, pickled)
    assert [path.name for path in pickled.iterdir()] == ["model.safetensors"]


def test_the_files_of_a_damaged_index_are_left_alone(pickled: Path) -> None:
    (pickled / BIN_INDEX).write_text("{")

    hfshard.save_state_dict({"a": torch.zeros(2)}, pickled)

    assert len(list(pickled.glob("*.bin"))) == 2


@pytest.mark.parametrize(
    "shards",
    [["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], ["a.safetensors", "b.safetensors"]],
)
def test_noted_shards_of_others_are_leftovers_once_the_commit_that_noted_them_is_done(
    shards: list[str], tmp_path: Path
) -> None:
    hfshard.save_state_dict({"a": torch.zeros(2)}, tmp_path)
    for name in shards:
        save_file({name: torch.ones(2)}, tmp_path / name, metadata={"format": "pt"})
    staged = tmp_path / STAGING_DIRECTORY / "000.small"
    staged.parent.mkdir(parents=True)
    staged.touch()
    note_pending_deletes(str(tmp_path), dict.fromkeys(shards, staged.name))

    before_the_commit = read_directory_state(str(tmp_path), WeightNames()).leftovers
    staged.unlink()
    after_it = read_directory_state(str(tmp_path), WeightNames()).leftovers
    save_file({"other": torch.ones(2)}, tmp_path / shards[1], metadata={"format": "pt"})
    after_a_download = read_directory_state(str(tmp_path), WeightNames()).leftovers

    assert (before_the_commit, after_it, after_a_download) == ((), tuple(shards), (shards[0],))


def test_a_note_deletes_no_file_that_is_an_entry_or_that_an_index_names_or_that_was_changed(tmp_path: Path) -> None:
    files = ["model.safetensors", "model.ema.safetensors", "named.safetensors", "changed.safetensors"]
    for name in files:
        save_file({"a": torch.ones(2)}, tmp_path / name)
    weight_map = {"a": "named.safetensors"}
    (tmp_path / "model.safetensors.index.fp16.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (tmp_path / STAGING_DIRECTORY).mkdir(parents=True)
    note_pending_deletes(str(tmp_path), dict.fromkeys(files, "none"))
    save_file({"a": torch.zeros(2)}, tmp_path / "changed.safetensors")

    assert read_directory_state(str(tmp_path), WeightNames()).leftovers == ()
