"""A Hub server and a client process that all tests of pulls share, and what they ask of both."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hub.lab import Lab, Outcome
from tests.hub.models import make_model
from tests.hubserver.hub_server import RepoView, Request


class PullLab(Lab):
    """A Hub, and a client that pulls from it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, "tests.hub.pull.client")

    def call(self, task: str, *args: object, **options: Any) -> Any:
        """The result of a task that succeeds; the server's log has only its requests."""
        self.hub.clear_log()
        return self.done(task, *args, **options).result

    def refused(self, task: str, *args: object, **options: Any) -> Outcome:
        """What came of a task that ends with an error of hfshard; the server's log has only its requests."""
        self.hub.clear_log()
        return super().refused(task, *args, **options)

    def requests_of(self, repo_id: str) -> list[Request]:
        """The requests about one repo."""
        return [request for request in self.hub.log if repo_id in request.path]

    def weights_down(self, repo_id: str) -> int:
        """Bytes of a repo's weights that went over since the log was cleared."""
        return sum(request.bytes_down for request in self.requests_of(repo_id) if request.kind == "storage_get")

    def publish(self, repo_id: str, folder: Path, revision: str = "main", **settings: Any) -> str:
        """Make a repo with the files of a directory, or a commit to it; gives the commit."""
        try:
            view = self.hub.repo(repo_id)
        except KeyError:
            view = self.hub.create_repo(repo_id, **settings)
        return view.commit(files_of(folder), "Files", revision)

    def view(self, repo_id: str) -> RepoView:
        """A repo from inside."""
        return self.hub.repo(repo_id)


_LAB = pytest.StashKey[PullLab]()
_REPOS = itertools.count(1)


@pytest.fixture
def lab(request: pytest.FixtureRequest) -> Iterator[PullLab]:
    """One for the whole run: starting it takes seconds; every test has repos of its own."""
    config = request.config
    if _LAB not in config.stash:
        root = tempfile.TemporaryDirectory(prefix="hfshard-pull-")
        config.add_cleanup(root.cleanup)
        config.stash[_LAB] = PullLab(Path(root.name))
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
    made: Any = make_model(seed, **model)
    made.save_pretrained(folder, max_shard_size=limit, variant=variant)
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    """Path in a directory -> bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def cached(cache: Path, repo_id: str, kind: str = "blobs") -> list[Path]:
    """The files that a cache has of a repo: its blobs, or what lies below another folder."""
    folder = cache / ("models--" + repo_id.replace("/", "--")) / kind
    return sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []
