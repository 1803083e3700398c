"""Pulls from a directory hub: every byte is compared, and a pull that fails leaves the target as it was."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import hfshard
from hfshard.cli.main import main
from hfshard.errors import IntegrityError, SaveDirectoryError
from hfshard.hub.directory.directory_hub import DirectoryHub
from tests.hub.models import files_of

pytestmark = pytest.mark.compat
TENSORS = {"a": torch.ones(3000), "b": torch.zeros(9)}


@pytest.fixture
def hub(tmp_path: Path) -> DirectoryHub:
    """A hub whose main has two shards and, in folders, other files."""
    folder = tmp_path / "saved"
    hfshard.save_state_dict(TENSORS, folder, max_shard_size=1)
    for name in ("README.md", "1_Pooling/config.json", "onnx/deep/tokenizer.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    hfshard.push_checkpoint(folder, tmp_path / "hub")
    return DirectoryHub.open(tmp_path / "hub")


def flip(path: Path) -> None:
    """Change the last bit of a file, where it is: other names of it change too."""
    path.chmod(0o644)
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "README.md", "onnx/deep/tokenizer.json"])
def test_a_damaged_byte_is_found_by_every_pull(
    name: str, hub: DirectoryHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    linked = tmp_path / "linked"
    hfshard.pull_checkpoint(hub.root, linked)
    (linked / name).unlink()
    os.link(Path(hub.snapshot(), name), linked / name)  # damaged together
    flip(Path(hub.snapshot(), name))
    before = files_of(linked)
    for target, verify in ((None, "structure"), (tmp_path / "new" / "a", "none"), (linked, "structure")):
        with pytest.raises(IntegrityError, match=f"{hub.snapshot()}/{name}' is damaged"):
            hfshard.pull_checkpoint(hub.root, target, verify=verify)  # type: ignore[arg-type]
    assert main(["pull", hub.root, str(tmp_path / "new")]) == 1
    assert name in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    assert files_of(linked) == before


def test_a_pull_by_patterns_reads_what_it_takes(hub: DirectoryHub, tmp_path: Path) -> None:
    flip(Path(hub.snapshot(), "README.md"))
    hfshard.pull_checkpoint(hub.root, tmp_path / "target", ignore_patterns="*.md")
    assert "README.md" not in files_of(tmp_path / "target")


def test_a_file_that_nobody_pushed_is_not_pulled(hub: DirectoryHub, tmp_path: Path) -> None:
    Path(hub.snapshot(), "smuggled.py").write_text("")
    for target in (None, tmp_path / "target"):
        with pytest.raises(IntegrityError, match=r"smuggled.py' was not pushed"):
            hfshard.pull_checkpoint(hub.root, target)
    assert not (tmp_path / "target").exists()


def test_a_repo_id_may_be_a_path_object(hub: DirectoryHub, tmp_path: Path) -> None:
    assert hfshard.pull_checkpoint(Path(hub.root)) == hub.snapshot()
    assert hfshard.pull_checkpoint(Path(hub.root), tmp_path / "target") == str(tmp_path / "target")


def test_a_pull_that_fails_leaves_no_folder(hub: DirectoryHub, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "onnx").mkdir()
    os.mkfifo(target / "1_Pooling")
    with pytest.raises(SaveDirectoryError, match="1_Pooling"):
        hfshard.pull_checkpoint(hub.root, target)
    assert sorted(path.name for path in target.rglob("*")) == ["1_Pooling", "onnx"]
    other = tmp_path / "other"
    (other / "onnx" / "deep" / "tokenizer.json").mkdir(parents=True)
    with pytest.raises(SaveDirectoryError, match=r"tokenizer.json' is a directory"):
        hfshard.pull_checkpoint(hub.root, other)
    assert sorted(path.name for path in other.rglob("*")) == ["deep", "onnx", "tokenizer.json"]


@pytest.mark.parametrize("link", ["onnx", "onnx/deep"])
def test_no_file_is_written_through_a_link(link: str, hub: DirectoryHub, tmp_path: Path) -> None:
    outside, target = tmp_path / "outside", tmp_path / "target"
    (outside / "deep").mkdir(parents=True)
    (target / link).parent.mkdir(parents=True)
    (target / link).symlink_to(outside)
    with pytest.raises(SaveDirectoryError, match=rf"'{target}/{link}' is a link"):
        hfshard.pull_checkpoint(hub.root, target)
    assert files_of(outside) == files_of(target) == {}
    assert not (target / "1_Pooling").exists()


def test_every_folder_with_new_files_is_flushed(
    hub: DirectoryHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, flushed, flush = tmp_path / "target", [], os.fsync

    def fsync(fd: int) -> None:
        """Note what the folder holds when it is flushed."""
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path.is_dir():
            flushed.append((str(path.relative_to(tmp_path)), sorted(os.listdir(path))))
        flush(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    hfshard.pull_checkpoint(hub.root, target)
    for folder in ("target/1_Pooling", "target/onnx/deep", "target/onnx"):
        assert (folder, sorted(os.listdir(tmp_path / folder))) in flushed
