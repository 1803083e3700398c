"""What was deleted from a directory hub on purpose: whatever else is missing was lost, and nothing may be swept for it.

    <root>/deleted/<id>.json    the manifest of a commit that was deleted, moved here from commits/; or nothing, where
                                it had been lost
    <root>/deleted/<id>         empty: no name led to this commit any more when one that did was deleted

A partial copy of a hub (an rsync that was cut off) lacks files without any such record. Parents are followed through
the manifests of deleted commits, so that deleting one commit of a history does not cut off those before it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from typing import Final

from hfshard.commit.hub_marker import STAGING
from hfshard.errors import DamagedCheckpointError
from hfshard.hub.directory.manifest import (
    SNAPSHOTS,
    commit_ids,
    manifest_path,
    missing_manifest,
    read_commit_manifest,
    read_manifest_file,
    snapshot_path,
)
from hfshard.hub.refs import is_commit_id

DELETED: Final = "deleted"
NEW_COMMIT: Final = "new-commit"
"""Name in the staging directory of the ref for a commit that is new. As long as it is there, that commit is unfinished;
renaming it into place commits."""
_MAX_REF_BYTES: Final = 64
"""An id and a newline are 41 bytes."""


def deleted_path(root: str, commit: str) -> str:
    """Where the manifest of a deleted commit is."""
    return os.path.join(root, DELETED, f"{commit}.json")


def unnamed_path(root: str, commit: str) -> str:
    """The file that tells that the last name that led to a commit was deleted."""
    return os.path.join(root, DELETED, commit)


def deleted_commits(root: str) -> list[str]:
    """The ids of the commits that were deleted, as far as a commit that is there was made on them."""
    return sorted(name[:-5] for name in _listing(os.path.join(root, DELETED)) if name.endswith(".json"))


def unnamed_commits(root: str) -> list[str]:
    """The ids of the commits that may go: to which no name led any more when one that did was deleted."""
    return sorted(name for name in _listing(os.path.join(root, DELETED)) if is_commit_id(name))


def unfinished_commit(root: str) -> str | None:
    """The id of the commit that is being made, or that a killed push did not finish."""
    try:
        with open(os.path.join(root, STAGING, NEW_COMMIT), "rb") as file:
            commit = file.read(_MAX_REF_BYTES).decode("ascii", "replace").removesuffix("\n")
    except FileNotFoundError:
        return None
    return commit if is_commit_id(commit) else None


def reachable(root: str, named: dict[str, str]) -> set[str]:
    """Find the commits that names lead to, directly or through parents, those that were deleted included.

    Args:
        root: The hub.
        named: Full name of a ref -> id.

    Raises:
        DamagedCheckpointError: A manifest on the way is missing or can't be read, so that its parents are unknown.
    """
    reached: set[str] = set()
    ends = deque((commit, f"'{ref}' points to it") for ref, commit in named.items())
    while ends:
        commit, why = ends.popleft()
        if commit not in reached:
            reached.add(commit)
            ends += [(parent, f"commit {commit} was made on it") for parent in _parents(root, commit, why)]
    return reached


def known_reachable(root: str, commits: Iterable[str]) -> set[str]:
    """Find the commits that commits lead to, directly or through parents, as far as manifests tell."""
    reached: set[str] = set()
    ends = list(commits)
    while ends:
        commit = ends.pop()
        if commit not in reached:
            reached.add(commit)
            try:
                ends += _parents(root, commit, "")
            except DamagedCheckpointError:
                continue  # what came before it is unknown
    return reached


def lost_commits(root: str) -> list[str]:
    """Find the commits whose manifest was lost: they have a snapshot, or another commit was made on them."""
    candidates = {name for name in _listing(os.path.join(root, SNAPSHOTS)) if is_commit_id(name)}
    unfinished = unfinished_commit(root)  # before the manifests: it may be finished meanwhile
    there = commit_ids(root)
    parents: set[str] = set()
    for commit in there:
        try:
            parents |= set(read_commit_manifest(root, commit).parents)
        except DamagedCheckpointError:
            continue  # it is listed as damaged itself
    known = {*there, *deleted_commits(root), unfinished}
    still = {commit for commit in candidates - known if os.path.isdir(snapshot_path(root, commit))}
    return sorted(still | (parents - known))


def _parents(root: str, commit: str, why: str) -> Iterable[str]:
    path = deleted_path(root, commit)
    if os.path.lexists(manifest_path(root, commit)):
        return read_commit_manifest(root, commit).parents
    if not os.path.lexists(path):
        raise missing_manifest(root, commit, why)
    return read_manifest_file(path, root, commit).parents if os.path.getsize(path) else ()


def _listing(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
