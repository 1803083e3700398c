"""The commits of a directory hub: manifests, names that lead to them, and what was deleted on purpose."""

from __future__ import annotations

import hashlib
import os
import re
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from hfshard._util.text import shorten_list
from hfshard.constants import FORMAT_VERSION, MAX_CONFIG_BYTES
from hfshard.disk.safe_open import read_small
from hfshard.errors import (
    DamagedCheckpointError,
    HubError,
    HubNotFoundError,
    IntegrityError,
    InvalidArgumentError,
    MissingShardError,
)
from hfshard.format.strict_json import dump_json, parse_json_object
from hfshard.hub.repo import MAIN, REF_FOLDERS, RefKind, RemoteFile, full_name, is_commit_id, ref_kind, short_name

STAGING: Final = ".staging"
"""Folder of a hub for files that are not complete yet."""


COMMITS: Final = "commits"
SNAPSHOTS: Final = "snapshots"

_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_MAX_PATH: Final = 1024
"""Characters of a path in a repo: a quarter of Linux's limit for a complete path, which includes the hub's own."""
_MAX_PART_BYTES: Final = 255
"""The longest file name on every common file system."""
_REMEDY: Final = "Restore the file from a backup, or delete the commit."


@dataclass(frozen=True, slots=True)
class CommitManifest:
    """Manifest of one commit."""

    files: Mapping[str, RemoteFile] = field(default_factory=dict)
    """Path in the repo -> size and sha256."""
    parents: tuple[str, ...] = ()
    """The commit that it was made on, if any."""
    message: str = ""
    description: str | None = None

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(file.size for file in self.files.values())

    def to_json(self) -> bytes:
        """Serialize it in its canonical form, without time and host, so that the same commit has the same id."""
        return dump_json(
            {
                "description": self.description,
                "files": {path: {"sha256": file.sha256, "size": file.size} for path, file in self.files.items()},
                "format": FORMAT_VERSION,
                "message": self.message,
                "parents": list(self.parents),
            }
        )


def commit_id(raw: bytes) -> str:
    """Compute a commit's id from its manifest; it is as long as git's, so that it can be used as a commit hash."""
    return hashlib.sha256(raw).hexdigest()[:40]


def manifest_path(root: str, commit: str) -> str:
    """Return the path of a commit's manifest."""
    return os.path.join(root, COMMITS, f"{commit}.json")


def snapshot_path(root: str, commit: str) -> str:
    """Return the directory of a commit's files."""
    return os.path.join(root, SNAPSHOTS, commit)


def commit_ids(root: str) -> list[str]:
    """List the ids of all commits of a hub, sorted."""
    names = _listing(os.path.join(root, COMMITS))
    return sorted(name[:-5] for name in names if name.endswith(".json") and is_commit_id(name[:-5]))


def read_commit_manifest(root: str, commit: str) -> CommitManifest:
    """Read and check the manifest of a commit.

    Raises:
        IntegrityError: Its bytes are not those that the id was made from.
        DamagedCheckpointError: It is missing, or is not a valid manifest.
    """
    return read_manifest_file(manifest_path(root, commit), root, commit)


def missing_manifest(root: str, commit: str, why: str) -> DamagedCheckpointError:
    """Build the error for a commit whose manifest was lost; `why` is the reason that it is needed, "" if unknown."""
    path = manifest_path(root, commit)
    needed = f", and {why}" if why else ""
    return DamagedCheckpointError(
        f"Commit {commit} has no manifest '{path}'{needed}: it was lost, for example in an interrupted copy. Nothing "
        "was removed. Copy the file again from the source of the hub, or from a backup. To discard the commit, "
        f"delete the names that point to it, then run: hfshard revisions {root} --delete {commit}",
        path=path,
    )


def read_manifest_file(path: str, root: str, commit: str) -> CommitManifest:
    """Read and check a manifest at any path, with the errors of `read_commit_manifest`."""
    try:
        raw, _ = read_small(path, root, MAX_CONFIG_BYTES)
    except MissingShardError as error:
        raise missing_manifest(root, commit, "") from error
    if (actual := commit_id(raw)) != commit:
        raise IntegrityError(
            f"Manifest '{path}' is damaged: its bytes hash to the commit id {actual}. {_REMEDY}",
            path=path,
            expected=commit,
            actual=actual,
        )
    value = parse_json_object(raw, path=path, what="Manifest", remedy=_REMEDY)
    try:
        return _parsed(value)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(
            f"Manifest '{path}' is not a valid manifest of this format: {error}. {_REMEDY}", path=path
        ) from error


def _parsed(value: Mapping[str, Any]) -> CommitManifest:
    if value["format"] != FORMAT_VERSION:
        raise ValueError(f"format must be {FORMAT_VERSION}, got {value['format']!r}")
    files = {path: _parsed_file(path, entry) for path, entry in value["files"].items()}
    check_paths(files)
    parents = tuple(value["parents"])
    if not all(isinstance(parent, str) and is_commit_id(parent) for parent in parents):
        raise ValueError(f"parents {parents!r}")
    message, description = value["message"], value["description"]
    if not isinstance(message, str) or not isinstance(description, str | None):
        raise TypeError("message and description must be text")
    return CommitManifest(files, parents, message, description)


def _parsed_file(path: str, entry: Mapping[str, Any]) -> RemoteFile:
    size, sha256 = entry["size"], entry["sha256"]
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise ValueError(f"size {size!r} of '{path}'")
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise ValueError(f"sha256 {sha256!r} of '{path}'")
    return RemoteFile(size, sha256)


def check_paths(paths: Iterable[str]) -> None:
    """Check that paths stay in the snapshot on every system, and that all of them can exist together.

    Raises:
        InvalidArgumentError: A path is absolute, has `..`, a backslash, a drive or an unprintable character, is too
            long, or is both a file and a directory.
    """
    known = set(paths)
    for path in known:
        parts = path.split("/") if isinstance(path, str) else []
        is_plain = bool(parts) and len(path) <= _MAX_PATH and path.isprintable() and not set(path) & {"\\", ":"}
        if not is_plain or any(part in ("", ".", "..") or len(part.encode()) > _MAX_PART_BYTES for part in parts):
            raise InvalidArgumentError(
                f"{str(path)[:200]!r} is not a valid path in a repo: write folder/file, relative, without "
                "'..', '\\' and ':'.",
                path=str(path),
            )
        for end in range(1, len(parts)):
            if (above := "/".join(parts[:end])) in known:
                raise InvalidArgumentError(f"'{above}' cannot be both a file and a folder of '{path}'.", path=path)


# Names of commits in a directory hub: branches, tags and pull requests, each a small file that contains an id.


_PREFIX: Final = re.compile(r"[0-9a-f]{7,39}")
"""The first digits of an id: at least seven, as git writes them."""
_MAX_REF_BYTES: Final = 64
"""An id and a newline are 41 bytes."""
_SHOWN_NAMES: Final = 20
"""Revisions that a message lists."""


def ref_path(root: str, ref: str) -> str:
    """Return the path of the file that contains a ref's id."""
    return os.path.join(root, ref)


def read_ref(root: str, ref: str) -> str | None:
    """Read the id in a ref; None if there is no such ref.

    Raises:
        DamagedCheckpointError: The file does not contain an id.
    """
    path = ref_path(root, ref)
    if not os.path.isfile(path):
        return None
    try:
        raw, _ = read_small(path, root, _MAX_REF_BYTES)
    except MissingShardError:  # deleted since the check
        return None
    commit = raw.decode("ascii", "replace").removesuffix("\n")
    if not is_commit_id(commit):
        raise DamagedCheckpointError(
            f"'{path}' is damaged: it must contain a commit id. Write one from '{root}/commits' into it.", path=path
        )
    return commit


def ref_names(root: str) -> list[str]:
    """List the full names of all refs: main first, then branches, tags and pull requests, each sorted."""
    found = []
    for folder in REF_FOLDERS:
        names = []
        for base, _, files in os.walk(os.path.join(root, folder)):
            below = os.path.relpath(base, root)
            names += [f"{below}/{file}" for file in files if _is_ref(f"{below}/{file}")]
        found += sorted(names, key=lambda name: (name != MAIN, len(name) if folder == "refs/pr/" else 0, name))
    return found


def _is_ref(ref: str) -> bool:
    try:
        return full_name(ref) == ref
    except InvalidArgumentError:  # not a file of hfshard
        return False


def all_refs(root: str) -> dict[str, str]:
    """Return full name -> id, in the order of `ref_names`."""
    found = {}
    for ref in ref_names(root):
        if (commit := read_ref(root, ref)) is not None:
            found[ref] = commit
    return found


def check_free(root: str, ref: str) -> None:
    """Check that the name of a new ref is not in use.

    Raises:
        InvalidArgumentError: A branch and a tag would have the same name, or one name would be a folder of another.
    """
    for other in ref_names(root):
        if other.startswith(f"{ref}/") or ref.startswith(f"{other}/"):
            raise InvalidArgumentError(
                f"Cannot create '{short_name(ref)}' along with '{short_name(other)}': one would be a folder of the "
                "other. Choose another name.",
                actual=short_name(ref),
            )
        if other != ref and short_name(other) == short_name(ref):
            raise InvalidArgumentError(
                f"'{short_name(ref)}' is already the name of a {ref_kind(other)}. Choose another name.",
                actual=short_name(ref),
            )


def find_ref(root: str, name: str) -> tuple[str, str] | None:
    """Find a branch, tag or pull request by its name, and return its full name and the id in it."""
    kinds: tuple[RefKind, ...] = ("branch", "tag")
    for kind in kinds:
        try:
            ref = full_name(name, kind)
        except InvalidArgumentError:
            return None
        if (commit := read_ref(root, ref)) is not None:
            return ref, commit
    return None


def find_commit(root: str, name: str) -> str | None:
    """Find a commit by its id or the first digits of the id, even if its manifest was lost.

    Raises:
        HubError: Several ids begin with these digits.
    """
    if not is_commit_id(name) and not _PREFIX.fullmatch(name):
        return None
    found = [commit for commit in commit_ids(root) if commit.startswith(name)]
    found = found or [commit for commit in lost_commits(root) if commit.startswith(name)]
    if len(found) > 1:
        raise HubError(
            f"{len(found)} commits of '{root}' begin with {name}: {shorten_list(found, _SHOWN_NAMES)}. Pass more of "
            "the id.",
            path=root,
            actual=name,
        )
    return found[0] if found else None


def find_revision(root: str, name: str) -> str | None:
    """Find the commit that a branch, tag, pull request or id names.

    Raises:
        HubError: Several ids begin with these digits.
    """
    found = find_ref(root, name)
    return found[1] if found is not None else find_commit(root, name)


def revision_not_found(root: str, name: str) -> HubNotFoundError:
    """Build the error that lists the existing revisions."""
    names = [short_name(ref) for ref in ref_names(root)]
    shown = shorten_list(names, _SHOWN_NAMES)
    count = len(commit_ids(root))
    if not names and not count:
        return HubNotFoundError(
            f"'{root}' is empty: nothing was pushed to it yet, so it has no revision '{name}'.", path=root, actual=name
        )
    return HubNotFoundError(
        f"'{root}' has no revision '{name}'. It has {shown or 'no branches and tags'}; and {count} "
        f"commit{'s' if count != 1 else ''}, listed in '{os.path.join(root, 'commits')}'.",
        path=root,
        actual=name,
    )


# Lists of a directory hub's commits: by name, all of them, and those that no name leads to.


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
    """Time at which the commit was made here, in UTC."""
    size: int
    """Bytes of all its files, shared with other commits or not."""
    is_damaged: bool = False
    """Whether its manifest is missing or can't be read, so that message, parents and size are unknown."""
    problem: str = ""
    """If it is damaged: what is wrong, and what to do."""


def revisions_of(root: str) -> list[Revision]:
    """List all branches (main first), tags and pull requests, then all commits, newest first, then the lost ones."""
    named = [_revision(root, short_name(ref), ref_kind(ref), commit) for ref, commit in all_refs(root).items()]
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
        DamagedCheckpointError: A manifest in a history is missing or can't be read, so that its parents are unknown; or
            no deleted name led to such a commit either, so that a name was lost.
    """
    found = set(commit_ids(root)) - reachable(root, all_refs(root))
    if lost := found.difference(unreferenced_commits(root)):
        raise _names_lost(root, lost)
    return sorted(found)


def reject_lost_history(root: str) -> None:
    """Reject an empty new branch in a hub with commits that no name leads to, and no deleted name led to.

    Raises:
        DamagedCheckpointError: Names were lost.
    """
    # In this order, because other processes may push, delete and prune at the same time.
    there = commit_ids(root)
    unfinished = unfinished_commit(root)
    named = reachable_from(root, all_refs(root).values())
    lost = set(there).difference(named, unreferenced_commits(root), [unfinished]).intersection(commit_ids(root))
    if lost:
        raise _names_lost(root, lost)


def _names_lost(root: str, lost: set[str]) -> DamagedCheckpointError:
    """Build the error that shows the newest of the commits: names for these lead to all of them."""
    before = reachable_from(root, [parent for commit in lost for parent in _parents(root, commit)])
    commits = sorted(lost - before)
    one = commits[0]
    return DamagedCheckpointError(
        f"No branch, tag or pull request of '{root}', existing or deleted, leads to {shorten_list(commits, _SHOWN)}: "
        "names in refs/ were lost, for example in an interrupted copy. Nothing was removed. Copy "
        f"'{os.path.join(root, 'refs')}' again from the source of the hub. Or give each of them a name: hfshard "
        f"revisions {root} --tag NAME {one}; to discard one, with all its unnamed ancestors, delete that name again: "
        f"hfshard revisions {root} --delete NAME",
        path=os.path.join(root, "refs"),
    )


def _parents(root: str, commit: str) -> tuple[str, ...]:
    try:
        return read_commit_manifest(root, commit).parents
    except DamagedCheckpointError:
        return ()


# Records of what was deleted from a directory hub on purpose: whatever else is missing was lost, and nothing may be
# removed because of it.
#
#     <root>/deleted/<id>.json    the manifest of a deleted commit, moved here from commits/; an empty file if the
#                                 manifest had been lost
#     <root>/deleted/<id>         empty: the last name that led to this commit was deleted
#
# A partial copy of a hub (an rsync that was cut off) lacks files without any such record. Parents are followed
# through the manifests of deleted commits, so that deleting one commit of a history does not cut off those before it.


DELETED: Final = "deleted"
NEW_COMMIT: Final = "new-commit"
"""Name in the staging directory of the ref for a new commit. While it exists, that commit is unfinished; renaming it
into place commits."""


def deleted_path(root: str, commit: str) -> str:
    """Return the path of a deleted commit's manifest."""
    return os.path.join(root, DELETED, f"{commit}.json")


def unnamed_path(root: str, commit: str) -> str:
    """Return the path of the file which records that the last name leading to a commit was deleted."""
    return os.path.join(root, DELETED, commit)


def deleted_commits(root: str) -> list[str]:
    """List the ids of the deleted commits; `prune` forgets those that no history needs."""
    return sorted(name[:-5] for name in _listing(os.path.join(root, DELETED)) if name.endswith(".json"))


def unreferenced_commits(root: str) -> list[str]:
    """List the ids of the commits that may be removed, because the last name that led to them was deleted."""
    return sorted(name for name in _listing(os.path.join(root, DELETED)) if is_commit_id(name))


def unfinished_commit(root: str) -> str | None:
    """Return the id of the commit that is being made, or that a killed push did not finish."""
    try:
        with open(os.path.join(root, STAGING, NEW_COMMIT), "rb") as file:
            commit = file.read(_MAX_REF_BYTES).decode("ascii", "replace").removesuffix("\n")
    except FileNotFoundError:
        return None
    return commit if is_commit_id(commit) else None


def reachable(root: str, named: dict[str, str]) -> set[str]:
    """Find the commits that names lead to (full name -> id), directly or through parents, deleted ones included.

    Raises:
        DamagedCheckpointError: A manifest in a history is missing or can't be read, so that its parents are unknown.
    """
    return _follow(root, ((commit, f"'{ref}' points to it") for ref, commit in named.items()))


def reachable_from(root: str, commits: Iterable[str]) -> set[str]:
    """Find commits and their parents, direct and indirect, that readable manifests lead to."""
    return _follow(root, ((commit, "") for commit in commits), skips_damaged=True)


def _follow(root: str, ends: Iterable[tuple[str, str]], *, skips_damaged: bool = False) -> set[str]:
    """Find commits and their ancestors; `ends` has the commits, and why each is needed."""
    reached: set[str] = set()
    left = deque(ends)
    while left:
        commit, why = left.popleft()
        if commit in reached:
            continue
        reached.add(commit)
        try:
            left += [(parent, f"commit {commit} is based on it") for parent in _parents_even_deleted(root, commit, why)]
        except DamagedCheckpointError:
            if not skips_damaged:
                raise  # if it is skipped, what came before it is unknown
    return reached


def lost_commits(root: str) -> list[str]:
    """Find the commits whose manifest was lost: they have a snapshot, or another commit was made on them."""
    candidates = {name for name in _listing(os.path.join(root, SNAPSHOTS)) if is_commit_id(name)}
    unfinished = unfinished_commit(root)  # before the manifests are listed: it may be finished during that
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


def _parents_even_deleted(root: str, commit: str, why: str) -> Iterable[str]:
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
