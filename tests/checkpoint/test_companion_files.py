"""Files beside a re-sharded checkpoint: they go along, and never over what stands there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hfshard
from hfshard.errors import SaveDirectoryError


def saved(directory: Path) -> Path:
    hfshard.save_state_dict({"a": torch.arange(100.0), "b": torch.ones(50)}, directory)
    (directory / "tokenizer.json").write_text("{}")
    (directory / "README.md").write_text("the source's")
    (directory / ".env").write_text("TOKEN=secret")
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_what_begins_with_a_dot_stays_where_it_is(tmp_path: Path) -> None:
    hfshard.reshard_checkpoint(saved(tmp_path / "src"), tmp_path / "dst")
    assert sorted(contents(tmp_path / "dst")) == ["README.md", "model.safetensors", "tokenizer.json"]


def test_another_file_by_the_name_of_one_that_goes_along_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    saved(tmp_path / "src")
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst" / "tokenizer.json").write_text("mine")
    with pytest.raises(SaveDirectoryError, match=r"tokenizer\.json' already exists.*Move it away"):
        hfshard.reshard_checkpoint(tmp_path / "src", tmp_path / "dst")
    assert contents(tmp_path / "dst") == {"tokenizer.json": b"mine"}


def test_a_folder_by_the_name_of_a_file_that_goes_along_is_refused_too(tmp_path: Path) -> None:
    saved(tmp_path / "src")
    (tmp_path / "dst" / "tokenizer.json").mkdir(parents=True)
    with pytest.raises(SaveDirectoryError, match="already exists"):
        hfshard.reshard_checkpoint(tmp_path / "src", tmp_path / "dst")
    assert contents(tmp_path / "dst") == {}


def test_the_same_file_and_a_readme_of_its_own_are_no_obstacle(tmp_path: Path) -> None:
    saved(tmp_path / "src")
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst" / "tokenizer.json").write_text("{}")
    (tmp_path / "dst" / "README.md").write_text("mine")
    for size in ("1GB", 1):
        hfshard.reshard_checkpoint(tmp_path / "src", tmp_path / "dst", size)
    found = contents(tmp_path / "dst")
    assert found["README.md"] == b"mine" and found["tokenizer.json"] == b"{}"
    assert hfshard.verify_checkpoint(tmp_path / "dst").ok
