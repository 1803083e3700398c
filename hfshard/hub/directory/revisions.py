"""Lists what a directory hub holds: the names of commits, all commits, and those that no name leads to."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from hfshard._util.text import list_some
from hfshard.errors import DamagedCheckpointError
from hfshard.hub.directory.deleted import (
    known_reachable,
    lost_commits,
    reachable,
    unfinished_commit,
    unnamed_commits,
)
from hfshard.hub.directory.manifest import commit_ids, manifest_path, missing_manifest, read_commit_manifest
from hfshard.hub.directory.refs import all_refs
from hfshard.hub.refs import RefKind, kind_of, short_name

_SHOWN: Final = 3
"""Commits that a message lists."""


@dataclass(frozen=True, slots=True)
class Revision:
    """A name of a commit, or the commit itself."""

    name: str
    """`main`, `v1`, `refs/pr/1`, or the full id."""
    kind: RefKind
    commit: str
    """The full id."""
    message: str
    parents: tuple[str, ...]
    date: datetime
    """When the commit was made here, in UTC."""
    size: int
    """Bytes of all its files, shared with other commits or not."""
    is_damaged: bool = False
    """Whether its manifest is missing or can't be read, so that message, parents and size are unknown."""
    problem: str = ""
    """If it is damaged: what is wrong, and what to do."""


def revisions_of(root: str) -> list[Revision]:
    """List all branches (main first), tags and pull requests, then all commits, newest first, then the lost ones."""
    named = [_revision(root, short_name(ref), kind_of(ref), commit) for ref, commit in all_refs(root).items()]
    commits = [_revision(root, commit, "commit", commit) for commit in [*commit_ids(root), *lost_commits(root)]]
    return named + sorted(commits, key=lambda revision: revision.date, reverse=True)


def _revision(root: str, name: str, kind: RefKind, commit: str) -> Revision:
    date = datetime.fromtimestamp(0, UTC)
    try:
        date = datetime.fromtimestamp(os.stat(manifest_path(root, commit)).st_mtime, UTC)
        manifest = read_commit_manifest(root, commit)
    except FileNotFoundError:
        problem = missing_manifest(root, commit, "").message
    except DamagedCheckpointError as error:
        problem = error.message
    else:
        return Revision(name, kind, commit, manifest.message, manifest.parents, date, manifest.size)
    return Revision(name, kind, commit, "", (), date, 0, is_damaged=True, problem=problem)


def unreachable(root: str) -> list[str]:
    """Find the commits that no branch, tag or pull request leads to, directly or through parents.

    Raises:
        DamagedCheckpointError: A manifest on the way is missing or can't be read, so that its parents are unknown; or
            no name that was deleted led to such a commit either, so that a name was lost.
    """
    found = set(commit_ids(root)) - reachable(root, all_refs(root))
    if lost := found.difference(unnamed_commits(root)):
        raise _names_lost(root, lost)
    return sorted(found)


def refuse_lost_names(root: str) -> None:
    """Refuse to begin a branch anew in a hub that holds commits to which no name leads, nor did one that was deleted.

    Raises:
        DamagedCheckpointError: Names were lost.
    """
    # In this order, as others may push, delete and prune meanwhile.
    there = commit_ids(root)
    unfinished = unfinished_commit(root)
    named = known_reachable(root, all_refs(root).values())
    lost = set(there).difference(named, unnamed_commits(root), [unfinished]).intersection(commit_ids(root))
    if lost:
        raise _names_lost(root, lost)


def _names_lost(root: str, lost: set[str]) -> DamagedCheckpointError:
    """Make the error that shows the newest of the commits: a name for them is a name for all."""
    before = known_reachable(root, [parent for commit in lost for parent in _parents(root, commit)])
    commits = sorted(lost - before)
    one = commits[0]
    return DamagedCheckpointError(
        f"No branch, tag or pull request of '{root}' leads to {list_some(commits, _SHOWN)}, and none that was deleted "
        "did: names in refs/ were lost, as in a copy that was cut off. Nothing was removed. Copy "
        f"'{os.path.join(root, 'refs')}' again from where the hub came from. Or give each of them a name: "
        f"hfshard revisions {root} --tag NAME {one}; to give it up, with all before it that have no name, delete that "
        f"name again: hfshard revisions {root} --delete NAME",
        path=os.path.join(root, "refs"),
    )


def _parents(root: str, commit: str) -> tuple[str, ...]:
    try:
        return read_commit_manifest(root, commit).parents
    except DamagedCheckpointError:
        return ()
