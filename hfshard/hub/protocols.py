"""What pushes and pulls ask of a hub, be it the Hugging Face Hub, its cache or a directory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from hfshard.hub.repo_tree import PushResult, RepoTree
from hfshard.storage.disk.byte_source import ByteSource


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRequest:
    """What one commit of a hub is to change."""

    changes: Mapping[str, ByteSource | None]
    """Path in the repo -> new contents, or None to delete."""
    parent: str | None
    """The commit that the branch must be at; None: it has none yet."""
    revision: str | None = None
    """A branch, or "refs/pr/N". None: main."""
    message: str
    description: str | None = None
    create_pr: bool = False
    """Leave the branch, and open a pull request."""


class Hub(Protocol):
    """What a push needs of a repo, on the Hub or in a directory."""

    def tree(self, revision: str | None) -> RepoTree | None:
        """The files at a revision; None where there is no such branch yet."""

    def make_branch(self, branch: str) -> None:
        """Make a branch where `main` is."""

    def read(self, path: str, commit: str) -> bytes:
        """The bytes of a small file."""

    def url_of(self, commit: str) -> str:
        """Where to look at a commit."""

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
        """Make one commit on top of `parent`."""


class CommitFiles(Protocol):
    """The files of one commit, as far as somebody knows them."""

    commit: str

    def has(self, path: str, *, is_needed: bool = True) -> bool:
        """Whether the commit has a file. Not sure: an error where that `is_needed`, else False."""

    def download(self, paths: Collection[str]) -> None:
        """Have files lie in the snapshot."""

    def snapshot(self, path: str = "") -> str:
        """Where a file lies."""

    def code(self) -> Collection[str]:
        """The Python files of the commit that are known."""

    def description(self) -> tuple[str, str]:
        """For an error: what it is, and what to do."""
