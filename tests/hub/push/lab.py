"""A Hub server and a client process that all tests of pushes share, and what they ask of both."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hub.lab import Lab, Outcome, Task
from tests.hub.models import make_model
from tests.hubserver.hub_server import RepoView

__all__ = ["Outcome", "PushLab", "Task", "contents", "lab", "repo", "saved"]

MULTIPART_BYTES = 1_000_000
"""Larger files go up in parts."""


class PushLab(Lab):
    """A Hub, and a client that pushes to it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, "tests.hub.push.client", multipart_bytes=MULTIPART_BYTES)

    def call(self, task: str, *args: object, **options: Any) -> Outcome:
        """Do a task that succeeds."""
        return self.done(task, *args, **options)

    def push(self, directory: Path, repo_id: str, **options: Any) -> Outcome:
        """Push a directory, counted by the server's log from its beginning."""
        self.hub.clear_log()
        return self.call("push", directory, repo_id, **options)

    def loads(self, repo_id: str, **options: Any) -> str:
        """The digest of what stock transformers loads with an empty cache."""
        cache = self.root / f"cache-{next(self._numbers)}"
        digest: str = self.call("load_stock", repo_id, cache, **options).result
        return digest

    def view(self, repo_id: str) -> RepoView:
        """A repo from inside."""
        return self.hub.repo(repo_id)

    def files(self, repo_id: str, revision: str = "main") -> set[str]:
        """The names in a repo, without the Hub's own .gitattributes."""
        return set(self.view(repo_id).files(revision)) - {".gitattributes"}


_LAB = pytest.StashKey[PushLab]()
_REPOS = itertools.count(1)


@pytest.fixture
def lab(request: pytest.FixtureRequest) -> Iterator[PushLab]:
    """One for the whole run: starting it takes seconds; every test has repos of its own."""
    config = request.config
    if _LAB not in config.stash:
        root = tempfile.TemporaryDirectory(prefix="hfshard-push-")
        config.add_cleanup(root.cleanup)
        config.stash[_LAB] = PushLab(Path(root.name))
        config.add_cleanup(config.stash[_LAB].stop)
    one = config.stash[_LAB]
    one.hub.clear_faults()
    one.hub.clear_log()
    yield one
    one.hub.clear_faults()


@pytest.fixture
def repo() -> str:
    """A name for a repo of this test alone; it does not exist yet."""
    return f"org/model-{next(_REPOS)}"


def saved(folder: Path, seed: int, limit: str | int = "10MB", *, variant: str | None = None, **model: Any) -> Path:
    """A directory with a checkpoint."""
    make_model(seed, **model).save_pretrained(folder, max_shard_size=limit, variant=variant)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Path in a directory -> bytes, without what hfshard and huggingface_hub keep there for themselves."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and ".cache" not in path.parts
    }


def differences(lab: PushLab, repo_id: str, expected: dict[str, bytes], revision: str = "main") -> dict[str, str]:
    """Path -> what is wrong with it, of all files in a repo that are not as expected."""
    view = lab.view(repo_id)
    there = {path: view.read(path, revision) for path in lab.files(repo_id, revision)}
    problems = dict.fromkeys(expected.keys() - there.keys(), "missing")
    problems |= dict.fromkeys(there.keys() - expected.keys(), "unexpected")
    return problems | {path: "differs" for path in there.keys() & expected.keys() if there[path] != expected[path]}
