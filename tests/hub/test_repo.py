"""What a repo may call its files, branches and tags, and by which hashes their contents are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from hfshard.disk.byte_source import BytesSource, FileSource
from hfshard.errors import InvalidArgumentError
from hfshard.hub.repo import (
    RefKind,
    RemoteFile,
    full_name,
    is_commit_id,
    is_plain_path,
    pr_revision,
    ref_kind,
    short_name,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"
HELLO_BLOB = "ce013625030ba8dba906f756967f9e9ca394464a"
HELLO_SHA256 = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03"


def test_a_small_file_is_known_by_the_hash_that_git_gives_it() -> None:
    for raw, blob_id in ((b"", "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"), (b"hello\n", HELLO_BLOB)):
        assert RemoteFile(len(raw), blob_id=blob_id).has_contents(BytesSource(raw))


@pytest.mark.parametrize("hashes", [{"sha256": HELLO_SHA256}, {"blob_id": HELLO_BLOB}], ids=["sha256", "git"])
def test_contents_are_compared_by_the_hash_that_the_hub_has(hashes: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"hello\n")
    file = RemoteFile(6, **hashes)

    assert file.has_contents(BytesSource(b"hello\n")) and file.has_contents(FileSource(str(tmp_path / "x"), 6))
    assert not file.has_contents(BytesSource(b"hallo\n"))
    assert file.etag == next(iter(hashes.values()))
    assert not file.has_contents(FileSource(str(tmp_path / "missing"), 7))  # another size: it is not read


def test_a_file_in_lfs_is_known_by_its_sha256_and_not_by_that_of_the_pointer() -> None:
    assert RemoteFile(6, sha256=HELLO_SHA256, blob_id="0" * 40).etag == HELLO_SHA256
    assert RemoteFile(6).etag is None
    assert not RemoteFile(0).has_contents(BytesSource(b""))


@pytest.mark.parametrize(
    ("path", "expected"),
    [("a", True), ("a/b.c", True), ("...", True), ("é", True), ("", False), ("/a", False), ("a/", False)]
    + [("a//b", False), ("..", False), ("a/../b", False), ("./a", False), ("a\\b", False), ("a\nb", False)],
)
def test_a_plain_path_stays_below_its_folder_and_can_be_printed(path: str, expected: bool) -> None:
    assert is_plain_path(path) is expected


@pytest.mark.parametrize(
    ("name", "kind", "ref"),
    [
        ("main", "branch", "refs/heads/main"),
        ("a/b-1._c", "branch", "refs/heads/a/b-1._c"),
        ("v1.0", "tag", "refs/tags/v1.0"),
        ("3", "pr", "refs/pr/3"),
        ("refs/tags/v1", "branch", "refs/tags/v1"),
        ("refs/pr/999999999", "branch", "refs/pr/999999999"),
        ("x" * 200, "branch", "refs/heads/" + "x" * 200),
        (COMMIT[:-1], "branch", f"refs/heads/{COMMIT[:-1]}"),
    ],
)
def test_a_name_is_completed_by_its_kind_unless_it_is_complete(name: str, kind: RefKind, ref: str) -> None:
    assert full_name(name, kind) == ref


@pytest.mark.parametrize(
    "name",
    ["", "HEAD", COMMIT, "a..b", "-a", ".a", "a.", "a.lock", "a/", "a//b", "a/.b", "a b", "é", "main\n", "x" * 201]
    + [
        "refs/other/a",
        "refs/heads/",
        "refs/heads/refs/a",
        "refs/pr/0",
        "refs/pr/01",
        "refs/pr/x",
        "refs/pr/1234567890",
    ],
)
def test_what_git_or_a_reader_would_take_for_something_else_is_no_name(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="is not a valid revision name: use letters") as raised:
        full_name(name)

    assert raised.value.actual == name


def test_a_full_name_tells_its_kind_and_its_short_name() -> None:
    refs = ["refs/heads/a/b", "refs/tags/v1", "refs/pr/3"]

    assert [ref_kind(ref) for ref in refs] == ["branch", "tag", "pr"]
    assert [short_name(ref) for ref in refs] == ["a/b", "v1", "refs/pr/3"]
    assert is_commit_id(COMMIT)
    assert [is_commit_id(name) for name in (None, "main", COMMIT[:-1], COMMIT.upper(), COMMIT + "\n")] == [False] * 5


def test_a_pull_request_is_named_by_the_last_part_of_its_page() -> None:
    for url in ("https://hub/org/name/discussions/12", "https://hub/org/name/discussions/12/"):
        assert pr_revision(url) == "refs/pr/12"
