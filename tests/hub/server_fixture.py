"""A Hub server and a client process for tests: started once per run, and shared by the tests of a folder."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest

from tests.helpers import processes
from tests.hub.client_process import perform
from tests.servers.faults import Fault
from tests.servers.hub.hub_server import HubServer, RepoView

CODE_SECONDS = 110

_REPOS = itertools.count(1)
_KEYS: dict[type, pytest.StashKey[Any]] = {}


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
    seconds: float = 0.0
    read: int = 0
    written: int = 0
    """Bytes, on files and pipes."""


class Task:
    """A task that was started in a child of the client process."""

    def __init__(self, child: processes.Child, report: Path, output: Path) -> None:
        self._child = child
        self._report = report
        self._output = output

    def kill(self) -> None:
        """Kill it, at once."""
        self._child.kill()
        self._child.wait()

    def runs(self) -> bool:
        """Whether it has not ended."""
        return self._child.poll() is None

    def outcome(self) -> Outcome:
        """Wait for its end."""
        status = self._child.wait()
        assert status == 0, f"the client ended with {status}: {self._output.read_text()}"
        return Outcome(**json.loads(self._report.read_text()))


class HubServerFixture:
    """A Hub server, and a client process of it.

    Attributes:
        server: The server; faults are put into it, and its log is read.
        root: Directory of all files of both.
        home: The client's HF_HOME.
        environment: The client's.
    """

    client_module = ""
    """The module that the client process imports; its `TASKS` are what tests can start in forks of it."""
    server_options: ClassVar[dict[str, Any]] = {}

    def __init__(self, root: Path) -> None:
        """Start both."""
        self.root = root
        self.server = HubServer(root / "hub", **self.server_options)
        self.server.start()
        self.home = root / "home"
        self.environment = {**self.server.environment(home=self.home), "OMP_NUM_THREADS": "1"}
        self._numbers = itertools.count(1)

    def stop(self) -> None:
        """End the server."""
        self.server.__exit__(None, None, None)

    def start(
        self,
        task: str,
        *args: object,
        environment: dict[str, str | None] | None = None,
        settings: dict[str, Any] | None = None,
        umask: int = 0o022,
        largest_file: int | None = None,
        open_files: int | None = None,
        **kwargs: Any,
    ) -> Task:
        """Begin a task of the client.

        Args:
            task: A key of its `TASKS`.
            args: Of the task; paths become strings.
            environment: Name -> value, or None for none.
            settings: Constant of huggingface_hub -> value, as it would have read it from the environment.
            umask: Of the task.
            largest_file: Bytes that no file may grow beyond.
            open_files: So many at once.
            kwargs: Of the task; paths become strings.
        """
        number = next(self._numbers)
        report = self.root / f"{number}.json"
        output = self.root / f"{number}.txt"
        order = {
            "task": task, "args": [_plain(one) for one in args],
            "kwargs": {name: _plain(one) for name, one in kwargs.items()},
            "environment": environment or {}, "settings": settings or {},
            "largest_file": largest_file, "open_files": open_files, "report": str(report),
        }  # fmt: skip
        with open(output, "w") as said:
            child = processes.call(
                perform, self.client_module, order, env=self.environment, modules=[self.client_module],
                stdout=said, stderr=said, umask=umask,
            )  # fmt: skip
        return Task(child, report, output)

    def interpret(self, code: str) -> str:
        """Do what `python -c CODE` does, in a child that succeeds; gives what it printed."""
        done = processes.run(["-c", code], env=self.environment, timeout=CODE_SECONDS)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def done(self, task: str, *args: object, **options: Any) -> Outcome:
        """Do a task that succeeds."""
        outcome = self.start(task, *args, **options).outcome()
        assert outcome.error is None, outcome.trace + "\n".join(map(str, self.server.log))
        return outcome

    def refused(self, task: str, *args: object, **options: Any) -> Outcome:
        """Do a task that ends with an error of hfshard."""
        outcome = self.start(task, *args, **options).outcome()
        assert outcome.error is not None and outcome.is_ours, f"{outcome}\n{outcome.trace}"
        return outcome

    def fail(self, match: str, kind: str, **fault: Any) -> Fault:
        """Let a fault happen, after those before it."""
        return self.server.fail(Fault(match=match, kind=kind, **fault))

    def kinds(self) -> Counter[str]:
        """The number of requests of each kind since the log was cleared."""
        return Counter(request.kind for request in self.server.log)

    def view(self, repo_id: str) -> RepoView:
        """A repo, seen from inside the server."""
        return self.server.repo(repo_id)


Fixture = TypeVar("Fixture", bound=HubServerFixture)


def shared(request: pytest.FixtureRequest, kind: type[Fixture]) -> Iterator[Fixture]:
    """Start a server and its client once per run, as that takes seconds; each test finds no faults and an empty log."""
    config = request.config
    key = _KEYS.setdefault(kind, pytest.StashKey[Any]())
    if key not in config.stash:
        root = tempfile.TemporaryDirectory(prefix="hfshard-hub-")
        config.add_cleanup(root.cleanup)
        config.stash[key] = kind(Path(root.name))
        config.add_cleanup(config.stash[key].stop)
    fixture: Fixture = config.stash[key]
    fixture.server.clear_faults()
    fixture.server.clear_log()
    yield fixture
    fixture.server.clear_faults()


def hub_fixtures(kind: type[Fixture]) -> tuple[Any, Any]:
    """Two fixtures of the Hub that all tests of a folder share: `hub` for each test, and `module_hub` for a module."""

    def hub(request: pytest.FixtureRequest) -> Iterator[Fixture]:
        yield from shared(request, kind)

    return pytest.fixture(hub), pytest.fixture(scope="module")(hub)


def new_repo_id() -> str:
    """A name for a repo that no other test uses; the repo does not exist yet."""
    return f"org/model-{next(_REPOS)}"


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value
