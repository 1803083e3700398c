"""Lists what a directory hub holds: the names of commits, all commits, and those that no name leads to."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime

from hfshard.errors import DamagedCheckpointError
from hfshard.hub.directory.manifest import commit_ids, manifest_path, read_commit_manifest
from hfshard.hub.directory.refs import all_refs
from hfshard.hub.refs import RefKind, kind_of, short_name


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
    """Whether its manifest can't be read, so that message, parents and size are unknown."""


def revisions_of(root: str) -> list[Revision]:
    """List all branches (main first), tags and pull requests, then all commits, newest first."""
    named = [_revision(root, short_name(ref), kind_of(ref), commit) for ref, commit in all_refs(root).items()]
    commits = [_revision(root, commit, "commit", commit) for commit in commit_ids(root)]
    return named + sorted(commits, key=lambda revision: revision.date, reverse=True)


def _revision(root: str, name: str, kind: RefKind, commit: str) -> Revision:
    date = datetime.fromtimestamp(0, UTC)
    try:
        date = datetime.fromtimestamp(os.stat(manifest_path(root, commit)).st_mtime, UTC)
        manifest = read_commit_manifest(root, commit)
    except (FileNotFoundError, DamagedCheckpointError):
        return Revision(name, kind, commit, "", (), date, 0, is_damaged=True)
    return Revision(name, kind, commit, manifest.message, manifest.parents, date, manifest.size)


def unreachable(root: str) -> list[str]:
    """Find the commits that no branch, tag or pull request leads to, directly or through parents.

    Raises:
        DamagedCheckpointError: A manifest on the way can't be read, so that its parents are unknown.
    """
    there = set(commit_ids(root))
    reached: set[str] = set()
    ends = list(all_refs(root).values())
    while ends:
        commit = ends.pop()
        if commit in there and commit not in reached:
            reached.add(commit)
            ends += read_commit_manifest(root, commit).parents
    return sorted(there - reached)
