"""Opening a checkpoint: what it costs for each of many files, counted in system calls."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import hfshard
from hfshard.checkpoint.open_checkpoint import open_checkpoint
from hfshard.errors import UnsafePathError


def saved(directory: Path, count: int) -> str:
    """A checkpoint of so many files, a tensor in each, below a few folders."""
    directory = directory / "some" / "folders" / f"of-{count}"
    hfshard.save_state_dict({f"{number:02}": torch.ones(8) for number in range(count)}, directory, max_shard_size=1)
    assert len(list(directory.glob("*.safetensors"))) == count
    return str(directory)


def test_the_folders_of_a_path_are_looked_at_once_and_not_for_each_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Any] = []
    lstat = os.lstat

    def noted(path: Any, **options: Any) -> os.stat_result:
        looks.append(path)
        return lstat(path, **options)

    found = {}
    for count in (5, 25):
        directory = saved(tmp_path, count)
        with monkeypatch.context() as patch:
            patch.setattr(os, "lstat", noted)
            looks.clear()
            with open_checkpoint(directory) as checkpoint:
                assert len(checkpoint.shards) == count
            found[count] = len(looks)
    assert found[25] - found[5] == 20  # one for each file more


def test_a_folder_that_is_a_link_to_outside_is_refused_among_many_files(tmp_path: Path) -> None:
    directory = Path(saved(tmp_path, 5))
    index = directory / "model.safetensors.index.json"
    (tmp_path / "outside").mkdir()
    name = "model-00003-of-00005.safetensors"
    (directory / name).rename(tmp_path / "outside" / name)
    (directory / "sub").symlink_to(tmp_path / "outside")
    index.write_text(index.read_text().replace(name, f"sub/{name}"))
    with pytest.raises(UnsafePathError, match="a folder in its path is a link"), open_checkpoint(str(directory)):
        pass


def test_files_below_a_linked_directory_and_linked_files_are_read(tmp_path: Path) -> None:
    directory = Path(saved(tmp_path, 5))
    name = "model-00003-of-00005.safetensors"
    (directory / name).rename(tmp_path / name)
    (directory / name).symlink_to(tmp_path / name)
    (tmp_path / "link").symlink_to(directory)
    with open_checkpoint(str(tmp_path / "link")) as checkpoint:
        assert checkpoint.keys == ["00", "01", "02", "03", "04"]
