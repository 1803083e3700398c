"""Pulls from a directory hub: into a directory, by revision and variant, and arguments that a store has no use for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import hfshard
from hfshard.errors import CheckpointNotFoundError, HubNotFoundError, InvalidArgumentError, SaveDirectoryError
from hfshard.hub.directory.directory_hub import DirectoryHub


@pytest.fixture
def hub(tmp_path: Path) -> str:
    """A hub with two commits: ones on "v1", twos on main, both with a half-precision variant and other files."""
    directory = tmp_path / "saved"
    for value, revision in ((1.0, "v1"), (2.0, "main")):
        tensors = {"a": torch.full((3,), value)}
        hfshard.save_state_dict(tensors, directory)
        hfshard.save_state_dict({"a": tensors["a"].half()}, directory, variant="fp16")
        (directory / "README.md").write_text(revision)
        (directory / "notes.txt").write_text(revision)
        hfshard.push_checkpoint(directory, tmp_path / "hub", revision=revision)
    return str(tmp_path / "hub")


def value_in(directory: str | Path, variant: str | None = None) -> float:
    return float(hfshard.load_state_dict(directory, variant=variant)["a"][0])


def test_a_pull_copies_the_checkpoint_and_other_files_but_no_other_variant(hub: str, tmp_path: Path) -> None:
    found = hfshard.pull_checkpoint(hub, tmp_path / "to", verify="full")

    assert found == str(tmp_path / "to")
    names = ["README.md", "model.safetensors", "notes.txt"]
    assert sorted(name for name in os.listdir(found) if name != ".cache") == names
    assert value_in(found) == 2.0
    half = hfshard.pull_checkpoint(f"file://{hub}", tmp_path / "half", variant="fp16", ignore_patterns="*.txt")
    assert sorted(name for name in os.listdir(half) if name != ".cache") == ["README.md", "model.fp16.safetensors"]
    assert value_in(half, "fp16") == 2.0


def test_without_a_directory_the_snapshot_itself_is_given(hub: str) -> None:
    assert hfshard.pull_checkpoint(hub) == DirectoryHub.open(hub).snapshot("main")
    assert value_in(hfshard.pull_checkpoint(hub, revision="v1")) == 1.0
    with pytest.raises(HubNotFoundError, match="v9"):
        hfshard.pull_checkpoint(hub, revision="v9")
    with pytest.raises(CheckpointNotFoundError):
        hfshard.pull_checkpoint(hub, variant="bf16")


def test_files_of_the_user_stop_a_pull_unless_they_may_be_replaced(hub: str, tmp_path: Path) -> None:
    to = tmp_path / "to"
    hfshard.pull_checkpoint(hub, to, revision="v1")
    (to / "notes.txt").write_text("mine")

    with pytest.raises(SaveDirectoryError, match=r"notes\.txt"):
        hfshard.pull_checkpoint(hub, to)
    assert ((to / "notes.txt").read_text(), value_in(to)) == ("mine", 1.0)
    hfshard.pull_checkpoint(hub, to, overwrite=True)
    assert ((to / "notes.txt").read_text(), value_in(to)) == ("main", 2.0)


@pytest.mark.parametrize(
    "option",
    [
        {"revision": "main"},
        {"token": True},
        {"cache_dir": "cache"},
        {"local_files_only": True},
        {"force_download": True},
    ],
    ids=str,
)
def test_what_only_a_hub_has_is_refused_for_a_store(option: dict[str, Any], tmp_path: Path) -> None:
    (name,) = option
    with pytest.raises(InvalidArgumentError) as raised:
        hfshard.pull_checkpoint("S3://models//bert/", tmp_path / "to", **option)
    assert str(raised.value) == (
        f"{name} is for a hub: 's3://models/bert' is in a store, which has no revisions and no cache. Leave it out."
    )
    assert not (tmp_path / "to").exists()


def test_a_store_has_no_cache_and_patterns_are_text() -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        hfshard.pull_checkpoint("s3://models/bert", token=False)
    assert str(raised.value) == (
        "'s3://models/bert' is in a store, which has no cache. Pass local_dir, a directory or another "
        "address (hfshard pull ADDRESS DIR)."
    )
    patterns: Any = ["*.json", 3]
    with pytest.raises(InvalidArgumentError, match=r"ignore_patterns must be globs, got \['\*\.json', 3\]\.$"):
        hfshard.pull_checkpoint("org/name", ignore_patterns=patterns)


def test_a_pattern_that_matches_no_file_is_warned_of(
    hub: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hfshard.pull_checkpoint(hub, tmp_path / "to", allow_patterns=["REDME*", "notes.*", "*.safetensors"])

    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["No file matches 'REDME*': nothing is pulled for it."]
    assert sorted(name for name in os.listdir(tmp_path / "to") if name != ".cache") == [
        "model.safetensors",
        "notes.txt",
    ]
