"""Pulls into a directory of the user's, and pulls and loads from a directory that serves as a hub."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import BertModel

import hfshard
from hfshard.errors import CheckpointNotFoundError, HubNotFoundError, SaveDirectoryError
from hfshard.pull import pull_checkpoint
from hfshard.push import push_checkpoint
from tests.hub.models import Bert, digest_of, files_of, make_model, saved
from tests.hub.pull.pull_hub import PullHub

pytestmark = pytest.mark.compat
SHARDS = 10_000
WHOLE = "10MB"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved model of 9 shards, with what a user puts beside it and weights of other formats."""
    made = saved(tmp_path / "saved", 1, SHARDS)
    (made / "README.md").write_text("# A model\n")
    (made / "tokenizer.json").write_text("{}\n")
    (made / "1_Pooling").mkdir()
    (made / "1_Pooling" / "config.json").write_text("{}\n")
    return made


def test_pull_into_a_new_directory_gives_the_very_files(hub: PullHub, repo: str, folder: Path, tmp_path: Path) -> None:
    before = files_of(folder)
    saved(folder, 2, WHOLE, variant="fp16")
    (folder / "pytorch_model.bin").write_bytes(b"old")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.onnx").write_bytes(b"other")
    hub.publish(repo, folder)
    target = tmp_path / "a" / "b"

    assert hub.call("pull", repo, target, cache_dir=tmp_path / "cache", umask=0o027) == str(target)

    assert files_of(target) == before | {"config.json": (folder / "config.json").read_bytes()}
    modes = {oct(path.stat().st_mode & 0o777) for path in target.rglob("*") if path.is_file()}
    assert modes == {"0o640"}
    assert not any(path.is_symlink() or path.stat().st_nlink > 1 for path in target.rglob("*") if path.is_file())
    assert digest_of(Bert.from_pretrained(target, strict=True, verify="full").state_dict()) == digest_of(
        make_model(1).state_dict()
    )
    # Again: nothing comes, and nothing is written.
    written = {path: path.stat().st_mtime_ns for path in target.rglob("*")}
    hub.call("pull", repo, target, cache_dir=tmp_path / "cache")
    assert hub.kinds() == {"info": 1}
    assert {path: path.stat().st_mtime_ns for path in target.rglob("*")} == written


@pytest.mark.parametrize("patterns", [None, ["*"]])
def test_nothing_is_pulled_that_git_would_obey(
    hub: PullHub, repo: str, folder: Path, tmp_path: Path, patterns: list[str] | None
) -> None:
    hub.publish(repo, folder)
    hooks = {
        ".git/config": b"[core]",
        ".git/hooks/post-checkout": b"#!/bin/sh",
        ".GIT/config": b"",
        "a/.git/config": b"",
    }
    hub.view(repo).commit({**hooks, "a/b.git": b"1", ".gitignore": b"2"}, "Hooks")
    target = tmp_path / "there"
    hub.call("pull", repo, target, cache_dir=tmp_path / "cache", allow_patterns=patterns)

    names = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}
    assert {"a/b.git", ".gitignore"} <= names
    assert not [name for name in names if ".git/" in name.lower()]


def test_patterns_choose_among_the_other_files_only(hub: PullHub, repo: str, folder: Path, tmp_path: Path) -> None:
    hub.publish(repo, folder)

    hub.call("pull", repo, tmp_path / "a", cache_dir=tmp_path / "cache", allow_patterns="*.md")
    hub.call("pull", repo, tmp_path / "b", cache_dir=tmp_path / "cache", ignore_patterns=["1_*", "*.md"])

    weights = {name for name in files_of(folder) if name.startswith("model")} | {"config.json"}
    assert files_of(tmp_path / "a").keys() == weights | {"README.md"}
    assert files_of(tmp_path / "b").keys() == weights | {"tokenizer.json"}


def test_subfolder_and_variant_are_pulled_alone(hub: PullHub, repo: str, folder: Path, tmp_path: Path) -> None:
    saved(folder / "sub", 3, WHOLE, variant="fp16")
    saved(folder / "sub", 4, WHOLE)
    hub.publish(repo, folder)

    cached = hub.call("pull", repo, cache_dir=tmp_path / "cache", subfolder="sub", variant="fp16")
    hub.call("pull", repo, tmp_path / "target", cache_dir=tmp_path / "cache", subfolder="sub", variant="fp16")

    assert Path(cached).name == "sub"
    assert files_of(tmp_path / "target").keys() == {"config.json", "model.fp16.safetensors"}
    found = hfshard.load_state_dict(tmp_path / "target", variant="fp16")
    assert digest_of(found) == digest_of(make_model(3).state_dict())


@pytest.mark.parametrize(("old", "new"), [(WHOLE, WHOLE), (WHOLE, SHARDS), (SHARDS, WHOLE), (SHARDS, 20_000)])
def test_pull_over_another_checkpoint_replaces_it_whole(
    old: str | int, new: str | int, hub: PullHub, repo: str, tmp_path: Path
) -> None:
    pushed = saved(tmp_path / "pushed", 1, new)
    hub.publish(repo, pushed)
    target = saved(tmp_path / "target", 2, old)
    (target / "model_ema-00001-of-00002.safetensors").write_bytes(b"mine")
    (target / "README.md").write_text("mine")

    hub.call("pull", repo, target, cache_dir=tmp_path / "cache")

    kept = {"model_ema-00001-of-00002.safetensors": b"mine", "README.md": b"mine"}
    assert files_of(target) == files_of(pushed) | kept
    stock = BertModel.from_pretrained(target)
    assert digest_of(stock.state_dict()) == digest_of(make_model(1).state_dict())


def test_shards_of_the_same_names_and_other_contents_are_replaced(
    hub: PullHub, repo: str, folder: Path, tmp_path: Path
) -> None:
    hub.publish(repo, folder)
    target = saved(tmp_path / "target", 2, SHARDS)

    hub.call("pull", repo, target, cache_dir=tmp_path / "cache")

    assert files_of(target) == files_of(folder)
    assert digest_of(Bert.from_pretrained(target, strict=True, verify="full").state_dict()) == digest_of(
        make_model(1).state_dict()
    )


def test_files_of_the_user_are_refused_by_name_and_replaced_by_overwrite(
    hub: PullHub, repo: str, folder: Path, tmp_path: Path
) -> None:
    (folder / "train.py").write_text("theirs")
    hub.publish(repo, folder)
    target = tmp_path / "target"
    target.mkdir()
    for name in ("train.py", "tokenizer.json"):
        (target / name).write_text("mine")
    before = files_of(target)

    outcome = hub.refused("pull", repo, target, cache_dir=tmp_path / "cache")

    assert outcome.error == "SaveDirectoryError"
    assert "would replace or remove: 'tokenizer.json', 'train.py' with other contents" in outcome.message
    assert files_of(target) == before
    hub.call("pull", repo, target, cache_dir=tmp_path / "cache", overwrite=True)
    assert files_of(target) == files_of(folder)


def test_pickled_checkpoint_is_pulled_into_an_empty_directory_only(hub: PullHub, repo: str, tmp_path: Path) -> None:
    model = make_model(1)
    folder = tmp_path / "pickled"
    folder.mkdir()
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    hub.publish(repo, folder)

    hub.call("pull", repo, tmp_path / "target", cache_dir=tmp_path / "cache")
    outcome = hub.refused("pull", repo, saved(tmp_path / "other", 2), cache_dir=tmp_path / "cache")

    assert files_of(tmp_path / "target") == files_of(folder)
    assert outcome.error == "SaveDirectoryError"
    ours = hub.call("load", repo, tmp_path / "cache2")
    assert ours["digest"] == digest_of(model.state_dict())


def test_target_that_is_a_file_is_refused(hub: PullHub, repo: str, folder: Path, tmp_path: Path) -> None:
    hub.publish(repo, folder)
    (tmp_path / "file").write_text("")

    assert hub.refused("pull", repo, tmp_path / "file", cache_dir=tmp_path / "cache").error == "SaveDirectoryError"


@pytest.fixture
def directory_hub(folder: Path, tmp_path: Path) -> Path:
    """A directory hub: branch main has model 2 in one file; tag v1 model 1 in shards."""
    root = tmp_path / "hub" / "org" / "name"
    first = push_checkpoint(folder, str(root))
    from hfshard.hub.directory.directory_hub import DirectoryHub

    DirectoryHub.open(root).tag("v1", first.commit)
    push_checkpoint(saved(tmp_path / "second", 2, WHOLE), str(root))
    return root


@pytest.mark.parametrize("form", ["path", "file URL"])
def test_directory_hub_is_loaded_by_revision(form: str, directory_hub: Path) -> None:
    repo_id = str(directory_hub) if form == "path" else f"file://{directory_hub}"
    old, new = (digest_of(make_model(seed).state_dict()) for seed in (1, 2))

    main = Bert.from_pretrained(repo_id, strict=True)
    tagged = Bert.from_pretrained(repo_id, strict=True, revision="v1")

    assert digest_of(main.state_dict()) == new
    assert digest_of(tagged.state_dict()) == old
    assert main.name_or_path == tagged.name_or_path == repo_id
    assert digest_of(hfshard.load_state_dict(repo_id, revision="v1", ranges=True)) == old
    module = hfshard.load_model(make_model(3), repo_id, revision="v1")
    assert digest_of(module.state_dict()) == old
    with pytest.raises(HubNotFoundError):
        hfshard.load_state_dict(repo_id, revision="v9")


def test_directory_hub_is_pulled_into_a_directory(directory_hub: Path, folder: Path, tmp_path: Path) -> None:
    snapshot = Path(pull_checkpoint(str(directory_hub), revision="v1"))
    assert files_of(snapshot) == files_of(folder)

    pull_checkpoint(f"file://{directory_hub}", tmp_path / "target", revision="v1", verify="full")

    assert files_of(tmp_path / "target") == files_of(folder)
    for path in (path for path in (tmp_path / "target").rglob("*") if path.is_file()):
        assert path.stat().st_nlink == 1
        assert os.access(path, os.W_OK)
    with pytest.raises(SaveDirectoryError):
        pull_checkpoint(str(directory_hub), tmp_path / "second" / "config.json")
    with pytest.raises(HubNotFoundError):
        pull_checkpoint(str(tmp_path / "nowhere"))


def test_file_url_of_an_ordinary_directory_is_that_directory(folder: Path) -> None:
    assert digest_of(hfshard.load_state_dict(f"file://{folder}")) == digest_of(make_model(1).state_dict())
    with pytest.raises(CheckpointNotFoundError, match="There is no directory '/no/such'"):
        hfshard.load_state_dict("file:///no/such")
