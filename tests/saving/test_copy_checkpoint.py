"""Copies of checkpoints: the same tensors in the same files, the files beside them, and saved contents restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hfshard
from hfshard.checkpoint.locate import CheckpointQuery
from hfshard.disk.byte_source import ByteSource, BytesSource
from hfshard.errors import CheckpointNotFoundError, InvalidArgumentError, SaveDirectoryError
from hfshard.format.index import CheckpointIndex
from hfshard.hub.push_files import PushContents
from hfshard.places.place import DirectoryPlace
from hfshard.saving.copy_checkpoint import copy_checkpoint, listed, without_marks
from tests.hub.models import files_of

SYNCED = "-00000007-00112233445566ff"
"""The end of the names of a save's objects, which another tool has synced from a store."""


def copied(source: Path, target: Path, query: CheckpointQuery, **options: Any) -> str:
    files = DirectoryPlace(str(source)).files(follow_links=True)
    return copy_checkpoint(files, DirectoryPlace(str(target)), query, **options)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Two shards, with other files and a folder beside them."""
    directory = tmp_path / "source"
    hfshard.save_state_dict({"a": torch.ones(3), "b": torch.zeros(3)}, directory, max_shard_size=1)
    (directory / "onnx").mkdir()
    for name in ("tokenizer.json", "README.md", "onnx/notes.txt"):
        (directory / name).write_text(f'{{"from": "{name}"}}')
    return directory


def raw_of(source: ByteSource) -> bytes:
    with source.open() as reader:
        return reader.read()


def test_a_copy_has_the_same_bytes_in_the_same_files(source: Path, tmp_path: Path) -> None:
    found = copied(source, tmp_path / "to", CheckpointQuery(), verify="full", progress=False)

    assert found == str(tmp_path / "to")
    assert sorted(files_of(tmp_path / "to")) == [
        "README.md",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "onnx/notes.txt",
        "tokenizer.json",
    ]
    assert files_of(tmp_path / "to") == files_of(source)


def test_patterns_choose_the_other_files_and_never_the_weights(source: Path, tmp_path: Path) -> None:
    query = CheckpointQuery(allow_patterns=["*.json", "*.txt"], ignore_patterns=["onnx/*"])
    copied(source, tmp_path / "to", query)

    assert files_of(source).keys() - files_of(tmp_path / "to").keys() == {"README.md", "onnx/notes.txt"}
    with pytest.raises(CheckpointNotFoundError):
        copied(source, tmp_path / "half", CheckpointQuery(variant="fp16"))


def test_objects_of_saves_that_were_synced_stay_behind(source: Path, tmp_path: Path) -> None:
    (source / f"mine{SYNCED}.txt").write_text("of the user: nothing of that save is here")
    copied(source, tmp_path / "first", CheckpointQuery())
    (source / f"model-00001-of-00001{SYNCED}.safetensors").write_text("of a save")
    copied(source, tmp_path / "second", CheckpointQuery())

    assert files_of(tmp_path / "first").keys() - files_of(tmp_path / "second").keys() == {f"mine{SYNCED}.txt"}


def test_files_of_the_user_in_the_target_are_an_error_unless_they_may_be_replaced(source: Path, tmp_path: Path) -> None:
    to = tmp_path / "to"
    hfshard.save_state_dict({"a": torch.full((3,), 7.0)}, to)
    (to / "onnx").mkdir()
    (to / "onnx" / "notes.txt").write_text("mine")
    before = files_of(to)

    with pytest.raises(SaveDirectoryError, match=r"onnx/notes\.txt"):
        copied(source, to, CheckpointQuery())
    assert files_of(to) == before
    copied(source, to, CheckpointQuery(), overwrite=True)
    assert files_of(to) == files_of(source)


def test_globs_are_one_text_or_a_sequence_of_them() -> None:
    assert listed(None) is None
    assert listed("*.json") == ["*.json"]
    assert listed(("a", "b")) == ["a", "b"]
    wrong: list[Any] = [b"*.json", {"*.json"}, [None], 3]
    for patterns in wrong:
        with pytest.raises(InvalidArgumentError) as raised:
            listed(patterns)
        assert str(raised.value) == f"allow_patterns and ignore_patterns must be globs, got {patterns!r}."


@pytest.mark.parametrize("usual", ["model.safetensors", "model.safetensors.index.json"])
def test_a_config_that_was_synced_in_the_middle_of_a_commit_is_restored(usual: str) -> None:
    entry = usual.replace("model", "model-hfshard-0123456789abcdef")
    config = b'{\n  "transformers_weights": "%s",\n  "a": 1\n}\n' % entry.encode()
    contents = {"config.json": BytesSource(config), entry: BytesSource(b"new"), "b": BytesSource(b"other")}
    index = CheckpointIndex({"a": "model.safetensors"}, total_size=12)
    found = PushContents({**contents}, {None: index}, {None: entry})

    restored = {name: raw_of(one) for name, one in without_marks(found).contents.items()}

    assert restored == {"config.json": b'{\n  "a": 1\n}\n', "b": b"other", usual: b"new"}
    assert set(found.contents) == {"config.json", entry, "b"}
