"""Where a save goes: however its directory is written, nothing beside and above it is touched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import hfshard
from hfshard.errors import NotEnoughSpaceError, SaveDirectoryError

TOO_LARGE = {"weight": torch.zeros(1).expand(2**50)}
"""4 PiB that take four bytes of memory."""


@pytest.mark.parametrize("written", ["a/b/", "a/b//", "./a/b/", "a/b"])
@pytest.mark.parametrize("exists", [True, False])
def test_failed_save_leaves_the_directories_above(
    written: str, exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if exists:
        (tmp_path / "a" / "b").mkdir(parents=True)
    else:
        (tmp_path / "a").mkdir()
    with pytest.raises(NotEnoughSpaceError):
        hfshard.save_state_dict(TOO_LARGE, written)
    assert (tmp_path / "a").is_dir()
    assert (tmp_path / "a" / "b").is_dir() == exists


@pytest.mark.parametrize("written", [".", "./", "out/", "link", "link/", "link/../beside"])
def test_directory_may_be_written_in_any_way(written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real/inner")
    monkeypatch.chdir(tmp_path)
    hfshard.save_state_dict({"a": torch.ones(1)}, written)
    assert torch.equal(hfshard.load_state_dict(written)["a"], torch.ones(1))
    if written == "link/../beside":
        assert (tmp_path / "real" / "beside" / "model.safetensors").is_file()
        assert not (tmp_path / "beside").exists()


@pytest.mark.parametrize("max_shard_size", ["1GB", "2KB"])
@pytest.mark.parametrize(
    "name", ["model.safetensors", "model.safetensors.index.json", "config.json", "generation_config.json"]
)
def test_a_directory_in_the_place_of_a_file_is_refused_before_anything_changes(
    name: str, max_shard_size: str, tmp_path: Path
) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=10, n_embd=4, n_layer=1, n_head=1, n_positions=4))
    (tmp_path / name / "inner").mkdir(parents=True)

    with pytest.raises(SaveDirectoryError, match=rf"{name}' is a directory, but a file of this name must be"):
        hfshard.save_model(model, tmp_path, max_shard_size=max_shard_size)

    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == [name, f"{name}/inner"]
