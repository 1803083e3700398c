"""A directory hub that became damaged: what finds it, and what mends it."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from hfshard.errors import (
    IntegrityError,
    MissingShardError,
)
from hfshard.hub.directory.directory_hub import DirectoryHub
from tests.hub.directory.helpers import push


def test_a_changed_byte_is_found_by_verify(hub: DirectoryHub) -> None:
    push(hub, {"a": b"1" * 100, "b": b"2"})
    path = Path(hub.snapshot(), "a")
    path.chmod(0o644)
    path.write_bytes(b"1" * 99 + b"0")
    assert hub.snapshot() == str(path.parent)
    with pytest.raises(IntegrityError, match=rf"'{path}' is damaged: it must have sha256") as raised:
        hub.verify()
    assert raised.value.path == str(path)
    with pytest.raises(IntegrityError):
        hub.read("a", "main")


def test_a_snapshot_with_a_cut_missing_or_replaced_file_is_refused(hub: DirectoryHub, tmp_path: Path) -> None:
    push(hub, {"a": b"1" * 100, "s/b": b"2"})
    folder = Path(hub.snapshot())
    os.truncate(folder / "a", 7)
    with pytest.raises(IntegrityError, match="it must have 100 bytes, and has 7"):
        hub.snapshot()
    (folder / "a").unlink()
    os.symlink("/etc/passwd", folder / "a")
    with pytest.raises(MissingShardError, match="a' is missing, or is not a regular file"):
        hub.snapshot()
    (folder / "a").unlink()
    (folder / "a").write_bytes(b"1" * 100)
    os.rename(folder / "s", tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", folder / "s")
    with pytest.raises(MissingShardError, match="s/b' is missing, or is not a regular file"):
        hub.snapshot()
    with pytest.raises(MissingShardError):  # nor is it taken over into a new commit
        push(hub, {"c": b"3"})


def test_a_file_that_was_not_pushed_is_found_by_verify(hub: DirectoryHub) -> None:
    push(hub, {"a": b"1"})
    Path(hub.snapshot(), "model.safetensors").write_bytes(b"smuggled")
    with pytest.raises(IntegrityError, match=r"model.safetensors' was not pushed"):
        hub.verify()


def test_a_manifest_with_other_bytes_is_refused(hub: DirectoryHub) -> None:
    commit = push(hub, {"a": b"1"})
    path = Path(hub.root, "commits", f"{commit}.json")
    path.write_bytes(path.read_bytes().replace(b'"a"', b'"b"'))
    with pytest.raises(IntegrityError, match="is damaged: its bytes are those of commit"):
        hub.tree()
    assert [revision.is_damaged for revision in hub.revisions()] == [True, True]
    with pytest.raises(IntegrityError):
        hub.prune()


@pytest.mark.parametrize(
    "change",
    [
        {"files": {"../x": {"sha256": "0" * 64, "size": 1}}},
        {"files": {"x": {"sha256": "0" * 63, "size": 1}}},
        {"files": {"x": {"sha256": "0" * 64, "size": -1}}},
        {"files": {"x": {"sha256": "0" * 64, "size": True}}},
        {"files": {"x": None}},
        {"files": ["x"]},
        {"format": 2},
        {"parents": ["main"]},
        {"message": None},
        {"description": 3},
    ],
)
def test_a_hostile_manifest_of_the_right_hash_is_refused(hub: DirectoryHub, change: dict[str, object]) -> None:
    good: dict[str, object] = {"description": None, "files": {}, "format": 1, "message": "", "parents": []}
    raw = json.dumps(good | change).encode()
    commit = hashlib.sha256(raw).hexdigest()[:40]
    Path(hub.root, "commits").mkdir()
    Path(hub.root, "commits", f"{commit}.json").write_bytes(raw)
    with pytest.raises(ValueError, match="is not a valid manifest of this format"):
        hub.tree(commit)


def test_a_damaged_commit_is_deleted_and_pushed_again(hub: DirectoryHub) -> None:
    commit = push(hub, {"a": b"1"})
    Path(hub.snapshot(), "a").unlink()
    hub.delete("main", force=True)
    hub.delete(commit)
    assert hub.revisions() == []
    assert push(hub, {"a": b"1"}) == commit
    hub.verify()


def test_a_damaged_commit_is_made_anew_by_the_same_push(hub: DirectoryHub) -> None:
    commit = push(hub, {"a": b"1"})
    Path(hub.snapshot(), "a").unlink()
    hub.delete("main", force=True)
    assert push(hub, {"a": b"1"}) == commit
    hub.verify()


@pytest.mark.parametrize("raw", [b"", b"main\n", b"0" * 39, b"0" * 41, b"\xff" * 40])
def test_a_damaged_ref_is_an_error_that_names_it(hub: DirectoryHub, raw: bytes) -> None:
    push(hub, {"a": b"1"})
    Path(hub.root, "refs/heads/main").write_bytes(raw)
    with pytest.raises(ValueError, match="refs/heads/main' is damaged: it must hold the id of a commit"):
        hub.resolve()
