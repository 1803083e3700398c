"""Pulls from a store, and into one, where files of the user's own are in the way: refused by name, or they stay."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import hfshard
from hfshard.errors import SaveDirectoryError
from tests.hub import models
from tests.stores.suite.conftest import Place

pytestmark = pytest.mark.parametrize("scheme", ["s3"])
OLD = {"a": torch.ones(3000), "b": torch.zeros(9)}
NEW = {"a": torch.full((3000,), 2.0), "b": torch.zeros(9)}
CHECKPOINT = {"config.json": '{"model_type": "bert"}', "tokenizer.json": '{"version": "1.0"}'}
OTHERS = {"train.py": "theirs", ".env": "TOKEN=theirs", "notes/todo.txt": "theirs"}


@pytest.fixture
def pushed(tmp_path: Path) -> Path:
    """A directory with a checkpoint in two shards, and other files."""
    hfshard.save_state_dict(OLD, tmp_path / "pushed", max_shard_size=1)
    for name, text in (CHECKPOINT | OTHERS | {"README.md": "# First"}).items():
        put(tmp_path / "pushed" / name, text)
    return tmp_path / "pushed"


@pytest.fixture
def source(store: Place, pushed: Path) -> str:
    """A store with what was pushed there."""
    hfshard.push_checkpoint(pushed, store.path)
    return store.path


def files_of(folder: Path) -> dict[str, bytes]:
    """Path in a directory -> bytes; without the index, which records the config in a store."""
    return {path: raw for path, raw in models.files_of(folder).items() if path != "model.safetensors.index.json"}


def put(path: Path, text: str) -> None:
    """Write a file, in a folder that may be missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_pull_from_a_store_refuses_files_of_the_user_by_name(source: str, pushed: Path, tmp_path: Path) -> None:
    target = tmp_path / "mine"
    for name in (*OTHERS, *CHECKPOINT, "README.md"):
        put(target / name, "mine")
    before = files_of(target)

    with pytest.raises(SaveDirectoryError) as caught:
        hfshard.pull_checkpoint(source, target)

    assert str(caught.value) == (
        f"'{target}' has files of its own that this pull would replace or remove: '.env', 'config.json', "
        "'notes/todo.txt', 'tokenizer.json', 'train.py' with other contents. Nothing was written. Pull into a new "
        "directory, move the files away, or pass overwrite=True (hfshard pull --force) to replace them."
    )
    assert files_of(target) == before
    hfshard.pull_checkpoint(source, target, overwrite=True)
    assert files_of(target) == files_of(pushed)


def test_a_pull_over_an_older_pull_from_a_store(
    source: str, pushed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = tmp_path / "mine"
    hfshard.pull_checkpoint(source, target)
    assert files_of(target) == files_of(pushed)
    hfshard.pull_checkpoint(source, target)
    assert files_of(target) == files_of(pushed)
    hfshard.save_state_dict(NEW, pushed, max_shard_size=1)
    for name, text in CHECKPOINT.items():
        put(pushed / name, f"{text} ")
    put(pushed / "README.md", "# Second")
    hfshard.push_checkpoint(pushed, source)

    hfshard.pull_checkpoint(source, target)

    assert torch.equal(hfshard.load_state_dict(target, verify="full")["a"], NEW["a"])
    assert (target / "config.json").read_text() == CHECKPOINT["config.json"] + " "
    assert (target / "tokenizer.json").read_text() == CHECKPOINT["tokenizer.json"] + " "
    assert (target / "README.md").read_text() == "# First"
    assert "README.md', although the checkpoint's differs" in caplog.text
    put(pushed / "train.py", "theirs, later")
    hfshard.push_checkpoint(pushed, source)
    before = files_of(target)
    with pytest.raises(SaveDirectoryError, match=r"remove: 'train\.py' with other contents"):
        hfshard.pull_checkpoint(source, target)
    assert files_of(target) == before
    hfshard.pull_checkpoint(source, target, overwrite=True)
    assert [(target / name).read_text() for name in ("train.py", "README.md")] == ["theirs, later", "# Second"]


def test_another_models_shards_stay_or_are_refused(source: str, tmp_path: Path) -> None:
    target = tmp_path / "mine"
    put(target / "model_ema-00001-of-00002.safetensors", "mine")
    put(target / "model_ema-00002-of-00002.safetensors", "mine")
    index = {"weight_map": {name: f"model_ema-0000{name}-of-00002.safetensors" for name in "12"}}
    put(target / "model_ema.safetensors.index.json", json.dumps(index))
    before = files_of(target)

    hfshard.pull_checkpoint(source, target)
    hfshard.pull_checkpoint(source, target)

    assert files_of(target).items() >= before.items()
    (target / "model.safetensors.index.json").unlink()
    before = files_of(target)
    with pytest.raises(
        SaveDirectoryError, match=r"weights that no index names: 'model-00001-of-00002\.safetensors', 'm"
    ):
        hfshard.pull_checkpoint(source, target)
    assert files_of(target) == before


def test_a_file_that_is_written_during_a_pull_from_a_store_is_not_replaced(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "mine"
    sync = os.fsync

    def sync_while_the_user_writes(fd: int) -> None:
        """Files are flushed before the commit."""
        sync(fd)
        put(target / "train.py", "mine")

    monkeypatch.setattr(os, "fsync", sync_while_the_user_writes)
    with pytest.raises(SaveDirectoryError, match=r"'train\.py' in .* changed during the pull"):
        hfshard.pull_checkpoint(source, target)

    assert files_of(target) == {"train.py": b"mine"}


def test_a_pull_into_a_store_refuses_what_is_there(store: Place, pushed: Path, tmp_path: Path) -> None:
    hfshard.push_checkpoint(pushed, tmp_path / "hub")
    for name in ("train.py", "notes/todo.txt", "config.json", "README.md"):
        store.put(name, b"mine")
    before = store.files()

    with pytest.raises(SaveDirectoryError, match=r"remove: 'config\.json', 'notes/todo\.txt', 'train\.py' with other"):
        hfshard.pull_checkpoint(tmp_path / "hub", store.path)

    assert store.files() == before
    hfshard.pull_checkpoint(tmp_path / "hub", store.path, overwrite=True)
    assert store.files()["train.py"] == b"theirs"
    assert store.files()["README.md"] == b"# First"


def test_a_pull_into_a_store_replaces_the_checkpoint_there(store: Place, pushed: Path, tmp_path: Path) -> None:
    hfshard.push_checkpoint(pushed, store.path)
    store.put("README.md", b"mine")
    hfshard.save_state_dict(NEW, pushed, max_shard_size=1)
    put(pushed / "config.json", "{}")
    put(pushed / "tokenizer.json", "{}")
    hfshard.push_checkpoint(pushed, tmp_path / "hub")

    hfshard.pull_checkpoint(tmp_path / "hub", store.path)

    assert torch.equal(hfshard.load_state_dict(store.path, verify="full")["a"], NEW["a"])
    found = [store.files()[name].rstrip() for name in ("config.json", "tokenizer.json", "README.md")]
    assert found == [b"{}", b"{}", b"mine"]
