"""What a directory hub holds: every name of a commit, every commit, and which ones no name leads to."""

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
    """One name that a commit has, or the commit itself."""

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
    """Bytes of its files together, whether they are shared with other commits or not."""
    is_damaged: bool = False
    """Its manifest can't be read: message, parents and size are not known."""


def revisions_of(root: str) -> list[Revision]:
    """All branches (main first), tags and pull requests, then all commits, the newest first."""
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
    """The commits that no branch, tag or pull request leads to, directly or by way of parents.

    Raises:
        DamagedCheckpointError: A manifest on the way can't be read: what it leads to is not known.
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
