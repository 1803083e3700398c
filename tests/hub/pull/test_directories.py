"""Pulls into a directory of the user's, and pulls and loads from a directory that serves as a hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from transformers import BertModel

import hfshard
from hfshard.cli.main import main
from hfshard.errors import CheckpointNotFoundError, HubNotFoundError, IntegrityError, SaveDirectoryError
from hfshard.hub.directory.directory_hub import DirectoryHub
from hfshard.pull import pull_checkpoint
from hfshard.push import push_checkpoint
from tests.hub.models import Bert, digest_of, digest_of_seed, files_of, make_model, saved
from tests.hub.pull.pull_hub import PullHub
from tests.saving.helpers import flip

pytestmark = pytest.mark.compat
SHARDS = 10_000
WHOLE = "10MB"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved model of 9 shards, with what a user puts beside it and weights of other formats."""
    made = saved(tmp_path / "saved", 1, SHARDS)
    for name, text in {"README.md": "# A model\n", "tokenizer.json": "{}\n", "1_Pooling/config.json": "{}\n"}.items():
        put(made / name, text)
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
    assert digest_of(Bert.from_pretrained(target, strict=True, verify="full").state_dict()) == digest_of_seed(1)
    # Again: nothing comes, and nothing is written.
    written = {path: path.stat().st_mtime_ns for path in target.rglob("*")}
    hub.call("pull", repo, target, cache_dir=tmp_path / "cache")
    assert hub.kinds() == {"info": 1}
    assert {path: path.stat().st_mtime_ns for path in target.rglob("*")} == written


@pytest.mark.parametrize("patterns", [None, ["*"]])
def test_nothing_is_pulled_that_git_python_or_hfshard_would_obey(
    hub: PullHub, repo: str, folder: Path, tmp_path: Path, patterns: list[str] | None
) -> None:
    hub.publish(repo, folder)
    hooks = [".git/config", ".git/hooks/post-checkout", ".GIT/config", "a/.git/config"]
    hooks += [".cache/huggingface/hfshard/001.small", "a/.cache/x", "__pycache__/x.pyc"]
    hub.view(repo).commit(dict.fromkeys([*hooks, "a/b.git", ".gitignore"], b"#!/bin/sh"), "Hooks")
    hub.call("pull", repo, tmp_path / "there", cache_dir=tmp_path / "cache", allow_patterns=patterns)

    names = files_of(tmp_path / "there").keys()
    assert {"a/b.git", ".gitignore"} <= names
    assert not [name for name in names if re.search(r"\.git/|\.cache/|__pycache__/", name.lower())]


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
    assert digest_of(found) == digest_of_seed(3)


@pytest.mark.parametrize(
    ("old", "new"), [(WHOLE, WHOLE), (WHOLE, SHARDS), (SHARDS, WHOLE), (SHARDS, SHARDS), (SHARDS, 20_000)]
)
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
    assert digest_of(BertModel.from_pretrained(target).state_dict()) == digest_of_seed(1)
    assert digest_of(Bert.from_pretrained(target, strict=True, verify="full").state_dict()) == digest_of_seed(1)


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
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    hub.publish(repo, folder)

    hub.call("pull", repo, tmp_path / "target", cache_dir=tmp_path / "cache")
    outcome = hub.refused("pull", repo, saved(tmp_path / "other", 2), cache_dir=tmp_path / "cache")

    assert files_of(tmp_path / "target") == files_of(folder)
    assert outcome.error == "SaveDirectoryError"
    assert hub.call("load", repo, tmp_path / "cache2")["digest"] == digest_of_seed(1)


def test_target_that_is_a_file_is_refused(hub: PullHub, repo: str, folder: Path, tmp_path: Path) -> None:
    hub.publish(repo, folder)
    (tmp_path / "file").write_text("")

    assert hub.refused("pull", repo, tmp_path / "file", cache_dir=tmp_path / "cache").error == "SaveDirectoryError"


@pytest.fixture
def hub_of_models(folder: Path, tmp_path: Path) -> Path:
    """A directory hub: branch main has model 2 in one file; tag v1 model 1 in shards."""
    root = tmp_path / "hub" / "org" / "name"
    first = push_checkpoint(folder, str(root))
    DirectoryHub.open(root).tag("v1", first.commit)
    push_checkpoint(saved(tmp_path / "second", 2, WHOLE), str(root))
    return root


@pytest.mark.parametrize("form", ["path", "file URL"])
def test_directory_hub_is_loaded_by_revision(form: str, hub_of_models: Path) -> None:
    repo_id = str(hub_of_models) if form == "path" else f"file://{hub_of_models}"
    old, new = (digest_of_seed(seed) for seed in (1, 2))

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


def test_directory_hub_is_pulled_into_a_directory(hub_of_models: Path, folder: Path, tmp_path: Path) -> None:
    snapshot = Path(pull_checkpoint(str(hub_of_models), revision="v1"))
    assert files_of(snapshot) == files_of(folder)

    pull_checkpoint(f"file://{hub_of_models}", tmp_path / "target", revision="v1", verify="full")

    assert files_of(tmp_path / "target") == files_of(folder)
    for path in (path for path in (tmp_path / "target").rglob("*") if path.is_file()):
        assert path.stat().st_nlink == 1
        assert os.access(path, os.W_OK)
    with pytest.raises(SaveDirectoryError):
        pull_checkpoint(str(hub_of_models), tmp_path / "second" / "config.json")
    with pytest.raises(HubNotFoundError):
        pull_checkpoint(str(tmp_path / "nowhere"))


def test_file_url_of_an_ordinary_directory_is_that_directory(folder: Path) -> None:
    assert digest_of(hfshard.load_state_dict(f"file://{folder}")) == digest_of_seed(1)
    with pytest.raises(CheckpointNotFoundError, match="There is no directory '/no/such'"):
        hfshard.load_state_dict("file:///no/such")


@pytest.fixture
def tree(tmp_path: Path) -> DirectoryHub:
    """A hub whose main has two shards and, in folders, other files."""
    made = tmp_path / "saved"
    hfshard.save_state_dict({"a": torch.ones(3000), "b": torch.zeros(9)}, made, max_shard_size=1)
    for name in ("README.md", "1_Pooling/config.json", "onnx/deep/tokenizer.json"):
        put(made / name, "{}")
    hfshard.push_checkpoint(made, tmp_path / "hub")
    return DirectoryHub.open(tmp_path / "hub")


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "README.md", "onnx/deep/tokenizer.json"])
def test_a_damaged_byte_is_found_by_every_pull(
    name: str, tree: DirectoryHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    linked = tmp_path / "linked"
    hfshard.pull_checkpoint(tree.root, linked)
    (linked / name).unlink()
    os.link(Path(tree.snapshot(), name), linked / name)  # damaged together
    damage(Path(tree.snapshot(), name))
    before = files_of(linked)
    for target, verify in ((None, "structure"), (tmp_path / "new" / "a", "none"), (linked, "structure")):
        with pytest.raises(IntegrityError, match=f"{tree.snapshot()}/{name}' is damaged"):
            hfshard.pull_checkpoint(tree.root, target, verify=verify)  # type: ignore[arg-type]
    assert main(["pull", tree.root, str(tmp_path / "new")]) == 1
    assert name in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    assert files_of(linked) == before


def damage(path: Path) -> None:
    """Change the last bit of a read-only file, where it is: other names of it change too."""
    path.chmod(0o644)
    flip(path, -1)


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_pull_by_patterns_reads_what_it_takes(tree: DirectoryHub, tmp_path: Path) -> None:
    damage(Path(tree.snapshot(), "README.md"))
    hfshard.pull_checkpoint(tree.root, tmp_path / "target", ignore_patterns="*.md")
    assert "README.md" not in files_of(tmp_path / "target")


def test_a_file_that_nobody_pushed_is_not_pulled(tree: DirectoryHub, tmp_path: Path) -> None:
    Path(tree.snapshot(), "smuggled.py").write_text("")
    for target in (None, tmp_path / "target"):
        with pytest.raises(IntegrityError, match=r"smuggled.py' is in the snapshot, but was not pushed"):
            hfshard.pull_checkpoint(tree.root, target)
    assert not (tmp_path / "target").exists()


def test_a_repo_id_may_be_a_path_object(tree: DirectoryHub, tmp_path: Path) -> None:
    assert hfshard.pull_checkpoint(Path(tree.root)) == tree.snapshot()
    assert hfshard.pull_checkpoint(Path(tree.root), tmp_path / "target") == str(tmp_path / "target")


def test_a_pull_that_fails_leaves_no_folder(tree: DirectoryHub, tmp_path: Path) -> None:
    target, other = tmp_path / "target", tmp_path / "other"
    (target / "onnx").mkdir(parents=True)
    os.mkfifo(target / "1_Pooling")
    with pytest.raises(SaveDirectoryError, match="1_Pooling"):
        hfshard.pull_checkpoint(tree.root, target)
    assert sorted(path.name for path in target.rglob("*")) == ["1_Pooling", "onnx"]
    (other / "onnx" / "deep" / "tokenizer.json").mkdir(parents=True)
    with pytest.raises(SaveDirectoryError, match=r"tokenizer.json' is a directory"):
        hfshard.pull_checkpoint(tree.root, other)
    assert sorted(path.name for path in other.rglob("*")) == ["deep", "onnx", "tokenizer.json"]


@pytest.mark.parametrize("link", ["onnx", "onnx/deep"])
def test_no_file_is_written_through_a_link(link: str, tree: DirectoryHub, tmp_path: Path) -> None:
    outside, target = tmp_path / "outside", tmp_path / "target"
    (outside / "deep").mkdir(parents=True)
    (target / link).parent.mkdir(parents=True)
    (target / link).symlink_to(outside)
    with pytest.raises(SaveDirectoryError, match=rf"'{target}/{link}' is a link"):
        hfshard.pull_checkpoint(tree.root, target)
    assert files_of(outside) == files_of(target) == {}
    assert not (target / "1_Pooling").exists()


def test_every_folder_with_new_files_is_flushed(
    tree: DirectoryHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, flushed, flush = tmp_path / "target", [], os.fsync

    def fsync(fd: int) -> None:
        """Note what the folder holds when it is flushed."""
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path.is_dir():
            flushed.append((str(path.relative_to(tmp_path)), sorted(os.listdir(path))))
        flush(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    hfshard.pull_checkpoint(tree.root, target)
    for folder in ("target/1_Pooling", "target/onnx/deep", "target/onnx"):
        assert (folder, sorted(os.listdir(tmp_path / folder))) in flushed
