"""What a hub holds at one commit: path -> size and hash, and nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from hfshard.storage.disk.byte_source import ByteSource, sha256_of_source


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a commit."""

    size: int
    """Bytes."""
    sha256: str | None = None
    """Of the contents, in hex; None for a small file that the Hub keeps in git itself."""
    blob_id: str | None = None
    """The git hash (sha1, in hex) of a small file that the Hub keeps in git itself."""

    @property
    def etag(self) -> str | None:
        """The name that the file's contents have in the Hub's cache: the sha256, or the git hash."""
        return self.sha256 or self.blob_id

    def has_contents(self, content: ByteSource) -> bool:
        """Whether the file holds these bytes; they are read where their size is the file's."""
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
    """The hash that git has for a file's contents.

    Source: git, "Git Objects": sha1 over "blob <size>", a zero byte and the contents.
    """
    return hashlib.sha1(b"blob %d\0" % len(raw) + raw, usedforsecurity=False).hexdigest()


class StaleParentError(Exception):
    """The branch is not at the commit any more that a push was made for; `push` looks again, and tries again."""


@dataclass(frozen=True, slots=True)
class PushResult:
    """What a push did."""

    commit: str
    """The full hash of the commit that the branch (or pull request) is at now."""
    url: str
    """Where to look at it: of the commit on the Hub, or the directory of its files."""
    pr_url: str | None = None
    """Of the pull request that was opened, if one was asked for."""
    is_new: bool = True
    """False: the hub already held exactly this, and no commit was made."""
    sent_bytes: int = 0
    """Bytes of contents that went over."""
