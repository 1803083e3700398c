"""Names in a directory hub: how they are found, listed, deleted and pruned; and what damage or loss does to them."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from hfshard.disk.byte_source import BytesSource
from hfshard.errors import (
    CommitUnfinishedError,
    DamagedCheckpointError,
    HfshardError,
    HubError,
    HubNotFoundError,
    IntegrityError,
    InvalidArgumentError,
    MissingShardError,
)
from hfshard.hub.directory.directory_hub import DirectoryHub
from tests.hub.directory.helpers import everything, files_at, litter, push


@pytest.fixture
def first(hub: DirectoryHub) -> str:
    """The first commit on main."""
    return push(hub, {"a": b"1"}, "first")


@pytest.fixture
def second(hub: DirectoryHub, first: str) -> str:
    """The second commit on main."""
    return push(hub, {"a": b"22"}, "second")


def test_a_revision_is_found_by_branch_tag_id_and_beginning_of_an_id(
    hub: DirectoryHub, first: str, second: str
) -> None:
    assert hub.tag("v1.0", first) == first
    assert hub.branch("dev/x") == second
    for name in ("v1.0", "refs/tags/v1.0", first, first[:7], first[:39]):
        assert hub.resolve(name) == first
        tree = hub.tree(name)
        assert tree is not None and tree.commit == first
    for same in (None, "main", "refs/heads/main", "dev/x", "refs/heads/dev/x", second):
        assert hub.resolve(same) == second


@pytest.mark.parametrize("name", ["nothing", "0123456", "0" * 40, "refs/pr/1", "refs/heads/x", "../../etc", "a b"])
def test_a_revision_that_is_not_there_is_an_error_that_lists_what_is(
    hub: DirectoryHub, first: str, second: str, name: str
) -> None:
    hub.tag("v1", first)
    with pytest.raises(HubNotFoundError, match=r"has no revision .*\. It has main, v1; and 2 commits, listed in"):
        hub.resolve(name)
    assert hub.tree(name) is None


def test_six_digits_of_an_id_are_no_revision(hub: DirectoryHub, first: str, second: str) -> None:
    with pytest.raises(HubNotFoundError):
        hub.resolve(first[:6])


def test_a_beginning_of_two_ids_is_ambiguous(hub: DirectoryHub) -> None:
    push(hub, {"a": b"1"})
    for end in "01":
        Path(hub.root, "commits", "abcdef0" + end * 33 + ".json").write_text("{}")
    with pytest.raises(
        HubError, match=r"2 commits of .* begin with abcdef0: abcdef00.*, abcdef01.* Pass more of the id"
    ):
        hub.resolve("abcdef0")


def test_revisions_are_listed_main_first_and_commits_newest_first(hub: DirectoryHub, first: str, second: str) -> None:
    for commit, seconds in ((first, 1000), (second, 2000)):
        os.utime(Path(hub.root, "commits", f"{commit}.json"), (seconds, seconds))
    hub.branch("alpha", first)
    hub.tag("v1", first)
    pr = hub.commit({"b": BytesSource(b"333")}, parent=second, message="idea", create_pr=True).commit
    found = hub.revisions()
    assert [(one.name, one.kind, one.commit, one.size) for one in found] == [
        ("main", "branch", second, 2),
        ("alpha", "branch", first, 1),
        ("v1", "tag", first, 1),
        ("refs/pr/1", "pr", pr, 5),
        (pr, "commit", pr, 5),
        (second, "commit", second, 2),
        (first, "commit", first, 1),
    ]
    assert (found[0].message, found[0].parents) == ("second", (first,))
    assert found[0].date == datetime(1970, 1, 1, 0, 33, 20, tzinfo=UTC)


def test_a_push_to_a_branch_that_is_not_there_makes_it(hub: DirectoryHub, second: str) -> None:
    assert hub.tree("exp/one") is None
    push(hub, {"b": b"3"}, revision="exp/one")
    assert files_at(hub, "exp/one") == {"a": b"22", "b": b"3"}
    assert hub.resolve() == second


def test_a_branch_of_an_empty_hub_begins_empty(hub: DirectoryHub) -> None:
    hub.make_branch("dev")
    tree = hub.tree("dev")
    assert tree is not None and tree.commit == ""
    push(hub, {"a": b"1"}, revision="dev")
    assert [one.name for one in hub.revisions() if one.kind == "branch"] == ["dev"]


def test_make_branch_begins_at_main_and_leaves_one_that_is_there(hub: DirectoryHub, first: str, second: str) -> None:
    hub.make_branch("dev")
    assert hub.resolve("dev") == second
    hub.branch("old", first)
    hub.make_branch("old")
    assert hub.resolve("old") == first
    with pytest.raises(HubNotFoundError, match="To open a pull request, push with create_pr=True"):
        hub.make_branch("refs/pr/7")


def test_a_push_that_changes_nothing_makes_the_branch_all_the_same(hub: DirectoryHub, second: str) -> None:
    result = hub.commit({"a": BytesSource(b"22")}, parent=second, revision="same", message="same")
    assert (result.is_new, hub.resolve("same")) == (False, second)


def test_pull_requests_are_numbered_and_can_be_pushed_to(hub: DirectoryHub, second: str) -> None:
    results = [
        hub.commit({"a": BytesSource(text)}, parent=second, message="idea", create_pr=True) for text in (b"x", b"y")
    ]
    assert [result.pr_url for result in results] == ["refs/pr/1", "refs/pr/2"]
    assert hub.resolve() == second
    push(hub, {"b": b"more"}, revision="refs/pr/1")
    assert files_at(hub, "refs/pr/1") == {"a": b"x", "b": b"more"}
    assert files_at(hub, "refs/pr/2") == {"a": b"y"}
    with pytest.raises(HubNotFoundError, match="has no pull request 'refs/pr/9' to push to"):
        hub.commit({}, parent=second, revision="refs/pr/9", message="no")
    with pytest.raises(HubNotFoundError, match="Open one with create_pr=True on a branch"):
        hub.commit({}, parent=second, revision="refs/pr/1", message="no", create_pr=True)


def test_nothing_is_pushed_to_a_tag_or_a_commit(hub: DirectoryHub, first: str, second: str) -> None:
    hub.tag("v1", first)
    for name in ("v1", "refs/tags/v1", "refs/tags/v2"):
        with pytest.raises(HubError, match=f"Cannot push to '{name}': it is a tag"):
            hub.commit({}, parent=first, revision=name, message="no")
    for name in (first, first[:8]):
        with pytest.raises(HubError, match=r"Cannot push to '.*': it is a commit"):
            hub.commit({}, parent=second, revision=name, message="no")


@pytest.mark.parametrize(
    "name",
    [
        "-x", ".x", "a/.b", "a..b", "../x", "/x", "x/", "a//b", "x.lock", "a.lock/b", "x.", "a b", "a\nb", "é", "a~b",
        "refs/x", "refs/heads/", "refs/heads/../x", "refs/pr/0", "refs/pr/x", "HEAD", "0" * 40, "x" * 201, "a\\b", "",
    ],
)  # fmt: skip
def test_names_that_git_or_a_path_could_stumble_over_are_refused(hub: DirectoryHub, second: str, name: str) -> None:
    for make in (hub.branch, hub.tag):
        with pytest.raises(InvalidArgumentError, match="is not a valid revision name"):
            make(name)
    if name:
        with pytest.raises(InvalidArgumentError):
            hub.commit({}, parent=None, revision=name, message="no")
    assert [one.name for one in hub.revisions() if one.kind != "commit"] == ["main"]


def test_a_name_is_one_thing_only(hub: DirectoryHub, first: str, second: str) -> None:
    hub.tag("v1", first)
    assert hub.tag("v1", first) == first
    with pytest.raises(HubError, match=f"The tag 'v1' is already at {first}, not at {second}. Delete it first"):
        hub.tag("v1")
    with pytest.raises(InvalidArgumentError, match="'v1' is already the name of a tag"):
        hub.branch("v1")
    with pytest.raises(InvalidArgumentError, match="'main' is already the name of a branch"):
        hub.tag("main")
    hub.branch("a/b")
    for name in ("a", "a/b/c"):
        with pytest.raises(InvalidArgumentError, match="one would be a folder of the other"):
            hub.branch(name)
        with pytest.raises(InvalidArgumentError, match="one would be a folder of the other"):
            hub.commit({}, parent=second, revision=name, message="no")


def test_deleting_a_name_keeps_its_commit_until_prune(hub: DirectoryHub, first: str, second: str) -> None:
    lost = push(hub, {"big": b"!" * 8192}, revision="exp/one")
    hub.delete("exp/one")
    assert not os.path.exists(os.path.join(hub.root, "refs/heads/exp"))
    hub.verify(lost)
    status = os.stat(os.path.join(hub.snapshot(lost), "big"))
    assert hub.prune() == status.st_blocks * 512 >= 8192  # "a" is a link that main has too
    assert [one.commit for one in hub.revisions() if one.kind == "commit"] in ([first, second], [second, first])
    assert not os.path.exists(hub.url_of(lost))
    assert hub.prune() == 0
    hub.verify()
    assert litter(hub.root) == []


def test_prune_keeps_what_tags_and_pull_requests_lead_to(hub: DirectoryHub, first: str, second: str) -> None:
    dev = push(hub, {"b": b"3"}, revision="dev")
    hub.tag("v1", dev)
    hub.delete("dev")
    pr = hub.commit({"c": BytesSource(b"4")}, parent=second, message="idea", create_pr=True).commit
    assert hub.prune() == 0
    assert {one.commit for one in hub.revisions()} == {first, second, dev, pr}
    hub.delete("refs/pr/1")
    hub.prune()
    assert {one.commit for one in hub.revisions()} == {first, second, dev}


def test_main_is_deleted_by_force_only(hub: DirectoryHub, second: str) -> None:
    for name in ("main", "refs/heads/main"):
        with pytest.raises(HubError, match=r"Cannot delete 'main': .* loads it by default"):
            hub.delete(name)
    hub.delete("main", force=True)
    with pytest.raises(HubNotFoundError, match="It has no branches and tags; and 2 commits"):
        hub.snapshot()


def test_a_commit_that_a_name_leads_to_is_not_deleted(hub: DirectoryHub, first: str, second: str) -> None:
    hub.tag("v2")
    with pytest.raises(HubError, match=r"Cannot delete commit .*: names point to it \(main, v2\). Delete them first"):
        hub.delete(second)
    block_bytes = os.stat(os.path.join(hub.snapshot(first), "a")).st_blocks * 512
    assert hub.delete(first[:10]) == block_bytes  # history is shorter, and main is whole
    hub.verify()
    assert hub.prune() == 0
    with pytest.raises(HubNotFoundError):
        hub.delete(first)
    assert litter(hub.root) == []


def test_a_branch_whose_name_looks_like_an_id_is_found_before_a_commit(
    hub: DirectoryHub, first: str, second: str
) -> None:
    hub.branch(first[:7], second)
    assert hub.resolve(first[:7]) == second


def test_a_changed_byte_is_found_by_verify(hub: DirectoryHub) -> None:
    push(hub, {"a": b"1" * 100, "b": b"2"})
    path = Path(hub.snapshot(), "a")
    path.chmod(0o644)
    path.write_bytes(b"1" * 99 + b"0")
    assert hub.snapshot() == str(path.parent)
    with pytest.raises(IntegrityError, match=rf"'{path}' is damaged: its sha256 must be") as raised:
        hub.verify()
    assert raised.value.path == str(path)
    with pytest.raises(IntegrityError):
        hub.read("a", "main")


def test_a_snapshot_with_a_cut_missing_or_replaced_file_is_refused(hub: DirectoryHub, tmp_path: Path) -> None:
    push(hub, {"a": b"1" * 100, "s/b": b"2"})
    folder = Path(hub.snapshot())
    os.truncate(folder / "a", 7)
    with pytest.raises(IntegrityError, match="it must have 100 bytes, but has 7"):
        hub.snapshot()
    (folder / "a").unlink()
    os.symlink("/etc/passwd", folder / "a")
    with pytest.raises(MissingShardError, match="a' is missing or is not a regular file"):
        hub.snapshot()
    (folder / "a").unlink()
    (folder / "a").write_bytes(b"1" * 100)
    os.rename(folder / "s", tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", folder / "s")
    with pytest.raises(MissingShardError, match="s/b' is missing or is not a regular file"):
        hub.snapshot()
    with pytest.raises(MissingShardError):  # nor is it taken over into a new commit
        push(hub, {"c": b"3"})


def test_a_file_that_was_not_pushed_is_found_by_verify(hub: DirectoryHub) -> None:
    push(hub, {"a": b"1"})
    Path(hub.snapshot(), "model.safetensors").write_bytes(b"smuggled")
    with pytest.raises(IntegrityError, match=r"model.safetensors' is in the snapshot, but was not pushed"):
        hub.verify()


def test_a_manifest_with_other_bytes_is_refused(hub: DirectoryHub) -> None:
    commit = push(hub, {"a": b"1"})
    path = Path(hub.root, "commits", f"{commit}.json")
    path.write_bytes(path.read_bytes().replace(b'"a"', b'"b"'))
    with pytest.raises(IntegrityError, match="is damaged: its bytes hash to the commit id"):
        hub.tree()
    assert [revision.is_damaged for revision in hub.revisions()] == [True, True]
    with pytest.raises(IntegrityError):
        hub.prune()


@pytest.mark.parametrize("is_deleted", [True, False])
def test_a_damaged_commit_is_deleted_or_made_anew_and_pushed_again(hub: DirectoryHub, is_deleted: bool) -> None:
    commit = push(hub, {"a": b"1"})
    Path(hub.snapshot(), "a").unlink()
    hub.delete("main", force=True)
    if is_deleted:
        hub.delete(commit)
        assert hub.revisions() == []
    assert push(hub, {"a": b"1"}) == commit
    hub.verify()


@pytest.mark.parametrize("extra", ["a/b", "c"])
def test_nothing_of_a_damaged_snapshot_is_put_beside_the_files_that_are_pushed_again(
    hub: DirectoryHub, extra: str
) -> None:
    first = push(hub, {"first": b"1"})
    hub.branch("other", first)
    commit = push(hub, {"a": b"1"})
    Path(hub.snapshot(), "a").unlink()
    damaged = Path(hub.url_of(commit), extra)
    damaged.parent.mkdir(exist_ok=True)
    damaged.write_bytes(b"2")

    assert push(hub, {"a": b"1"}, revision="other") == commit

    hub.verify()
    assert litter(hub.root) == []
    assert hub.tag("v1") == commit


@pytest.mark.parametrize(
    ("change", "names"),
    [(lambda hub: hub.delete("v1"), ["main"]), (lambda hub: hub.tag("v2"), ["main", "v1", "v2"])],
)
def test_a_name_that_was_changed_but_not_flushed_is_said_to_be_changed(
    change: Callable[[DirectoryHub], Any], names: list[str], hub: DirectoryHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(hub, {"a": b"1"})
    hub.tag("v1")
    fsync = os.fsync

    def failing(fd: int) -> None:
        if os.path.basename(os.readlink(f"/proc/self/fd/{fd}")) == "tags":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(CommitUnfinishedError, match=r"'refs/tags/v[12]' of '.*' was changed, but could not be flushed"):
        change(hub)

    assert [one.name for one in hub.revisions() if one.kind != "commit"] == names


@pytest.mark.parametrize(
    "change",
    [{"files": {"x": {"sha256": "0" * 63, "size": 1}}}, {"files": {"../x": {"sha256": "0" * 64, "size": 1}}}]
    + [{"files": {"x": {"sha256": "0" * 64, "size": size}}} for size in (-1, True)]
    + [{"files": {"x": None}}, {"files": ["x"]}]
    + [{"format": 2}, {"parents": ["main"]}, {"message": None}, {"description": 3}],
)
def test_a_hostile_manifest_of_the_right_hash_is_refused(hub: DirectoryHub, change: dict[str, object]) -> None:
    good: dict[str, object] = {"description": None, "files": {}, "format": 1, "message": "", "parents": []}
    raw = json.dumps(good | change).encode()
    commit = hashlib.sha256(raw).hexdigest()[:40]
    Path(hub.root, "commits").mkdir()
    Path(hub.root, "commits", f"{commit}.json").write_bytes(raw)
    with pytest.raises(ValueError, match="is not a valid manifest of this format"):
        hub.tree(commit)


@pytest.mark.parametrize("raw", [b"", b"main\n", b"0" * 39, b"0" * 41, b"\xff" * 40])
def test_a_damaged_ref_is_an_error_that_names_it(hub: DirectoryHub, raw: bytes) -> None:
    push(hub, {"a": b"1"})
    Path(hub.root, "refs/heads/main").write_bytes(raw)
    with pytest.raises(ValueError, match="refs/heads/main' is damaged: it must contain a commit id"):
        hub.resolve()


class History:
    """Commits one, two and three of main; v1 is at one; dev is made on two; refs/heads/old was deleted, at lost."""

    def __init__(self, hub: DirectoryHub) -> None:
        self.root = hub.root
        self.one = push(hub, {"a": b"1", "same": b"s"}, "one")
        hub.tag("v1")
        self.two = push(hub, {"a": b"22"}, "two")
        self.dev = push(hub, {"b": b"dev"}, "dev", revision="dev")
        self.lost = push(hub, {"b": b"lost" * 999}, "lost", revision="old")
        hub.delete("old")
        self.three = push(hub, {"a": b"333"}, "three")

    def lose(self, *names: str) -> None:
        """Remove files or folders; `{two}` stands for the commit's id."""
        for name in names:
            path = os.path.join(self.root, name.format(**vars(self)))
            shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)


@pytest.fixture
def history(hub: DirectoryHub) -> History:
    return History(hub)


CHANGES: dict[str, Callable[[DirectoryHub], object]] = {
    "push": lambda hub: push(hub, {"new": b"n"}),
    "push to dev": lambda hub: push(hub, {"new": b"d"}, revision="dev"),
    "push to a new branch": lambda hub: push(hub, {"new": b"b"}, revision="exp/x"),
    "tag": lambda hub: hub.tag("v2"),
    "delete a tag": lambda hub: hub.delete("v1"),
    "prune": DirectoryHub.prune,
}


@pytest.mark.parametrize(
    "names",
    [
        ["commits/{three}.json"], ["commits/{two}.json"], ["commits/{one}.json"], ["commits/{dev}.json"],
        ["commits/{one}.json", "commits/{two}.json"], ["commits"],
        ["refs"], ["refs/heads/main"], ["refs/heads/dev"], ["refs/heads"], ["refs", "commits"],
        ["refs", "commits/{three}.json"], ["snapshots"], ["snapshots/{three}"], ["snapshots/{one}"],
    ],
    ids=str,
)  # fmt: skip
def test_no_change_deletes_what_a_partial_copy_still_has(hub: DirectoryHub, history: History, names: list[str]) -> None:
    lost = {path for path in everything(history.root) if f"/{history.lost}" in path}  # this may be pruned
    history.lose(*names)
    before = {path for path in everything(history.root) if "/refs/" not in path} - lost
    deleted = {}
    for what, change in CHANGES.items():
        with suppress(HfshardError):
            change(hub)
        deleted[what] = before - everything(history.root).keys()
    assert deleted == {what: set() for what in CHANGES}


def test_a_lost_manifest_is_reported_with_the_way_out_wherever_it_is_needed(
    hub: DirectoryHub, history: History
) -> None:
    history.lose("commits/{three}.json", "commits/{one}.json")
    way_out = f"run: hfshard revisions {history.root} --delete {history.three}"
    for change in (hub.tree, hub.snapshot, hub.verify, hub.prune, lambda: push(hub, {"b": b"4"}), lambda: hub.tag("x")):
        with pytest.raises(DamagedCheckpointError, match=f"Commit {history.three} has no manifest") as raised:
            change()
        assert raised.value.message.endswith(way_out)
        assert raised.value.path == f"{history.root}/commits/{history.three}.json"
    listed = {one.name: one.problem for one in hub.revisions() if one.is_damaged}
    assert listed.keys() == {"main", "v1", history.one, history.three}
    assert listed["main"].endswith(way_out)
    hub.verify("dev")


def test_a_lost_manifest_of_an_ancestor_stops_prune_and_not_a_push(hub: DirectoryHub, history: History) -> None:
    history.lose("commits/{two}.json")
    pushed = push(hub, {"a": b"4444"})
    assert files_at(hub) == {"a": b"4444", "same": b"s"}
    with pytest.raises(DamagedCheckpointError, match=rf"{history.two} has no .*, and commit {history.dev} is based"):
        hub.prune()
    assert hub.delete(history.two[:9]) == 0  # dev has its files too
    assert hub.prune() > 0  # the history is given up there, and no further
    assert {one.commit for one in hub.revisions()} == {pushed, history.three, history.one, history.dev}
    assert litter(history.root) == []


def test_lost_names_stop_prune_until_each_commit_has_one_or_is_deleted(hub: DirectoryHub, history: History) -> None:
    history.lose("refs/heads/dev")
    with pytest.raises(DamagedCheckpointError, match=rf", existing or deleted, leads to {history.dev}: ") as raised:
        hub.prune()
    assert f"a name: hfshard revisions {hub.root} --tag NAME {history.dev}; to discard one, " in str(raised.value)
    hub.tag("was-dev", history.dev)
    assert hub.prune() > 0  # the commit of the branch that was deleted
    assert history.lost not in {one.commit for one in hub.revisions()}
    hub.verify("was-dev")


def test_a_hub_that_lost_all_its_names_is_not_begun_anew(hub: DirectoryHub) -> None:
    commit = push(hub, {"a": b"1"})
    shutil.rmtree(os.path.join(hub.root, "refs"))
    with pytest.raises(DamagedCheckpointError, match=rf"leads to {commit}: names in refs/ were lost"):
        push(hub, {"a": b"2"})
    Path(hub.root, "refs/heads").mkdir(parents=True)
    Path(hub.root, "refs/heads/main").write_text(f"{commit}\n")
    assert hub.resolve() == commit


def test_a_name_that_is_made_again_protects_its_commit_again(hub: DirectoryHub, history: History) -> None:
    hub.tag("kept", history.lost)
    history.lose("refs/tags/kept")
    with pytest.raises(DamagedCheckpointError, match=f"leads to {history.lost}"):
        hub.prune()


def test_a_commit_that_was_deleted_is_no_damage_and_its_parents_stay(hub: DirectoryHub, history: History) -> None:
    hub.delete(history.two)
    assert not any(one.is_damaged for one in hub.revisions())
    assert hub.prune() > 0
    assert {one.commit for one in hub.revisions()} == {history.one, history.three, history.dev}
    assert os.listdir(f"{hub.root}/deleted") == [f"{history.two}.json"]
    hub.delete("main", force=True)
    hub.delete("dev")
    hub.delete("v1")
    hub.prune()
    assert os.listdir(f"{hub.root}/deleted") == os.listdir(f"{hub.root}/commits") == []


def test_pushing_the_same_again_mends_a_commit_that_lost_its_manifest(hub: DirectoryHub, history: History) -> None:
    history.lose("commits/{lost}.json")
    hub.branch("again", history.two)
    assert push(hub, {"b": b"lost" * 999}, "lost", revision="again") == history.lost
    hub.verify("again")
    assert litter(hub.root) == []


def test_a_name_that_was_lost_protects_what_a_deleted_name_led_to_as_well(hub: DirectoryHub) -> None:
    push(hub, {"a": b"1"})
    dev = push(hub, {"b": b"2"}, "dev", revision="dev")
    hub.branch("old", "dev")
    old = push(hub, {"c": b"3"}, "old", revision="old")
    hub.delete("old")
    os.unlink(f"{hub.root}/refs/heads/dev")
    with pytest.raises(DamagedCheckpointError, match=f"leads to {dev}: "):
        hub.prune()
    hub.branch("dev", dev)
    assert hub.prune() > 0
    assert old not in {one.commit for one in hub.revisions()}
    hub.verify("dev")


def test_a_commit_on_a_noted_one_protects_it_again(hub: DirectoryHub, history: History) -> None:
    hub.branch("again", history.lost)
    push(hub, {"b": b"more"}, revision="again")
    os.unlink(f"{hub.root}/refs/heads/again")
    with pytest.raises(DamagedCheckpointError, match="names in refs/ were lost"):
        hub.prune()
    assert os.path.isdir(hub.url_of(history.lost))


def test_what_the_staging_of_a_hub_in_use_calls_unfinished_stays_if_it_was_finished(
    hub: DirectoryHub, history: History
) -> None:
    for commit in (history.one, history.two, history.dev):
        os.mkdir(f"{history.root}/.staging")
        Path(history.root, ".staging/new-commit").write_text(f"{commit}\n")
        push(hub, {"new": commit.encode()})
    for commit in (history.one, history.two, history.dev):
        hub.verify(commit)


def test_an_old_note_that_a_commit_was_deleted_does_not_remove_what_a_name_points_to(
    hub: DirectoryHub, history: History
) -> None:
    os.rename(f"{history.root}/commits/{history.dev}.json", f"{history.root}/deleted/{history.dev}.json")
    push(hub, {"a": b"4"})
    assert os.listdir(hub.url_of(history.dev))


def test_main_alone_is_not_begun_anew_either(hub: DirectoryHub, history: History) -> None:
    history.lose("refs/heads/main")
    with pytest.raises(DamagedCheckpointError, match=rf"leads to {history.three}: names in refs/ were lost"):
        push(hub, {"a": b"anew"})
    hub.branch("main", history.three)
    push(hub, {"a": b"4"})
    assert files_at(hub) == {"a": b"4", "same": b"s"}


def test_of_the_commits_that_lost_their_name_the_newest_is_shown(hub: DirectoryHub) -> None:
    newest = [push(hub, {"a": bytes([number])}) for number in range(9)][-1]
    shutil.rmtree(os.path.join(hub.root, "refs"))
    with pytest.raises(
        DamagedCheckpointError, match=f", existing or deleted, leads to {newest}: .*--tag NAME {newest};"
    ):
        push(hub, {"a": b"x"})
    hub.tag("all", newest)
    hub.delete("all")
    assert hub.prune() > 0
    assert hub.revisions() == []


@pytest.mark.parametrize("renames", range(6))
def test_a_killed_repair_keeps_each_file_where_folders_have_no_rename(
    renames: int, hub: DirectoryHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"a": b"1", "b": b"2", "s/c": b"3"}
    commit = push(hub, files)
    os.unlink(f"{hub.url_of(commit)}/a")
    hub.tag("v1")
    hub.delete("main", force=True)
    left, plain_rename = [renames], os.rename

    def rename(source: str, target: str, **options: int) -> None:
        """Rename files only, and only as many; then fail as at a kill, in the clean-up too."""
        if os.path.isdir(source):
            raise OSError(errno.ENOTSUP, "no rename of folders")
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        plain_rename(source, target, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        with suppress(KeyboardInterrupt):
            push(hub, files)
    hub.tag("v2", commit)  # puts in order what the kill left
    kept = {name: raw for name, raw in files.items() if os.path.exists(f"{hub.url_of(commit)}/{name}")}
    assert kept.keys() >= {"b", "s/c"}
    assert push(hub, files) == commit
    hub.verify("v1")
