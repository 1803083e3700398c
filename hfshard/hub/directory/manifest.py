"""The manifest of a commit in a directory hub: files, parents and message, in JSON that gives the commit its id."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from hfshard.constants import FORMAT_VERSION, MAX_CONFIG_BYTES
from hfshard.disk.safe_open import read_small
from hfshard.errors import DamagedCheckpointError, IntegrityError, InvalidArgumentError, MissingShardError
from hfshard.format.strict_json import dump_json, parse_json_object
from hfshard.hub.refs import is_commit_id
from hfshard.hub.repo_tree import RemoteFile

COMMITS: Final = "commits"
SNAPSHOTS: Final = "snapshots"

_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_MAX_PATH: Final = 1024
"""Characters of a path in a repo: a quarter of what Linux allows a whole path, the hub's own directory included."""
_MAX_PART_BYTES: Final = 255
"""The longest file name on every common file system."""
_REMEDY: Final = "Restore the file from a backup, or delete the commit."


@dataclass(frozen=True, slots=True)
class CommitManifest:
    """One commit."""

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
        """Serialize it in its one form: without time and host, so that the same commit has the same id."""
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
    """Make a commit's id from its manifest; it is as long as git's, so that it can be used as a commit hash."""
    return hashlib.sha256(raw).hexdigest()[:40]


def manifest_path(root: str, commit: str) -> str:
    """Where a commit's manifest is."""
    return os.path.join(root, COMMITS, f"{commit}.json")


def snapshot_path(root: str, commit: str) -> str:
    """The directory of a commit's files."""
    return os.path.join(root, SNAPSHOTS, commit)


def commit_ids(root: str) -> list[str]:
    """The ids of all commits that a hub holds, sorted."""
    try:
        names = os.listdir(os.path.join(root, COMMITS))
    except FileNotFoundError:  # no commit yet
        return []
    return sorted(name[:40] for name in names if name.endswith(".json") and is_commit_id(name[:-5]))


def read_commit_manifest(root: str, commit: str) -> CommitManifest:
    """Read and check the manifest of a commit.

    Raises:
        IntegrityError: Its bytes are not those that the id was made from.
        DamagedCheckpointError: It is missing, or is not a valid manifest.
    """
    return read_manifest_file(manifest_path(root, commit), root, commit)


def missing_manifest(root: str, commit: str, why: str) -> DamagedCheckpointError:
    """Make the error for a commit whose manifest was lost.

    Args:
        root: The hub.
        commit: Its id.
        why: What needs the commit; "" if nothing is known to.
    """
    path = manifest_path(root, commit)
    needed = f", and {why}" if why else ""
    return DamagedCheckpointError(
        f"Commit {commit} has no manifest '{path}'{needed}: it was lost, as in a copy that was cut off. Nothing was "
        "removed. Copy the file again from where the hub came from, or from a backup. To give the commit up, delete "
        f"the names that point to it, then run: hfshard revisions {root} --delete {commit}",
        path=path,
    )


def read_manifest_file(path: str, root: str, commit: str) -> CommitManifest:
    """Read and check a manifest, wherever it is; raises like `read_commit_manifest`."""
    try:
        raw, _ = read_small(path, root, MAX_CONFIG_BYTES)
    except MissingShardError as error:
        raise missing_manifest(root, commit, "") from error
    if (actual := commit_id(raw)) != commit:
        raise IntegrityError(
            f"Manifest '{path}' is damaged: its bytes are those of commit {actual}. {_REMEDY}",
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
        raise ValueError(f"format {value['format']!r}, must be {FORMAT_VERSION}")
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
                raise InvalidArgumentError(f"'{above}' can't be a file and the folder of '{path}' too.", path=path)
