"""Interface of a hub: its files at one commit, the result of a push, names of branches and tags."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

from hfshard.disk.byte_source import ByteSource, read_all, sha256_of_source
from hfshard.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRequest:
    """Changes to make in one commit of a hub."""

    changes: Mapping[str, ByteSource | None]
    """Path in the repo -> new contents, or None to delete."""
    parent: str | None
    """The commit that the branch must be at; None: it has none yet."""
    revision: str | None = None
    """A branch, or "refs/pr/N". None: main."""
    message: str
    description: str | None = None
    create_pr: bool = False
    """Open a pull request instead of moving the branch."""


class Hub(Protocol):
    """A repo as a push needs it, on the Hugging Face Hub or in a directory."""

    def tree(self, revision: str | None) -> RepoTree | None:
        """Return the files at a revision; None if there is no such branch yet."""

    def make_branch(self, branch: str) -> None:
        """Create a branch where `main` is."""

    def read(self, path: str, commit: str) -> bytes:
        """Return the bytes of a small file."""

    def url_of(self, commit: str) -> str:
        """Return the page of a commit, or the directory of its files."""

    def commit(
        self,
        changes: Mapping[str, ByteSource | None],
        *,
        parent: str | None,
        revision: str | None,
        message: str,
        description: str | None,
        create_pr: bool,
        progress_callback: Callable[[int], object] | None,
    ) -> PushResult:
        """Make one commit on top of `parent`, and transfer the contents that the hub lacks.

        Args:
            changes, parent, revision, message, description, create_pr: The fields of `CommitRequest`.
            progress_callback: Called with byte counts of new contents.

        Raises:
            StaleParentError: The branch is no longer at `parent`; nothing was changed.
        """


class CommitFiles(Protocol):
    """The known files of one commit."""

    commit: str

    def has(self, path: str, *, is_needed: bool = True) -> bool:
        """Return whether the commit has a file; if that is unknown, raise if it `is_needed`, else return False."""

    def download(self, paths: Collection[str]) -> None:
        """Make files available in the snapshot."""

    def snapshot(self, path: str = "") -> str:
        """Return the local path of a file; without an argument, that of the snapshot."""

    def code(self) -> Collection[str]:
        """Return the known Python files of the commit."""

    def description(self) -> tuple[str, str]:
        """Describe for an error message what was searched, and what to do."""

    def parts(self, folder: str) -> str | None:
        """Describe what a folder has in parts, one for each rank, and how to merge them; None if there are none."""


# Data: the files of one commit with their sizes and hashes, and the result of a push.


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a commit."""

    size: int
    """Bytes."""
    sha256: str | None = None
    """The contents' hash in hex; None for a small file that the Hub keeps in git itself."""
    blob_id: str | None = None
    """The git hash (sha1, in hex) of a small file that the Hub keeps in git itself."""

    @property
    def etag(self) -> str | None:
        """The name of the file's contents in huggingface_hub's cache: the sha256, or the git hash."""
        return self.sha256 or self.blob_id

    def has_contents(self, content: ByteSource) -> bool:
        """Return whether the file has these bytes; they are read only if the sizes are equal."""
        if content.size != self.size:
            return False
        if self.sha256 is not None:
            return sha256_of_source(content) == self.sha256
        hasher = self.hasher()
        hasher.update(read_all(content))
        return bool(hasher.hexdigest() == self.blob_id)

    def hasher(self) -> Any:
        """Create a hasher for the listed hash: sha256; or, for a small file, git's own.

        Source: git, "Git Objects": sha1 over "blob <size>", a zero byte and the contents.
        """
        if self.sha256 is not None:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)


@dataclass(frozen=True, slots=True)
class RepoTree:
    """The files of one commit."""

    commit: str
    """The commit's full hash."""
    files: Mapping[str, RemoteFile] = field(default_factory=dict)
    """Path in the repo -> file."""


def is_plain_path(path: str) -> bool:
    """Return whether a path in a repo, or the name of a branch, is printable and stays below its folder."""
    return (
        "\\" not in path
        and path.isprintable()
        and not any(part in ("", ".", "..") for part in path.split("/"))
        and not os.path.isabs(path)
    )


LEFT_OUT: Final = frozenset({".git", ".cache", "__pycache__"})
"""Folders that are never pushed or pulled: git's, huggingface_hub's with hfshard's staging, and Python's. They would
obey what a stranger wrote there."""


def is_left_out(path: str) -> bool:
    """Return whether a path is never pushed or pulled; a file system may ignore the case of its letters.

    `.git` is a file in git's worktrees and submodules.
    """
    return any(part.lower() in LEFT_OUT for part in path.split("/"))


class StaleParentError(Exception):
    """The branch has moved on from the commit that a push was planned for; `push_files` plans and commits again."""


@dataclass(frozen=True, slots=True)
class PushResult:
    """Outcome of a push."""

    commit: str
    """The full hash of the commit that the branch (or pull request) is at now."""
    url: str
    """The commit's page on the Hub, or the directory of its files."""
    pr_url: str | None = None
    """The page of the pull request that was opened; None if none was asked for."""
    is_new: bool = True
    """False if the hub had exactly this already, so that no commit was made."""
    sent_bytes: int = 0
    """Bytes of file contents that were sent; over Xet, without the chunks that its storage already had."""


# Names of branches, tags and pull requests on a hub: the valid ones, in short and in full.


RefKind = Literal["branch", "tag", "pr", "commit"]

MAIN: Final = "refs/heads/main"
REF_FOLDERS: Final[dict[str, RefKind]] = {"refs/heads/": "branch", "refs/tags/": "tag", "refs/pr/": "pr"}
_PART: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_NUMBER: Final = re.compile(r"[1-9][0-9]{0,8}")
_COMMIT_ID: Final = re.compile(r"[0-9a-f]{40}")
_MAX_NAME: Final = 200
"""Characters; together with the hub's own folders, a name of this length is still a valid path."""


def is_commit_id(name: str | None) -> bool:
    """Return whether a name has the form of a full commit id; what it names never changes."""
    return name is not None and _COMMIT_ID.fullmatch(name) is not None


def ref_kind(ref: str) -> RefKind:
    """Return the kind of ref that a full name, such as `refs/heads/main`, denotes."""
    return next(kind for folder, kind in REF_FOLDERS.items() if ref.startswith(folder))


def short_name(ref: str) -> str:
    """Shorten a ref to the name that users give: `main` for `refs/heads/main`; a pull request keeps its full name."""
    return ref.removeprefix("refs/heads/").removeprefix("refs/tags/")


def full_name(name: str, kind: RefKind = "branch") -> str:
    """Complete the name of a branch or tag; a full name is returned as it is.

    Raises:
        InvalidArgumentError: It can't be the name of a branch or tag (or the number of a pull request).
    """
    folders = {value: key for key, value in REF_FOLDERS.items()}
    ref = name if name.startswith("refs/") else folders[kind] + name
    prefix = next((folder for folder in REF_FOLDERS if ref.startswith(folder)), None)
    if prefix is not None and _is_name(ref.removeprefix(prefix), is_number=REF_FOLDERS[prefix] == "pr"):
        return ref
    raise InvalidArgumentError(
        f"{name[:_MAX_NAME]!r} is not a valid revision name: use letters, digits, '.', '_', '-' and '/', without "
        "'..', a '-' or '.' at the start or '.lock' at the end, and not the form of a commit id.",
        actual=name,
    )


def _is_name(name: str, *, is_number: bool) -> bool:
    if is_number:
        return _NUMBER.fullmatch(name) is not None
    parts = name.split("/")
    return (
        len(name) <= _MAX_NAME
        and all(_PART.fullmatch(part) and ".." not in part and not part.endswith((".lock", ".")) for part in parts)
        and parts[0] != "refs"
        and name != "HEAD"
        and not is_commit_id(name)
    )


def pr_revision(pr_url: str) -> str:
    """Extract the revision of a pull request, such as `refs/pr/3`, from the URL of its page."""
    return f"refs/pr/{pr_url.rstrip('/').rpartition('/')[2]}"
