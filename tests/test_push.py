"""Pushes into a directory hub: what a commit has, what a second push adds, and what a store has no use for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hfshard
from hfshard.errors import CheckpointNotFoundError, InvalidArgumentError
from hfshard.format.index import with_weights_override
from hfshard.hub.directory.directory_hub import DirectoryHub
from tests.commit.test_commit_plan_guide import OLD
from tests.commit.test_directory_commit import ONE_FILE, save
from tests.hub.models import files_of


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of two shards, with files that are pushed and a folder that never is."""
    directory = tmp_path / "saved"
    hfshard.save_state_dict({"a": torch.ones(3), "b": torch.zeros(3)}, directory, max_shard_size=1)
    for name in ("README.md", "onnx/notes.txt", ".GIT/HEAD", "onnx/__pycache__/x.pyc"):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(name)
    return directory


SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = "model.safetensors.index.json"
TEMPORARY = "model-hfshard-0123456789abcdef.safetensors"


def names_at(root: Path, revision: str = "main") -> list[str]:
    folder = Path(DirectoryHub.open(root).snapshot(revision))
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_directory_is_pushed_as_it_is_and_a_second_push_makes_no_commit(saved: Path, tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    first = hfshard.push_checkpoint(saved, hub, commit_message="First", commit_description="More")
    again = hfshard.push_checkpoint(saved, f"file://{hub}")

    assert names_at(hub) == ["README.md", *SHARDS, INDEX, "onnx/notes.txt"]
    assert first.is_new and len(first.commit) == 40
    assert first.url == f"{hub}/snapshots/{first.commit}"
    assert (again.commit, again.is_new) == (first.commit, False)
    branches = [one for one in DirectoryHub.open(hub).revisions() if one.kind == "branch"]
    assert [(one.name, one.commit, one.message) for one in branches] == [("main", first.commit, "First")]


def test_shards_of_an_earlier_push_go_and_other_files_stay(saved: Path, tmp_path: Path) -> None:
    hub, other = tmp_path / "hub", tmp_path / "other"
    first = hfshard.push_checkpoint(saved, hub)
    hfshard.save_state_dict({"a": torch.ones(3)}, other)
    second = hfshard.push_checkpoint(other, hub)

    assert second.is_new and second.commit != first.commit
    assert names_at(hub) == ["README.md", "model.safetensors", "onnx/notes.txt"]
    assert names_at(hub, first.commit) == ["README.md", *SHARDS, INDEX, "onnx/notes.txt"]


def test_patterns_choose_files_and_a_folder_of_the_repo_takes_them(saved: Path, tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    hfshard.push_checkpoint(
        saved, hub, revision="dev", path_in_repo="/a/./b/", ignore_patterns=["*.md", "onnx/*"], progress=False
    )

    assert names_at(hub, "dev") == [f"a/b/{name}" for name in (*SHARDS, INDEX)]
    with pytest.raises(InvalidArgumentError, match=rf"^The patterns exclude all weights of '{saved}'\. Check"):
        hfshard.push_checkpoint(saved, hub, allow_patterns="*.md")
    with pytest.raises(CheckpointNotFoundError):
        hfshard.push_checkpoint(saved / "onnx", hub)


@pytest.mark.parametrize(
    "option",
    [
        {"revision": "main"},
        {"create_pr": True},
        {"commit_message": "First"},
        {"commit_description": "More"},
        {"private": True},
        {"token": "hf_x"},
        {"card_picture": True},
    ],
    ids=str,
)
def test_what_only_a_hub_has_is_refused_for_a_store(saved: Path, option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(InvalidArgumentError) as raised:
        hfshard.push_checkpoint(saved, "s3://models//bert/", **option)
    assert str(raised.value) == (
        f"{name} is for a hub: 's3://models/bert' is in a store, which has no commits, and is accessed with its "
        "service's own settings. Leave it out."
    )
    assert raised.value.path == "s3://models/bert"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"card_picture": True, "path_in_repo": "a"}, "card_picture shows the checkpoint at the top of a repo"),
        ({"create_pr": True, "revision": "dev"}, "create_pr opens a pull request on main. Pass only one of "),
        ({"path_in_repo": "a/../b"}, r"path_in_repo must stay in the repo, got 'a/\.\./b'\."),
        ({"path_in_repo": "a/.Git"}, r"path_in_repo must not be in git's own folder, got 'a/\.Git'\."),
    ],
)
def test_options_that_contradict_are_refused_before_a_hub_is_made(
    saved: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{message}"):
        hfshard.push_checkpoint(saved, tmp_path / "hub", **options)
    assert not (tmp_path / "hub").exists()


def test_a_config_that_was_removed_after_its_save_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path / "out", OLD, ONE_FILE)
    (tmp_path / "out" / "config.json").unlink()

    hfshard.push_checkpoint(tmp_path / "out", tmp_path / "hub")

    path = tmp_path / "out" / "config.json"
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        f"File '{path}' is missing. Download or save the checkpoint again, or run 'hfshard verify {tmp_path / 'out'}'."
    ]
    assert names_at(tmp_path / "hub") == ["model.safetensors"]


def test_a_directory_is_pushed_as_saved_although_a_save_was_killed_at_its_commit(tmp_path: Path) -> None:
    save(tmp_path / "out", OLD, ONE_FILE)
    whole = files_of(tmp_path / "out")
    config = tmp_path / "out" / "config.json"
    (tmp_path / "out" / "model.safetensors").rename(tmp_path / "out" / TEMPORARY)
    config.write_bytes(with_weights_override(config.read_bytes(), TEMPORARY))

    pushed = hfshard.push_checkpoint(tmp_path / "out", tmp_path / "hub")

    assert files_of(Path(pushed.url)) == whole
