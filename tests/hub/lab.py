"""A Hub server and a client process: the client imports everything once, and forks a child for each task."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.hubserver.hub_server import HubServer


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
    """A task that was begun."""

    def __init__(self, lab: Lab, pid: int, out: Path, words: Path) -> None:
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


class Lab:
    """A Hub, and a client of it."""

    def __init__(self, root: Path, client: str, **server: Any) -> None:
        """Start both.

        Args:
            root: For their files.
            client: The module that the client process runs.
            server: Options of the server.
        """
        self.root = root
        self.hub = HubServer(root / "hub", **server)
        self.hub.start()
        self.home = root / "home"
        self.environment = {**self.hub.environment(home=self.home), "OMP_NUM_THREADS": "1"}
        self._numbers = itertools.count(1)
        self._process = subprocess.Popen(
            [sys.executable, "-m", client],
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
        out, words = self.root / f"{number}.json", self.root / f"{number}.txt"
        order = {
            "task": task, "args": [_plain(one) for one in args],
            "kwargs": {name: _plain(one) for name, one in kwargs.items()},
            "environment": environment or {}, "settings": settings or {}, "umask": umask,
            "largest_file": largest_file, "open_files": open_files, "out": str(out), "words": str(words),
        }  # fmt: skip
        return Task(self, self.ask(order), out, words)

    def done(self, task: str, *args: object, **options: Any) -> Outcome:
        """Do a task that succeeds."""
        outcome = self.start(task, *args, **options).outcome()
        assert outcome.error is None, outcome.trace + "\n".join(map(str, self.hub.log))
        return outcome

    def refused(self, task: str, *args: object, **options: Any) -> Outcome:
        """Do a task that ends with an error of hfshard."""
        outcome = self.start(task, *args, **options).outcome()
        assert outcome.error is not None and outcome.is_ours, f"{outcome}\n{outcome.trace}"
        return outcome

    def kinds(self) -> Counter[str]:
        """How many requests of each kind came since the log was cleared."""
        return Counter(request.kind for request in self.hub.log)


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value
