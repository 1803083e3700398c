"""What pushes and pulls ask of a hub, be it the Hugging Face Hub, its cache or a directory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from hfshard.disk.byte_source import ByteSource
from hfshard.hub.repo_tree import PushResult, RepoTree


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
    """What a push needs of a repo, be it on the Hugging Face Hub or in a directory."""

    def tree(self, revision: str | None) -> RepoTree | None:
        """The files at a revision; None if there is no such branch yet."""

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
        """Make one commit on top of `parent`, with the files that the hub lacks.

        Args:
            changes, parent, revision, message, description, create_pr: The fields of `CommitRequest`.
            progress_callback: Called with numbers of bytes of new contents.

        Raises:
            StaleParentError: The branch is no longer at `parent`; nothing was changed.
        """


class CommitFiles(Protocol):
    """The files of one commit, as far as they are known."""

    commit: str

    def has(self, path: str, *, is_needed: bool = True) -> bool:
        """Whether the commit has a file; if that is not known, an error where it `is_needed`, else False."""

    def download(self, paths: Collection[str]) -> None:
        """Make files available in the snapshot."""

    def snapshot(self, path: str = "") -> str:
        """The local path of a file; of the snapshot itself without an argument."""

    def code(self) -> Collection[str]:
        """The known Python files of the commit."""

    def description(self) -> tuple[str, str]:
        """For an error message: what was looked at, and what to do."""

    def parts(self, folder: str) -> str | None:
        """Describe what a folder holds in parts of ranks, if it is known; see `describe_parts`."""
