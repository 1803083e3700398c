"""The files of a commit: new ones are copied and read-only, known ones linked, and each is compared."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hfshard.disk.byte_source import BytesSource, FileSource
from hfshard.errors import IntegrityError, MissingShardError
from hfshard.hub.directory.directory_hub import DirectoryHub
from hfshard.hub.directory.snapshot import (
    StagedSnapshot,
    check_hashes,
    check_snapshot,
    hash_errors,
    reject_unexpected_files,
)
from hfshard.hub.repo import RemoteFile
from tests.hub.directory.helpers import push

ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@pytest.fixture
def stage(hub: DirectoryHub, tmp_path: Path) -> StagedSnapshot:
    """An empty stage beside the hub's snapshots."""
    (tmp_path / "stage").mkdir()
    return StagedSnapshot(hub.root, str(tmp_path / "stage"))


def test_new_contents_are_copied_and_nobody_can_write_into_them(stage: StagedSnapshot, tmp_path: Path) -> None:
    (tmp_path / "unhashed").write_bytes(b"abc")
    told: list[int] = []
    stage.progress_callback = told.append

    files = stage.put({}, None, {"a/b/x": FileSource(str(tmp_path / "unhashed"), 3), "empty": BytesSource(b"")})

    assert files == {"a/b/x": RemoteFile(3, ABC), "empty": RemoteFile(0, EMPTY)}
    assert Path(stage.folder, "a/b/x").read_bytes() == b"abc"
    assert [os.stat(os.path.join(stage.folder, path)).st_mode & 0o222 for path in files] == [0, 0]
    assert (told, stage.copied_bytes) == ([3], 3)


@pytest.mark.parametrize("is_hashed", [True, False])
def test_contents_that_any_commit_has_are_linked(
    stage: StagedSnapshot, hub: DirectoryHub, tmp_path: Path, is_hashed: bool
) -> None:
    old = push(hub, {"old/name": b"abc"})
    push(hub, {"old/name": None, "rest": b""})
    (tmp_path / "new").write_bytes(b"abc")

    files = stage.put({}, None, {"x": FileSource(str(tmp_path / "new"), 3, ABC if is_hashed else None)})

    assert files == {"x": RemoteFile(3, ABC)}
    assert os.path.samefile(os.path.join(stage.folder, "x"), os.path.join(hub.snapshot(old), "old/name"))
    assert stage.copied_bytes == (0 if is_hashed else 3)  # what has no hash is known by a copy


def test_a_damaged_file_of_a_commit_is_not_linked_to(stage: StagedSnapshot, hub: DirectoryHub) -> None:
    old = Path(hub.snapshot(push(hub, {"x": b"abc"})), "x")
    old.chmod(0o644)
    old.write_bytes(b"abX")

    stage.put({}, None, {"y": BytesSource(b"abc")})

    assert Path(stage.folder, "y").read_bytes() == b"abc"


@pytest.mark.parametrize(
    ("size", "sha256", "found"), [(4, None, "bytes must be 4, got 3"), (3, EMPTY, f"{EMPTY}, got ")]
)
def test_a_file_that_changed_after_it_was_saved_is_refused(
    stage: StagedSnapshot, tmp_path: Path, size: int, sha256: str | None, found: str
) -> None:
    path = str(tmp_path / "changed")
    Path(path).write_bytes(b"abc")

    with pytest.raises(IntegrityError, match=rf"^'{path}' changed after it was saved: .*{found}.*Nothing was pushed\."):
        stage.put({}, None, {"x": FileSource(path, size, sha256)})


def test_files_are_kept_from_a_commit_only_if_they_are_whole(stage: StagedSnapshot, hub: DirectoryHub) -> None:
    commit = push(hub, {"x": b"abc", "y": b""})
    kept = {"x": RemoteFile(3, ABC)}

    assert stage.put(kept, commit, {}) == kept
    old = os.path.join(hub.snapshot(commit), "x")
    assert os.listdir(stage.folder) == ["x"] and os.path.samefile(os.path.join(stage.folder, "x"), old)

    with pytest.raises(IntegrityError, match=rf"^'{old}' is damaged: it must have 4 bytes, but has 3\. Restore it"):
        stage.put({"x": RemoteFile(4, ABC)}, commit, {})


def test_no_link_counts_as_a_file_of_a_snapshot(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "x").write_bytes(b"abc")
    (tmp_path / "linked").symlink_to("real")
    (tmp_path / "y").symlink_to("real/x")

    assert list(check_snapshot(str(tmp_path), {"real/x": RemoteFile(3, ABC)})) == ["real/x"]
    for path in ("linked/x", "y", "gone"):
        with pytest.raises(MissingShardError, match=rf"/{path}' is missing or is not a regular file"):
            check_snapshot(str(tmp_path), {path: RemoteFile(3, ABC)})
    assert check_snapshot(str(tmp_path / "linked"), {}) == {}


def test_every_byte_and_every_other_file_of_a_snapshot_is_seen(tmp_path: Path) -> None:
    for name in "zyx":
        (tmp_path / name).write_bytes(b"abc")
    files = {"z": RemoteFile(3, EMPTY), "y": RemoteFile(3, ABC), "x": RemoteFile(3, EMPTY)}
    folder = str(tmp_path)

    errors = hash_errors(folder, files, False)

    assert [(error.path, error.expected, error.actual) for error in errors] == [
        (f"{folder}/z", EMPTY, ABC),
        (f"{folder}/x", EMPTY, ABC),
    ]
    with pytest.raises(IntegrityError, match=rf"^'{folder}/z' is damaged: its sha256 must be {EMPTY}, but is {ABC}"):
        check_hashes(folder, files, False)
    with pytest.raises(IntegrityError, match=rf"^'{folder}/x' is in the snapshot, but was not pushed\. Remove it\.$"):
        reject_unexpected_files(folder, {"y": files["y"]}, check_snapshot(folder, files))
