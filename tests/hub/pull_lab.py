"""A Hub server and a client process that all tests of pulls share, and what they ask of both."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.hub.push_models import make_model
from tests.hub_server import HubServer, RepoView, Request


@dataclass(slots=True)
class Outcome:
    """What came of a task."""

    result: Any = None
    error: str | None = None
    """The name of the exception's class."""
    message: str = ""
    trace: str = ""
    is_ours: bool = True
    """Whether the exception is hfshard's."""
    log: list[str] = field(default_factory=list)
    """At WARNING or above, of hfshard."""
    seconds: float = 0.0


class Task:
    """A task that was begun."""

    def __init__(self, lab: PullLab, pid: int, out: Path, words: Path) -> None:
        self._lab, self._out, self._words, self.pid = lab, out, words, pid

    def kill(self) -> None:
        """Kill it, at once."""
        os.kill(self.pid, signal.SIGKILL)
        self._lab.ask({"wait": self.pid})

    def outcome(self) -> Outcome:
        """Wait for its end."""
        status = self._lab.ask({"wait": self.pid})
        assert status == 0, f"the client ended with {status}: {self._words.read_text()}"
        return Outcome(**json.loads(self._out.read_text()))


class PullLab:
    """A Hub, and a client of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.hub = HubServer(root / "hub")
        self.hub.start()
        self.environment = {**self.hub.environment(home=root / "home"), "OMP_NUM_THREADS": "1"}
        self._numbers = itertools.count(1)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.hub.pull_client"],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == "ready"

    def stop(self) -> None:
        """End both."""
        self._process.communicate(timeout=60)
        self.hub.__exit__(None, None, None)

    def ask(self, order: dict[str, Any]) -> Any:
        """Give an order to the client process."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def start(
        self,
        task: str,
        *args: object,
        environment: dict[str, str] | None = None,
        settings: dict[str, Any] | None = None,
        umask: int = 0o022,
        **kwargs: Any,
    ) -> Task:
        """Begin a task of `pull_client`.

        Args:
            task: A key of its `TASKS`.
            args: Of the task; paths become strings.
            environment: Name -> value.
            settings: Constant of huggingface_hub -> value, as it would have read it from the environment.
            umask: Of the task.
            kwargs: Of the task.
        """
        number = next(self._numbers)
        out, words = self.root / f"{number}.json", self.root / f"{number}.txt"
        order = {
            "task": task, "args": [str(one) if isinstance(one, Path) else one for one in args],
            "kwargs": {name: str(one) if isinstance(one, Path) else one for name, one in kwargs.items()},
            "environment": environment or {}, "settings": settings or {}, "umask": umask,
            "out": str(out), "words": str(words),
        }  # fmt: skip
        return Task(self, self.ask(order), out, words)

    def call(self, task: str, *args: object, **options: Any) -> Any:
        """The result of a task that succeeds; the server's log has only its requests."""
        self.hub.clear_log()
        outcome = self.start(task, *args, **options).outcome()
        assert outcome.error is None, outcome.trace + "\n".join(map(str, self.hub.log))
        return outcome.result

    def refused(self, task: str, *args: object, **options: Any) -> Outcome:
        """What came of a task that ends with an error of hfshard."""
        self.hub.clear_log()
        outcome = self.start(task, *args, **options).outcome()
        assert outcome.error is not None and outcome.is_ours, f"{outcome}\n{outcome.trace}"
        return outcome

    def kinds(self) -> Counter[str]:
        """How many requests of each kind came since the log was cleared."""
        return Counter(request.kind for request in self.hub.log)

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
