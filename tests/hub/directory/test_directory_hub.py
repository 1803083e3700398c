"""A directory hub: commits, their files and space, what is refused before anything changes, and models in one."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

import pytest
from transformers import BertModel

from hfshard.disk.byte_source import ByteSource, BytesSource, StreamSource, file_source
from hfshard.errors import (
    HubError,
    HubNotFoundError,
    IntegrityError,
    InvalidArgumentError,
    NotEnoughSpaceError,
    SaveDirectoryError,
)
from hfshard.hub.directory.directory_hub import DirectoryHub
from hfshard.hub.repo import PushResult, RemoteFile, StaleParentError
from hfshard.push import push_checkpoint
from tests.helpers.tiny_bert import SHARDED, SINGLE, all_see, bert, read_by_all, value_of
from tests.hub.directory.helpers import disk_bytes, everything, files_at, litter, push

SHA256_OF_ONE = "6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b"
"""Of the byte "1": `printf 1 | sha256sum`."""


def test_a_new_hub_is_empty_and_marked(tmp_path: Path) -> None:
    root = tmp_path / "org" / "name"
    assert not DirectoryHub.is_hub(root)
    hub = DirectoryHub.create(root)
    assert DirectoryHub.is_hub(root) and DirectoryHub.is_hub(f"file://{root}")
    assert everything(root) == {f"{root}/hfshard-hub.json": b'{\n  "format": 1\n}\n'}
    tree = hub.tree()
    assert tree is not None and (tree.commit, dict(tree.files)) == ("", {})
    assert hub.revisions() == []
    with pytest.raises(HubNotFoundError, match="is empty: nothing was pushed to it yet, so it has no revision 'main'"):
        hub.snapshot()


def test_a_hub_is_made_once_and_opened_after(tmp_path: Path) -> None:
    commit = push(DirectoryHub.create(f"file://{tmp_path}/hub"), {"a": b"1"})
    assert DirectoryHub.create(tmp_path / "hub").resolve() == commit
    assert DirectoryHub.open(f"file://{tmp_path}/hub").resolve() == commit
    with pytest.raises(HubError, match="is already a directory hub"):
        DirectoryHub.create(tmp_path / "hub", exist_ok=False)


def test_a_checkpoint_is_not_made_a_hub(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(HubError, match=r"is neither empty nor a directory hub: it contains 'config.json'"):
        DirectoryHub.create(tmp_path)
    assert os.listdir(tmp_path) == ["config.json"]


def test_a_file_is_not_made_a_hub(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(HubError, match="it, or a path above it, is a file"):
            DirectoryHub.create(path)


def test_what_is_no_hub_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(HubNotFoundError, match=r"is not a directory hub\. The first push to a hub creates it"):
        DirectoryHub.open(tmp_path)
    with pytest.raises(HubNotFoundError, match="does not exist"):
        DirectoryHub.open(tmp_path / "nothing")
    (tmp_path / "hfshard-hub.json").write_text('{"format": 2}')
    with pytest.raises(
        HubError, match=r"of format 2, but this version of hfshard reads format 1. Install a newer hfshard"
    ):
        DirectoryHub.open(tmp_path)


@pytest.fixture
def result(hub: DirectoryHub) -> PushResult:
    """The commit of one file of one byte, the first of its hub."""
    return hub.commit({"s/a": BytesSource(b"1")}, parent=None, message="first", description="more")


def test_a_commit_has_a_manifest_that_gives_its_id(hub: DirectoryHub, result: PushResult) -> None:
    raw = Path(hub.root, "commits", f"{result.commit}.json").read_bytes()
    assert json.loads(raw) == {
        "description": "more",
        "files": {"s/a": {"sha256": SHA256_OF_ONE, "size": 1}},
        "format": 1,
        "message": "first",
        "parents": [],
    }
    # By sha256sum, its first 40 digits: whoever pushes it, wherever and whenever, it is the same commit.
    assert result.commit == "6eba2670fe2662982fc111c996afdea859d262a8"


def test_a_commit_says_where_it_is_and_what_was_sent(hub: DirectoryHub, result: PushResult) -> None:
    assert result.url == hub.snapshot() == f"{hub.root}/snapshots/{result.commit}"
    assert (result.is_new, result.sent_bytes, result.pr_url) == (True, 1, None)


def test_a_commit_is_a_plain_directory_that_nobody_may_write(hub: DirectoryHub, result: PushResult) -> None:
    assert stat.S_IMODE(os.stat(f"{result.url}/s/a").st_mode) & 0o222 == 0
    assert hub.read("s/a", result.commit) == b"1"


def test_a_commit_becomes_the_head_of_its_branch(hub: DirectoryHub, result: PushResult) -> None:
    tree = hub.tree()
    assert tree is not None
    assert (tree.commit, dict(tree.files)) == (result.commit, {"s/a": RemoteFile(1, SHA256_OF_ONE)})
    assert Path(hub.root, "refs/heads/main").read_text() == f"{result.commit}\n"


def test_a_commit_changes_adds_deletes_and_links_the_rest(hub: DirectoryHub) -> None:
    first = push(hub, {"kept": b"k" * 100, "changed": b"1", "gone": b"g", "s/deep/kept": b"d"})
    told: list[int] = []
    added: dict[str, ByteSource | None] = {"changed": BytesSource(b"22"), "new/file": BytesSource(b"333")}
    changes = added | {"gone": None, "was never there": None}
    result = hub.commit(changes, parent=first, message="second", progress_callback=told.append)
    assert files_at(hub) == {"kept": b"k" * 100, "changed": b"22", "new/file": b"333", "s/deep/kept": b"d"}
    assert files_at(hub, first) == {"kept": b"k" * 100, "changed": b"1", "gone": b"g", "s/deep/kept": b"d"}
    assert sum(told) == result.sent_bytes == 5
    for path in ("kept", "s/deep/kept"):
        assert os.path.samefile(f"{hub.url_of(first)}/{path}", f"{hub.snapshot()}/{path}")
    assert litter(hub.root) == []


def test_a_file_becomes_a_folder_and_a_folder_a_file(hub: DirectoryHub) -> None:
    push(hub, {"a": b"1", "b/c": b"2"})
    push(hub, {"a": None, "a/x": b"3", "b/c": None, "b": b"4"})
    assert files_at(hub) == {"a/x": b"3", "b": b"4"}
    with pytest.raises(InvalidArgumentError, match="'b' cannot be both a file and a folder of 'b/c'"):
        push(hub, {"b/c": b"5"})


def test_the_same_files_make_no_commit(hub: DirectoryHub) -> None:
    first = push(hub, {"a": b"1"})
    result = hub.commit({"a": BytesSource(b"1"), "b": None}, parent=first, message="again")
    assert (result.commit, result.is_new, result.sent_bytes) == (first, False, 0)
    assert [revision.commit for revision in hub.revisions()] == [first, first]  # main, and the commit


def test_changing_one_of_eight_shards_costs_that_shard(hub: DirectoryHub) -> None:
    shards = {f"model-{number:05d}-of-00008.safetensors": bytes([number]) * 2**20 for number in range(1, 9)}
    push(hub, shards)
    before = disk_bytes(hub.root)
    push(hub, {"model-00003-of-00008.safetensors": b"!" * 2**20})
    assert 2**20 <= disk_bytes(hub.root) - before < 2**20 + 2**16
    hub.verify()


def test_going_back_to_what_any_commit_has_costs_nothing(hub: DirectoryHub, tmp_path: Path) -> None:
    push(hub, {"a": b"1" * 2**20})
    push(hub, {"a": b"2" * 2**20})
    before = disk_bytes(hub.root)
    source = tmp_path / "source"
    source.write_bytes(b"1" * 2**20)
    result = hub.commit({"b": BytesSource(b"1" * 2**20)}, parent=hub.resolve(), message="known hash")
    assert result.sent_bytes == 0
    hub.commit({"c": file_source(str(source))}, parent=result.commit, message="unknown hash")
    assert disk_bytes(hub.root) - before < 2**17
    hub.verify()


def test_a_damaged_file_is_not_linked_for_the_same_contents(hub: DirectoryHub) -> None:
    push(hub, {"a": b"good" * 100})
    push(hub, {"a": b"other"})
    damaged = next(path for path in Path(hub.root, "snapshots").rglob("a") if path.stat().st_size == 400)
    damaged.chmod(0o644)
    damaged.write_bytes(b"evil" * 100)
    push(hub, {"a": b"good" * 100})
    hub.verify()


def test_contents_that_do_not_have_their_hash_are_refused(hub: DirectoryHub, tmp_path: Path) -> None:
    push(hub, {"a": b"1"})
    before = everything(hub.root)
    (tmp_path / "source").write_bytes(b"2")
    wrong = file_source(str(tmp_path / "source"), SHA256_OF_ONE[:-1] + "0")
    for content in (wrong, StreamSource(5, "0" * 64, BytesSource(b"xx").open)):
        with pytest.raises(IntegrityError, match=r"changed after it was saved: .* Nothing was pushed"):
            hub.commit({"b": BytesSource(b"b"), "c": content}, parent=hub.resolve(), message="no")
        assert everything(hub.root) == before
        assert litter(hub.root) == []


def test_a_full_disk_is_told_before_the_first_byte(hub: DirectoryHub) -> None:
    push(hub, {"a": b"1"})
    before = everything(hub.root)
    told: list[int] = []
    huge = StreamSource(2**60, "0" * 64, BytesSource(b"").open)
    changes: dict[str, ByteSource | None] = {"b": BytesSource(b"22"), "c": huge}
    with pytest.raises(NotEnoughSpaceError) as raised:
        hub.commit(changes, parent=hub.resolve(), message="huge", progress_callback=told.append)
    assert raised.value.errno == errno.ENOSPC and raised.value.expected == 2**60 + 2 + 16 * 2**20
    assert (told, everything(hub.root), litter(hub.root)) == ([], before, [])


def test_another_parent_than_the_branch_has_is_stale(hub: DirectoryHub) -> None:
    first = push(hub, {"a": b"1"})
    second = push(hub, {"a": b"2"})
    for parent in (first, None, "0" * 40):
        with pytest.raises(StaleParentError, match=f"'main' of .* is at {second}"):
            hub.commit({"a": BytesSource(b"3")}, parent=parent, message="late")
    with pytest.raises(StaleParentError):
        hub.commit({}, parent="0" * 40, revision="new", message="on nothing")
    assert files_at(hub) == {"a": b"2"}


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/a",
        "a/../b",
        "..",
        "./a",
        "a//b",
        "a/",
        "a\0b",
        "a\\b",
        "C:a",
        "a\nb",
        "é" * 128,
        "a/" * 600 + "a",
        "\ud800",
    ],
)
def test_paths_that_could_leave_the_snapshot_are_refused(hub: DirectoryHub, path: str) -> None:
    before = everything(hub.root)
    for content in (BytesSource(b"1"), None):
        with pytest.raises(InvalidArgumentError, match="is not a valid path in a repo"):
            hub.commit({"good": BytesSource(b"1"), path: content}, parent=None, message="bad")
    assert everything(hub.root) == before


def test_a_message_that_is_no_text_is_refused(hub: DirectoryHub) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot be encoded as UTF-8"):
        hub.commit({"a": BytesSource(b"1")}, parent=None, message="\ud800")


def test_an_odd_directory_of_the_hubs_own_is_refused(hub: DirectoryHub, tmp_path: Path) -> None:
    os.symlink(tmp_path, os.path.join(hub.root, "snapshots"))
    with pytest.raises(SaveDirectoryError, match="snapshots' is a link"):
        push(hub, {"a": b"1"})


def test_stock_transformers_loads_each_revision_that_was_pushed(tmp_path: Path) -> None:
    saved, root = tmp_path / "saved", tmp_path / "org" / "name"
    commits = []
    for value, limit in ((1.0, SINGLE), (2.0, SHARDED), (3.0, SHARDED), (4.0, SINGLE)):
        bert(value).save_pretrained(saved, max_shard_size=limit)
        result = push_checkpoint(saved, f"file://{root}", commit_message=f"of {value}", progress=False)
        commits.append(result.commit)
        assert sorted(os.listdir(result.url)) == sorted(name for name in os.listdir(saved) if name != ".cache")
    hub = DirectoryHub.open(root)
    assert read_by_all(Path(hub.snapshot())) == all_see(4.0)
    for value, commit in zip((1.0, 2.0, 3.0, 4.0), commits, strict=True):
        hub.verify(commit)
        assert value_of(BertModel.from_pretrained(hub.snapshot(commit))) == value
    assert litter(str(root)) == []


def test_an_unchanged_checkpoint_makes_no_commit_and_writes_nothing(tmp_path: Path) -> None:
    saved, root = tmp_path / "saved", tmp_path / "hub"
    bert(1.0).save_pretrained(saved, max_shard_size=SHARDED)
    first = push_checkpoint(saved, str(root), progress=False)
    before = disk_bytes(str(root))
    again = push_checkpoint(saved, str(root), progress=False)
    assert (again.commit, again.is_new, again.sent_bytes) == (first.commit, False, 0)
    assert disk_bytes(str(root)) == before


def test_a_branch_and_a_pull_request_hold_other_weights_than_main(tmp_path: Path) -> None:
    saved, root = tmp_path / "saved", str(tmp_path / "hub")
    for value, options in ((1.0, {}), (2.0, {"revision": "exp/two"}), (3.0, {"create_pr": True})):
        bert(value).save_pretrained(saved, max_shard_size=SHARDED)
        push_checkpoint(saved, root, progress=False, **options)
    hub = DirectoryHub.open(root)
    found = {name: value_of(BertModel.from_pretrained(hub.snapshot(name))) for name in ("main", "exp/two", "refs/pr/1")}
    assert found == {"main": 1.0, "exp/two": 2.0, "refs/pr/1": 3.0}
