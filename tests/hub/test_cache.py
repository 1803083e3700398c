"""The cache of one repo, in the layout of huggingface_hub: refs, snapshots of links, blobs, missing files."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Event

import pytest
from huggingface_hub import constants, try_to_load_from_cache

from hfshard.errors import HubError, UnsafePathError
from hfshard.hub.cache import RepoCache
from hfshard.hub.repo import RemoteFile

COMMIT, OTHER = "a1" * 20, "b2" * 20
FILE = RemoteFile(5, sha256="c3" * 32)


@pytest.fixture
def cache(tmp_path: Path) -> RepoCache:
    """The cache of a repo with one blob, which no commit has yet."""
    cache = RepoCache("org/name", tmp_path)
    cache.prepare()
    Path(cache.blob(FILE)).write_text("12345")
    return cache


def test_a_revision_is_remembered_where_huggingface_hub_looks_for_it(cache: RepoCache, tmp_path: Path) -> None:
    cache.remember(None, COMMIT)
    cache.remember("refs/pr/1", OTHER)
    cache.remember(COMMIT, COMMIT)

    refs = tmp_path / "models--org--name" / "refs"
    assert {str(path.relative_to(refs)) for path in refs.rglob("*") if path.is_file()} == {"main", "refs/pr/1"}
    assert (refs / "main").read_text() == COMMIT
    found = [cache.commit_of(revision) for revision in (None, "main", "refs/pr/1", COMMIT, "v1")]
    assert found == [COMMIT, COMMIT, OTHER, COMMIT, None]


def test_a_revision_that_leaves_the_cache_or_has_no_commit_is_unknown(cache: RepoCache, tmp_path: Path) -> None:
    cache.remember("../../escaped", COMMIT)
    (tmp_path / "escaped").write_text(COMMIT)
    cache.remember("main", COMMIT)
    (tmp_path / "models--org--name" / "refs" / "main").write_text("not a commit")

    assert cache.commit_of("../../../escaped") is None
    assert cache.commit_of("main") is None
    assert sorted(os.listdir(tmp_path)) == ["CACHEDIR.TAG", "escaped", "models--org--name"]


@pytest.mark.parametrize(("commit", "path"), [(COMMIT, "../x"), (COMMIT, "/etc/x"), (COMMIT, "a//b"), ("main", "x")])
def test_a_file_that_would_lie_outside_of_the_cache_is_refused(cache: RepoCache, commit: str, path: str) -> None:
    with pytest.raises(UnsafePathError, match=r"which would be outside the cache\. Do not load this repo\.$"):
        cache.snapshot(commit, path)
    with pytest.raises(UnsafePathError):
        cache.mark_missing(commit, path)


def test_a_file_is_there_known_to_be_missing_or_unknown(cache: RepoCache, tmp_path: Path) -> None:
    cache.link(COMMIT, "sub/config.json", FILE)
    cache.mark_missing(COMMIT, "sub/other.json")

    assert [cache.has(COMMIT, f"sub/{name}.json") for name in ("config", "other", "third")] == [True, False, None]
    assert cache.has(OTHER, "sub/other.json") is None
    assert os.readlink(cache.snapshot(COMMIT, "sub/config.json")) == f"../../../blobs/{FILE.sha256}"
    cache.remember(None, COMMIT)
    assert try_to_load_from_cache("org/name", "sub/config.json", tmp_path) == cache.snapshot(COMMIT, "sub/config.json")


def test_contents_of_another_size_are_not_those_of_the_file(cache: RepoCache) -> None:
    cache.link(COMMIT, "x", FILE)
    longer = RemoteFile(6, sha256=FILE.sha256)

    assert (cache.has_blob(FILE), cache.holds(COMMIT, "x", FILE)) == (True, True)
    assert (cache.has_blob(longer), cache.holds(COMMIT, "x", longer), cache.holds(OTHER, "x", FILE)) == (False,) * 3
    for nameless in (RemoteFile(5), RemoteFile(5, sha256="../../x"), RemoteFile(-1, sha256=FILE.sha256)):
        with pytest.raises(HubError, match="without a valid size and hash"):
            cache.blob(nameless)


def test_without_links_contents_are_copied_and_at_last_moved(cache: RepoCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_SYMLINKS", True)

    cache.link(COMMIT, "x", FILE)
    assert cache.has_blob(FILE)
    cache.link(OTHER, "x", FILE, is_new=True)

    for commit in (COMMIT, OTHER):
        assert Path(cache.snapshot(commit, "x")).read_text() == "12345"
        assert os.listdir(cache.snapshot(commit)) == ["x"] and not os.path.islink(cache.snapshot(commit, "x"))
    assert not cache.has_blob(FILE)


def test_a_transfer_that_was_cancelled_gets_no_lock_and_a_tag_of_others_stays(cache: RepoCache, tmp_path: Path) -> None:
    (tmp_path / "CACHEDIR.TAG").write_text("theirs")
    cancelled = Event()
    with cache.lock(FILE, cancelled) as is_held:
        assert is_held
    cancelled.set()
    with cache.lock(FILE, cancelled) as is_held:
        assert not is_held

    cache.prepare()

    assert (tmp_path / "CACHEDIR.TAG").read_text() == "theirs"
