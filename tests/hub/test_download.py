"""What a Hub may say of a repo and is not believed, and a disk that is too small: before the first request."""

from __future__ import annotations

from pathlib import Path

import pytest

from hfshard.errors import HubError, NotEnoughSpaceError, UnsafePathError
from hfshard.hub.cache import RepoCache
from hfshard.hub.download import download
from hfshard.hub.http import HubReader
from hfshard.hub.repo import RemoteFile, RepoTree

pytestmark = pytest.mark.compat

COMMIT = "c" * 40
FILE = RemoteFile(5, blob_id="a" * 40)


def bring_one(cache: Path, path: str, file: RemoteFile, commit: str = COMMIT) -> None:
    """Bring the only file of a repo; tests run in offline mode, so that a request would be another error."""
    remote = HubReader("org/name", RepoTree(commit, {path: file}), False)
    download(remote, RepoCache("org/name", cache), [path])


def test_full_disk_is_told_before_anything_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(
        NotEnoughSpaceError, match=r"needs 1,000,000,000,016,777,216 bytes, but only [\d,]+ are free"
    ) as raised:
        bring_one(tmp_path, "model.safetensors", RemoteFile(10**18, "0" * 64))
    assert raised.value.expected == 10**18 + 16 * 1024 * 1024


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/etc/x", "a//b", "a\\b", "a/\x1b[2J"])
def test_path_that_leaves_the_snapshot_is_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(UnsafePathError, match="would be outside the cache"):
        bring_one(tmp_path, path, FILE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("commit", ["main", "../" + "c" * 37, "C" * 40, ""])
def test_commit_that_is_no_hash_is_refused(commit: str, tmp_path: Path) -> None:
    with pytest.raises(UnsafePathError):
        bring_one(tmp_path, "config.json", FILE, commit)


@pytest.mark.parametrize(
    "file", [RemoteFile(5), RemoteFile(5, blob_id="../x"), RemoteFile(5, "ab"), RemoteFile(-1, "0" * 64)], ids=str
)
def test_file_without_size_and_hash_is_refused(file: RemoteFile, tmp_path: Path) -> None:
    with pytest.raises(HubError, match="without a valid size and hash"):
        bring_one(tmp_path, "config.json", file)


@pytest.mark.parametrize("revision", ["../../x", "a\\b", "/x", "feature//x"])
def test_revision_never_names_a_file_outside_the_cache(revision: str, tmp_path: Path) -> None:
    cache = RepoCache("org/name", tmp_path)

    cache.remember(revision, COMMIT)

    assert cache.commit_of(revision) is None
    assert list(tmp_path.iterdir()) == []


def test_ref_with_a_line_end_or_other_content_is_read_or_passed_over(tmp_path: Path) -> None:
    cache = RepoCache("org/name", tmp_path)
    cache.remember("main", COMMIT)
    ref = tmp_path / "models--org--name" / "refs" / "main"
    assert ref.read_bytes() == COMMIT.encode()

    ref.write_text(COMMIT + "\n")
    assert cache.commit_of(None) == COMMIT
    ref.write_text("../../elsewhere")
    assert cache.commit_of("main") is None
