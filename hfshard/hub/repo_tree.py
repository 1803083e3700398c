"""The files that a hub holds at one commit, with their sizes and hashes, and what a push returns."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from hfshard.disk.byte_source import ByteSource, sha256_of_source


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
        """Whether the file holds these bytes; they are read only if the sizes are equal."""
        if content.size != self.size:
            return False
        if self.sha256 is not None:
            return sha256_of_source(content) == self.sha256
        with content.open() as reader:
            return git_blob_id(reader.read()) == self.blob_id


@dataclass(frozen=True, slots=True)
class RepoTree:
    """The files of one commit."""

    commit: str
    """The commit's full hash."""
    files: Mapping[str, RemoteFile] = field(default_factory=dict)
    """Path in the repo -> file."""


def git_blob_id(raw: bytes) -> str:
    """Hash a file's contents as git does.

    Source: git, "Git Objects": sha1 over "blob <size>", a zero byte and the contents.
    """
    return hashlib.sha1(b"blob %d\0" % len(raw) + raw, usedforsecurity=False).hexdigest()


def is_plain_path(path: str) -> bool:
    """Whether a path in a repo, or the name of a branch, is printable and stays below the folder that it is put in."""
    return (
        "\\" not in path
        and path.isprintable()
        and not any(part in ("", ".", "..") for part in path.split("/"))
        and not os.path.isabs(path)
    )


class StaleParentError(Exception):
    """The branch has moved on from the commit that a push was made for; `push_files` looks again, and tries again."""


@dataclass(frozen=True, slots=True)
class PushResult:
    """What a push did."""

    commit: str
    """The full hash of the commit that the branch (or pull request) is at now."""
    url: str
    """Where to look at it: the commit's page on the Hub, or the directory of its files."""
    pr_url: str | None = None
    """The page of the pull request that was opened; None if none was asked for."""
    is_new: bool = True
    """False if the hub held exactly this already, so that no commit was made."""
    sent_bytes: int = 0
    """Bytes of file contents that were sent; over Xet, without the chunks of them that its storage had."""
