"""Repositories of the test Hub: objects, Hub commits and refs."""

from __future__ import annotations

import hashlib
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from tests.servers.objects import Entry, Objects

# What the Hub puts into the first commit of a model repository (shortened).
GIT_ATTRIBUTES = b"".join(
    b"%s filter=lfs diff=lfs merge=lfs -text\n" % pattern
    for pattern in (b"*.bin", b"*.h5", b"*.msgpack", b"*.onnx", b"*.pt", b"*.pth", b"*.safetensors", b"*tfevents*")
)


class RevisionNotFoundError(LookupError):
    """No branch, tag, pull request or commit has this name."""


class StaleParentError(ValueError):
    """The branch is not where the client thinks it is."""


class RefExistsError(ValueError):
    """The branch or tag is there already."""


@dataclass(frozen=True, slots=True)
class Commit:
    """One Hub commit with all its files."""

    oid: str
    parents: tuple[str, ...]
    title: str
    description: str
    files: dict[str, Entry]
    author: str
    date: str


@dataclass(slots=True)
class PullRequest:
    """One pull request; its commits are under refs/pr/<num>."""

    num: int
    title: str
    description: str
    author: str
    base: str
    head: str
    date: str
    status: str = "open"


def hub_time(seconds: float) -> str:
    """Write a time (seconds since 1970) as the Hub does."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def now() -> str:
    """The time as the Hub writes it."""
    return hub_time(time.time())


def check_path(path: str) -> str:
    """Refuse a path that can't be in a repository."""
    parts = PurePosixPath(path).parts
    if not path or path != "/".join(parts) or {".", "..", ".git"} & set(parts) or "\0" in path:
        raise ValueError(f"Invalid path in repo: {path!r}")
    return path


class Repo:
    """One repository: its contents on disk, its commits and refs in memory. Safe for threads."""

    def __init__(self, repo_id: str, directory: Path, *, private: bool, gated: bool, author: str) -> None:
        """Begin as the Hub does, with one commit on main that holds .gitattributes."""
        self.repo_id = repo_id
        self.directory = directory
        self.objects = Objects(directory / "objects")
        self.lock = threading.RLock()
        self.created = now()
        self.private = private
        """Whether only its owners see it."""
        self.gated = gated
        """Whether only its owners get files (all see that it is there)."""
        self._commits: dict[str, Commit] = {}
        attributes = {".gitattributes": self.objects.add_regular(GIT_ATTRIBUTES)}
        self._branches = {"main": self._make_commit((), attributes, "initial commit", "", author)}
        self._tags: dict[str, str] = {}
        self._pull_requests: list[PullRequest] = []

    @property
    def branches(self) -> dict[str, str]:
        """Branch -> commit hash."""
        with self.lock:
            return dict(self._branches)

    @property
    def tags(self) -> dict[str, str]:
        """Tag -> commit hash."""
        with self.lock:
            return dict(self._tags)

    @property
    def pull_requests(self) -> list[PullRequest]:
        """Pull requests, oldest first."""
        with self.lock:
            return [replace(one) for one in self._pull_requests]

    def resolve(self, revision: str) -> str:
        """Find the commit hash of a branch, tag, refs/... name or commit hash.

        Raises:
            RevisionNotFoundError: There is none.
        """
        with self.lock:
            refs = {f"refs/heads/{name}": oid for name, oid in self._branches.items()}
            refs |= {f"refs/tags/{name}": oid for name, oid in self._tags.items()}
            refs |= {f"refs/pr/{one.num}": one.head for one in self._pull_requests}
            for name in (revision, f"refs/heads/{revision}", f"refs/tags/{revision}"):
                if name in refs:
                    return refs[name]
            if revision in self._commits:
                return revision
        raise RevisionNotFoundError(revision)

    def commit_at(self, revision: str = "main") -> Commit:
        """Find the commit that a revision names."""
        return self._commits[self.resolve(revision)]

    def commits(self, revision: str = "main") -> list[Commit]:
        """List the history of a revision, newest first."""
        history = [self.commit_at(revision)]
        while history[-1].parents:
            history.append(self.commit_at(history[-1].parents[0]))
        return history

    def files(self, revision: str = "main") -> dict[str, Entry]:
        """List the files of a revision."""
        return dict(self.commit_at(revision).files)

    def read(self, path: str, revision: str = "main") -> bytes:
        """Read a whole file, for tests."""
        return self.objects.path(self.commit_at(revision).files[path].sha256).read_bytes()

    def add_commit(
        self,
        revision: str,
        changes: Mapping[str, Entry | None],
        title: str,
        description: str,
        author: str,
        parent: str | None = None,
        new_pull_request: bool = False,
    ) -> tuple[str, int | None]:
        """Put a commit on a branch or pull request, or open a pull request with it.

        Args:
            changes: path -> the new file, or None where it goes away; in the order in which they apply.
            parent: Commit hash that the branch must be at.

        Returns:
            The commit hash, and the number of a new pull request.

        Raises:
            StaleParentError: The branch is elsewhere.
            RevisionNotFoundError: No such branch.
        """
        with self.lock:
            old = self.commit_at(revision)
            if parent not in (None, old.oid):
                raise StaleParentError(f"{revision} is at {old.oid}, not at {parent}")
            files = dict(old.files)
            for path, entry in changes.items():
                if entry is None:
                    files.pop(path, None)
                else:
                    files[path] = entry
            oid = self._make_commit((old.oid,), files, title, description, author)
            if new_pull_request:
                number = self.open_pull_request(title, description, author, revision, oid)
                return oid, number
            self._move(revision, oid)
            return oid, None

    def open_pull_request(self, title: str, description: str, author: str, base: str, head: str) -> int:
        """Open a pull request and give its number."""
        with self.lock:
            number = len(self._pull_requests) + 1
            self._pull_requests.append(PullRequest(number, title, description, author, base, head, now()))
            return number

    def _move(self, revision: str, oid: str) -> None:
        name = revision.removeprefix("refs/heads/")
        if name in self._branches:
            self._branches[name] = oid
        elif revision.startswith("refs/pr/"):
            self._pull_requests[int(revision.removeprefix("refs/pr/")) - 1].head = oid
        else:
            raise RevisionNotFoundError(revision)

    def _make_commit(
        self, parents: tuple[str, ...], files: dict[str, Entry], title: str, description: str, author: str
    ) -> str:
        # Two equal commits within a millisecond are two commits all the same.
        oid = hashlib.sha1(f"{parents} {title} {time.time_ns()} {len(self._commits)}".encode()).hexdigest()
        self._commits[oid] = Commit(oid, parents, title, description, dict(sorted(files.items())), author, now())
        return oid

    def set_ref(self, refs: str, name: str, oid: str | None) -> None:
        """Make a branch or tag, or delete it with None.

        Args:
            refs: `"branches"` or `"tags"`.

        Raises:
            RefExistsError: It is there already.
        """
        with self.lock:
            names = self._branches if refs == "branches" else self._tags
            if oid is None:
                del names[name]
            elif name in names:
                raise RefExistsError(name)
            else:
                names[name] = oid


class RepoStore:
    """All repositories under one root directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.Lock()
        self._repos: dict[str, Repo] = {}

    def get(self, repo_id: str) -> Repo | None:
        """Find a repository."""
        with self._lock:
            return self._repos.get(repo_id)

    def create(self, repo_id: str, *, private: bool, gated: bool, author: str) -> Repo | None:
        """Make a repository; None: it is there already."""
        with self._lock:
            if repo_id in self._repos:
                return None
            repo = Repo(repo_id, self.root / "repos" / repo_id, private=private, gated=gated, author=author)
            self._repos[repo_id] = repo
            return repo

    def delete(self, repo_id: str) -> None:
        """Delete a repository and all its contents."""
        with self._lock:
            repo = self._repos.pop(repo_id)
            shutil.rmtree(repo.directory)
