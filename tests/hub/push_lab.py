"""A Hub server and a client process that all tests of pushes share, and what they ask of both."""

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
from tests.hub_server import HubServer, RepoView

MULTIPART_BYTES = 1_000_000
"""Larger files go up in parts."""


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
    """At WARNING or above: of hfshard, huggingface_hub and transformers."""
    waits: list[float] = field(default_factory=list)
    """Seconds that were to be waited; none was."""
    read: int = 0
    written: int = 0
    """Bytes, on files and pipes."""


class Task:
    """A task that was begun."""

    def __init__(self, lab: PushLab, pid: int, out: Path, words: Path) -> None:
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


class PushLab:
    """A Hub, and a client of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.hub = HubServer(root / "hub", multipart_bytes=MULTIPART_BYTES)
        self.hub.start()
        self.home = root / "home"
        self.environment = {**self.hub.environment(home=self.home), "OMP_NUM_THREADS": "1"}
        self._numbers = itertools.count(1)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.hub.push_client"],
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
        environment: dict[str, str | None] | None = None,
        largest_file: int | None = None,
        open_files: int | None = None,
        **kwargs: Any,
    ) -> Task:
        """Begin a task of `push_client`.

        Args:
            task: A key of its `TASKS`.
            args: Of the task; paths become strings.
            environment: Name -> value, or None for none.
            largest_file: Bytes that no file may grow beyond.
            open_files: So many at once.
            kwargs: Of the task.
        """
        number = next(self._numbers)
        out, words = self.root / f"{number}.json", self.root / f"{number}.txt"
        order = {
            "task": task, "args": [str(one) if isinstance(one, Path) else one for one in args], "kwargs": kwargs,
            "environment": environment or {}, "largest_file": largest_file, "open_files": open_files,
            "out": str(out), "words": str(words),
        }  # fmt: skip
        return Task(self, self.ask(order), out, words)

    def call(self, task: str, *args: object, **options: Any) -> Outcome:
        """Do a task that succeeds."""
        outcome = self.start(task, *args, **options).outcome()
        assert outcome.error is None, outcome.trace + "\n".join(map(str, self.hub.log))
        return outcome

    def refused(self, task: str, *args: object, **options: Any) -> Outcome:
        """Do a task that ends with an error of hfshard."""
        outcome = self.start(task, *args, **options).outcome()
        assert outcome.error is not None and outcome.is_ours, f"{outcome}\n{outcome.trace}"
        return outcome

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

    def kinds(self) -> Counter[str]:
        """How many requests of each kind came since the log was cleared."""
        return Counter(request.kind for request in self.hub.log)


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
