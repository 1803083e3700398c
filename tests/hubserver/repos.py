"""Repositories of the test Hub on disk: objects, Hub commits and refs, all found again after a restart."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

from tests.hubserver.objects import Entry, Objects, replace_file

COMMIT_OID = re.compile(r"[0-9a-f]{40}")

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
    is_pull_request: bool = True


@dataclass(slots=True)
class _State:
    private: bool = False
    gated: bool = False
    created: str = ""
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    pull_requests: list[dict[str, Any]] = field(default_factory=list)


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
    """One repository; every change of its state is written before it is answered. Safe for threads."""

    def __init__(self, repo_id: str, directory: Path) -> None:
        self.repo_id = repo_id
        self.directory = directory
        self.objects = Objects(directory / "objects")
        self.lock = threading.RLock()
        self._commits: dict[str, Commit] = {}
        state = directory / "repo.json"
        self._state = _State(**json.loads(state.read_text())) if state.is_file() else _State(created=now())

    def create(self, private: bool, gated: bool, author: str) -> None:
        """Write the first state: one commit on main that holds .gitattributes, as on the Hub."""
        self._state.private, self._state.gated = private, gated
        self._state.branches["main"] = self._write_commit(
            (), {".gitattributes": self.objects.add_regular(GIT_ATTRIBUTES)}, "initial commit", "", author
        )
        self.save()

    def save(self) -> None:
        """Write refs and settings."""
        replace_file(self.directory / "repo.json", json.dumps(asdict(self._state), indent=1).encode())

    @property
    def created(self) -> str:
        """When it was made."""
        return self._state.created

    @property
    def private(self) -> bool:
        """Whether only its owners see it."""
        return self._state.private

    @private.setter
    def private(self, value: bool) -> None:
        with self.lock:
            self._state.private = value
            self.save()

    @property
    def gated(self) -> bool:
        """Whether only its owners get files (all see that it is there)."""
        return self._state.gated

    @gated.setter
    def gated(self, value: bool) -> None:
        with self.lock:
            self._state.gated = value
            self.save()

    @property
    def branches(self) -> dict[str, str]:
        """Branch -> commit hash."""
        with self.lock:
            return dict(self._state.branches)

    @property
    def tags(self) -> dict[str, str]:
        """Tag -> commit hash."""
        with self.lock:
            return dict(self._state.tags)

    @property
    def pull_requests(self) -> list[PullRequest]:
        """Pull requests and discussions, oldest first."""
        with self.lock:
            return [PullRequest(**one) for one in self._state.pull_requests]

    def resolve(self, revision: str) -> str:
        """Find the commit hash of a branch, tag, refs/... name or commit hash.

        Raises:
            RevisionNotFoundError: There is none.
        """
        with self.lock:
            refs = {f"refs/heads/{name}": oid for name, oid in self._state.branches.items()}
            refs |= {f"refs/tags/{name}": oid for name, oid in self._state.tags.items()}
            pulls = [one for one in self._state.pull_requests if one["is_pull_request"]]
            refs |= {f"refs/pr/{one['num']}": one["head"] for one in pulls}
            for name in (revision, f"refs/heads/{revision}", f"refs/tags/{revision}"):
                if name in refs:
                    return refs[name]
        if COMMIT_OID.fullmatch(revision) and (self.directory / "commits" / f"{revision}.json").is_file():
            return revision
        raise RevisionNotFoundError(revision)

    def commit_at(self, revision: str = "main") -> Commit:
        """Read the commit that a revision names."""
        oid = self.resolve(revision)
        if oid not in self._commits:
            data = json.loads((self.directory / "commits" / f"{oid}.json").read_text())
            files = {path: Entry(**entry) for path, entry in data.pop("files").items()}
            self._commits[oid] = Commit(oid=oid, files=files, parents=tuple(data.pop("parents")), **data)
        return self._commits[oid]

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
            oid = self._write_commit((old.oid,), files, title, description, author)
            if new_pull_request:
                number = self.open_pull_request(title, description, author, revision, oid)
                return oid, number
            self._move(revision, oid)
            self.save()
            return oid, None

    def open_pull_request(
        self, title: str, description: str, author: str, base: str, head: str | None, is_pull_request: bool = True
    ) -> int:
        """Open a pull request (or a plain discussion) and give its number."""
        with self.lock:
            number = len(self._state.pull_requests) + 1
            head = head or self.resolve(base)
            new = PullRequest(number, title, description, author, base, head, now(), is_pull_request=is_pull_request)
            self._state.pull_requests.append(asdict(new))
            self.save()
            return number

    def _move(self, revision: str, oid: str) -> None:
        name = revision.removeprefix("refs/heads/")
        if name in self._state.branches:
            self._state.branches[name] = oid
        elif revision.startswith("refs/pr/"):
            self._state.pull_requests[int(revision.removeprefix("refs/pr/")) - 1]["head"] = oid
        else:
            raise RevisionNotFoundError(revision)

    def _write_commit(
        self, parents: tuple[str, ...], files: dict[str, Entry], title: str, description: str, author: str
    ) -> str:
        data: dict[str, Any] = {
            "parents": parents,
            "title": title,
            "description": description,
            "author": author,
            "date": now(),
            "files": {path: asdict(files[path]) for path in sorted(files)},
        }
        content = json.dumps(data).encode()
        # Two equal commits within a millisecond are two commits all the same.
        oid = hashlib.sha1(content + str(time.time_ns()).encode()).hexdigest()
        replace_file(self.directory / "commits" / f"{oid}.json", content)
        return oid

    def set_ref(self, refs: str, name: str, oid: str | None) -> None:
        """Make a branch or tag, or delete it with None.

        Args:
            refs: `"branches"` or `"tags"`.

        Raises:
            RefExistsError: It is there already.
            RevisionNotFoundError: It is to be deleted and is not there.
        """
        with self.lock:
            names: dict[str, str] = getattr(self._state, refs)
            if oid is None:
                if name not in names:
                    raise RevisionNotFoundError(name)
                del names[name]
            elif name in names:
                raise RefExistsError(name)
            else:
                names[name] = oid
            self.save()


class RepoStore:
    """All repositories under one root directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.Lock()
        self._repos: dict[str, Repo] = {}
        for state in sorted((root / "repos").glob("*/*/repo.json")):
            repo_id = f"{state.parent.parent.name}/{state.parent.name}"
            self._repos[repo_id] = Repo(repo_id, state.parent)

    def get(self, repo_id: str) -> Repo | None:
        """Find a repository."""
        with self._lock:
            return self._repos.get(repo_id)

    def create(self, repo_id: str, *, private: bool, gated: bool, author: str) -> Repo | None:
        """Make a repository; None: it is there already."""
        with self._lock:
            if repo_id in self._repos:
                return None
            repo = Repo(repo_id, self.root / "repos" / repo_id)
            repo.create(private, gated, author)
            self._repos[repo_id] = repo
            return repo

    def delete(self, repo_id: str) -> None:
        """Delete a repository and all its contents."""
        with self._lock:
            repo = self._repos.pop(repo_id)
            shutil.rmtree(repo.directory)
