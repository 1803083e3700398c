"""Names in a directory hub: branches, tags, pull requests and ids; how they are found, listed, deleted and pruned."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from hfshard.disk.byte_source import BytesSource
from hfshard.errors import HubError, HubNotFoundError, InvalidArgumentError
from hfshard.hub.directory.directory_hub import DirectoryHub
from tests.hub.directory.helpers import files_at, litter, push


@pytest.fixture
def two(hub: DirectoryHub) -> tuple[DirectoryHub, str, str]:
    """A hub with two commits on main."""
    return hub, push(hub, {"a": b"1"}, "first"), push(hub, {"a": b"22"}, "second")


Two = tuple[DirectoryHub, str, str]


def test_a_revision_is_found_by_branch_tag_id_and_beginning_of_an_id(two: Two) -> None:
    hub, first, second = two
    assert hub.tag("v1.0", first) == first
    assert hub.branch("dev/x") == second
    for name in ("v1.0", "refs/tags/v1.0", first, first[:7], first[:39]):
        assert hub.resolve(name) == first
        tree = hub.tree(name)
        assert tree is not None and tree.commit == first
    for same in (None, "main", "refs/heads/main", "dev/x", "refs/heads/dev/x", second):
        assert hub.resolve(same) == second


@pytest.mark.parametrize("name", ["nothing", "0123456", "0" * 40, "refs/pr/1", "refs/heads/x", "../../etc", "a b"])
def test_a_revision_that_is_not_there_is_an_error_that_lists_what_is(two: Two, name: str) -> None:
    hub, first, _ = two
    hub.tag("v1", first)
    with pytest.raises(HubNotFoundError, match=r"has no revision .*\. It has main, v1; and 2 commits, listed in"):
        hub.resolve(name)
    assert hub.tree(name) is None


def test_six_digits_of_an_id_are_no_revision(two: Two) -> None:
    hub, first, _ = two
    with pytest.raises(HubNotFoundError):
        hub.resolve(first[:6])


def test_a_beginning_of_two_ids_is_ambiguous(hub: DirectoryHub) -> None:
    push(hub, {"a": b"1"})
    for end in "01":
        Path(hub.root, "commits", "abcdef0" + end * 33 + ".json").write_text("{}")
    with pytest.raises(HubError, match=r"2 commits of .* begin with abcdef0: abcdef00.*, abcdef01.* Write more of it"):
        hub.resolve("abcdef0")


def test_revisions_are_listed_main_first_and_commits_newest_first(two: Two) -> None:
    hub, first, second = two
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


def test_a_push_to_a_branch_that_is_not_there_makes_it(two: Two) -> None:
    hub, _, second = two
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


def test_make_branch_begins_at_main_and_leaves_one_that_is_there(two: Two) -> None:
    hub, first, second = two
    hub.make_branch("dev")
    assert hub.resolve("dev") == second
    hub.branch("old", first)
    hub.make_branch("old")
    assert hub.resolve("old") == first
    with pytest.raises(HubNotFoundError, match="To open a pull request, push with create_pr=True"):
        hub.make_branch("refs/pr/7")


def test_a_push_that_changes_nothing_makes_the_branch_all_the_same(two: Two) -> None:
    hub, _, second = two
    result = hub.commit({"a": BytesSource(b"22")}, parent=second, revision="same", message="same")
    assert (result.is_new, hub.resolve("same")) == (False, second)


def test_pull_requests_are_numbered_and_can_be_pushed_to(two: Two) -> None:
    hub, _, second = two
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


def test_nothing_is_pushed_to_a_tag_or_a_commit(two: Two) -> None:
    hub, first, second = two
    hub.tag("v1", first)
    for name in ("v1", "refs/tags/v1", "refs/tags/v2"):
        with pytest.raises(HubError, match=f"'{name}' is a tag, and stays where it is"):
            hub.commit({}, parent=first, revision=name, message="no")
    for name in (first, first[:8]):
        with pytest.raises(HubError, match="is a commit, and nothing can be pushed to it"):
            hub.commit({}, parent=second, revision=name, message="no")


@pytest.mark.parametrize(
    "name",
    [
        "-x", ".x", "a/.b", "a..b", "../x", "/x", "x/", "a//b", "x.lock", "a.lock/b", "x.", "a b", "a\nb", "é", "a~b",
        "refs/x", "refs/heads/", "refs/heads/../x", "refs/pr/0", "refs/pr/x", "HEAD", "0" * 40, "x" * 201, "a\\b", "",
    ],
)  # fmt: skip
def test_names_that_git_or_a_path_could_stumble_over_are_refused(two: Two, name: str) -> None:
    hub, *_ = two
    for make in (hub.branch, hub.tag):
        with pytest.raises(InvalidArgumentError, match="can't be the name of a revision"):
            make(name)
    if name:
        with pytest.raises(InvalidArgumentError):
            hub.commit({}, parent=None, revision=name, message="no")
    assert [one.name for one in hub.revisions() if one.kind != "commit"] == ["main"]


def test_a_name_is_one_thing_only(two: Two) -> None:
    hub, first, second = two
    hub.tag("v1", first)
    assert hub.tag("v1", first) == first
    with pytest.raises(HubError, match=f"The tag 'v1' is at {first} already, not at {second}. Delete it first"):
        hub.tag("v1")
    with pytest.raises(InvalidArgumentError, match="'v1' is the name of a tag already"):
        hub.branch("v1")
    with pytest.raises(InvalidArgumentError, match="'main' is the name of a branch already"):
        hub.tag("main")
    hub.branch("a/b")
    for name in ("a", "a/b/c"):
        with pytest.raises(InvalidArgumentError, match="one would be a folder of the other"):
            hub.branch(name)
        with pytest.raises(InvalidArgumentError, match="one would be a folder of the other"):
            hub.commit({}, parent=second, revision=name, message="no")


def test_deleting_a_name_keeps_its_commit_until_prune(two: Two) -> None:
    hub, first, second = two
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


def test_prune_keeps_what_tags_and_pull_requests_lead_to(two: Two) -> None:
    hub, first, second = two
    dev = push(hub, {"b": b"3"}, revision="dev")
    hub.tag("v1", dev)
    hub.delete("dev")
    pr = hub.commit({"c": BytesSource(b"4")}, parent=second, message="idea", create_pr=True).commit
    assert hub.prune() == 0
    assert {one.commit for one in hub.revisions()} == {first, second, dev, pr}
    hub.delete("refs/pr/1")
    hub.prune()
    assert {one.commit for one in hub.revisions()} == {first, second, dev}


def test_main_is_deleted_by_force_only(two: Two) -> None:
    hub, *_ = two
    for name in ("main", "refs/heads/main"):
        with pytest.raises(HubError, match=r"'main' is what .* loads by default"):
            hub.delete(name)
    hub.delete("main", force=True)
    with pytest.raises(HubNotFoundError, match="It has no branches and tags; and 2 commits"):
        hub.snapshot()


def test_a_commit_that_a_name_leads_to_is_not_deleted(two: Two) -> None:
    hub, first, second = two
    hub.tag("v2")
    with pytest.raises(HubError, match=r"can't be deleted: it is what main, v2 points to. Delete that first"):
        hub.delete(second)
    block_bytes = os.stat(os.path.join(hub.snapshot(first), "a")).st_blocks * 512
    assert hub.delete(first[:10]) == block_bytes  # history is shorter, and main is whole
    hub.verify()
    assert hub.prune() == 0
    with pytest.raises(HubNotFoundError):
        hub.delete(first)
    assert litter(hub.root) == []


def test_a_branch_whose_name_looks_like_an_id_is_found_before_a_commit(two: Two) -> None:
    hub, first, second = two
    hub.branch(first[:7], second)
    assert hub.resolve(first[:7]) == second
