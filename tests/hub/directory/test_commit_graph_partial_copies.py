"""A directory hub of which a part was lost, as by an rsync that was cut off: nothing that is left is deleted."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from hfshard.errors import DamagedCheckpointError, HfshardError
from hfshard.hub.directory.directory_hub import DirectoryHub
from tests.hub.directory.helpers import everything, files_at, litter, push


class History:
    """Commits one, two and three of main; v1 is at one; dev is made on two; refs/heads/old was deleted, at lost."""

    def __init__(self, hub: DirectoryHub) -> None:
        self.hub = hub
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
def test_no_change_deletes_what_a_partial_copy_still_has(history: History, names: list[str]) -> None:
    lost = {path for path in everything(history.root) if f"/{history.lost}" in path}  # this may be pruned
    history.lose(*names)
    before = {path for path in everything(history.root) if "/refs/" not in path} - lost
    deleted = {}
    for what, change in CHANGES.items():
        with suppress(HfshardError):
            change(history.hub)
        deleted[what] = before - everything(history.root).keys()
    assert deleted == {what: set() for what in CHANGES}


def test_a_lost_manifest_is_reported_with_the_way_out_wherever_it_is_needed(history: History) -> None:
    hub = history.hub
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


def test_a_lost_manifest_of_an_ancestor_stops_prune_and_not_a_push(history: History) -> None:
    history.lose("commits/{two}.json")
    pushed = push(history.hub, {"a": b"4444"})
    assert files_at(history.hub) == {"a": b"4444", "same": b"s"}
    with pytest.raises(DamagedCheckpointError, match=rf"{history.two} has no .*, and commit {history.dev} was made"):
        history.hub.prune()
    assert history.hub.delete(history.two[:9]) == 0  # dev has its files too
    assert history.hub.prune() > 0  # the history is given up there, and no further
    assert {one.commit for one in history.hub.revisions()} == {pushed, history.three, history.one, history.dev}
    assert litter(history.root) == []


def test_lost_names_stop_prune_until_each_commit_has_one_or_is_deleted(history: History) -> None:
    hub = history.hub
    history.lose("refs/heads/dev")
    with pytest.raises(
        DamagedCheckpointError, match=rf"leads to {history.dev}, and none that was deleted did"
    ) as raised:
        hub.prune()
    assert f"a name: hfshard revisions {hub.root} --tag NAME {history.dev}; to give it up, " in str(raised.value)
    hub.tag("was-dev", history.dev)
    assert hub.prune() > 0  # the commit of the branch that was deleted
    assert history.lost not in {one.commit for one in hub.revisions()}
    hub.verify("was-dev")


def test_a_hub_that_lost_all_its_names_is_not_begun_anew(hub: DirectoryHub) -> None:
    commit = push(hub, {"a": b"1"})
    shutil.rmtree(os.path.join(hub.root, "refs"))
    with pytest.raises(DamagedCheckpointError, match=rf"leads to {commit}, .* names in refs/ were lost"):
        push(hub, {"a": b"2"})
    Path(hub.root, "refs/heads").mkdir(parents=True)
    Path(hub.root, "refs/heads/main").write_text(f"{commit}\n")
    assert hub.resolve() == commit


def test_a_name_that_is_made_again_protects_its_commit_again(history: History) -> None:
    history.hub.tag("kept", history.lost)
    history.lose("refs/tags/kept")
    with pytest.raises(DamagedCheckpointError, match=f"leads to {history.lost}"):
        history.hub.prune()


def test_a_commit_that_was_deleted_is_no_damage_and_its_parents_stay(history: History) -> None:
    hub = history.hub
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


def test_pushing_the_same_again_mends_a_commit_that_lost_its_manifest(history: History) -> None:
    hub = history.hub
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
    with pytest.raises(DamagedCheckpointError, match=f"leads to {dev}, "):
        hub.prune()
    hub.branch("dev", dev)
    assert hub.prune() > 0
    assert old not in {one.commit for one in hub.revisions()}
    hub.verify("dev")


def test_a_commit_on_a_noted_one_protects_it_again(history: History) -> None:
    hub = history.hub
    hub.branch("again", history.lost)
    push(hub, {"b": b"more"}, revision="again")
    os.unlink(f"{hub.root}/refs/heads/again")
    with pytest.raises(DamagedCheckpointError, match="names in refs/ were lost"):
        hub.prune()
    assert os.path.isdir(hub.url_of(history.lost))


def test_what_the_staging_of_a_hub_in_use_calls_unfinished_stays_if_it_was_finished(history: History) -> None:
    for commit in (history.one, history.two, history.dev):
        os.mkdir(f"{history.root}/.staging")
        Path(history.root, ".staging/new-commit").write_text(f"{commit}\n")
        push(history.hub, {"new": commit.encode()})
    for commit in (history.one, history.two, history.dev):
        history.hub.verify(commit)


def test_an_old_note_that_a_commit_was_deleted_does_not_remove_what_a_name_points_to(history: History) -> None:
    os.rename(f"{history.root}/commits/{history.dev}.json", f"{history.root}/deleted/{history.dev}.json")
    push(history.hub, {"a": b"4"})
    assert os.listdir(history.hub.url_of(history.dev))


def test_main_alone_is_not_begun_anew_either(history: History) -> None:
    hub = history.hub
    history.lose("refs/heads/main")
    with pytest.raises(DamagedCheckpointError, match=rf"leads to {history.three}, .* names in refs/ were lost"):
        push(hub, {"a": b"anew"})
    hub.branch("main", history.three)
    push(hub, {"a": b"4"})
    assert files_at(hub) == {"a": b"4", "same": b"s"}


def test_of_the_commits_that_lost_their_name_the_newest_is_shown(hub: DirectoryHub) -> None:
    newest = [push(hub, {"a": bytes([number])}) for number in range(9)][-1]
    shutil.rmtree(os.path.join(hub.root, "refs"))
    with pytest.raises(DamagedCheckpointError, match=f"leads to {newest}, and none .*--tag NAME {newest};"):
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
