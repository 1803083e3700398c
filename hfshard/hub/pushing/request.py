"""What a push is asked to do: the options that users give, and the files that they are for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from hfshard._util.arguments import check_texts
from hfshard.disk.byte_source import ByteSource
from hfshard.errors import InvalidArgumentError
from hfshard.hub.repo_tree import RemoteFile

MakeCard = Callable[[Callable[[], bytes] | None], bytes | None]
"""Makes a README.md. It is given a reader of the one that is there, if there is one; None leaves that as it is."""

FindStale = Callable[[Mapping[str, RemoteFile], Callable[[str], bytes]], Collection[str]]
"""Names files that are deleted. It is given the files of the folder by name, and a reader of small ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOptions:
    """How something is pushed; the fields are the arguments of `push_checkpoint`.

    Raises:
        InvalidArgumentError: A pull request on another branch than main, or a folder outside the repo.
    """

    commit_message: str | None = None
    """None: a text that fits what is pushed."""
    commit_description: str | None = None
    private: bool | None = None
    """Of a repo that is made."""
    token: str | bool | None = field(default=None, repr=False)
    revision: str | None = None
    """A branch, or "refs/pr/N". None: main."""
    create_pr: bool = False
    path_in_repo: str = ""
    follow_links: bool = False
    """Whether to push what links of a directory lead to, outside of it."""
    progress: bool | None = None

    def __post_init__(self) -> None:
        """Check what can be checked before a hub is asked."""
        check_texts(
            revision=self.revision or None,
            path_in_repo=self.path_in_repo or None,
            commit_message=self.commit_message or None,
            commit_description=self.commit_description or None,
        )
        if self.create_pr and self.revision not in (None, "main"):
            raise InvalidArgumentError("create_pr opens a pull request on main: leave out revision, or create_pr.")
        parts = self.path_in_repo.split("/")
        if ".." in parts or "\\" in self.path_in_repo:
            raise InvalidArgumentError(f"path_in_repo must stay in the repo, got {self.path_in_repo!r}.")
        if any(part.lower() == ".git" for part in parts):
            raise InvalidArgumentError(f"path_in_repo can't be in git's own folder, got {self.path_in_repo!r}.")

    @property
    def folder(self) -> str:
        """The folder of the repo as the beginning of paths: "" or "name/"."""
        parts = [part for part in self.path_in_repo.split("/") if part not in ("", ".")]
        return "".join(f"{part}/" for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PushRequest:
    """What is to be pushed, and how."""

    contents: Mapping[str, ByteSource]
    """Path in the folder -> contents."""
    variants: frozenset[str | None]
    """Variants of the checkpoints among them: whatever else the hub holds of these is deleted."""
    options: PushOptions = field(default_factory=PushOptions)
    default_message: str = "Upload checkpoint"
    """The commit's message where the options have none."""
    make_card: MakeCard | None = None
    find_stale: FindStale | None = None
    """Names what else is deleted."""
    check: Callable[[], None] = lambda: None
    """Called before the commit is begun, and from any thread while new contents are read: raises to give up."""

    @property
    def message(self) -> str:
        """The commit's message."""
        return self.options.commit_message or self.default_message
