"""Processes for the runs: forked from a warm server, or started from nothing; and what became of each."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tests import REPOSITORY
from tests.helpers import forkserver

Key = TypeVar("Key")
Outcome = TypeVar("Outcome")

PATIENCE_SECONDS = 120
"""A run takes a second; one that hangs is a failure with a name, and not a session that never ends."""


@dataclass(frozen=True, slots=True)
class End:
    """How a process ended."""

    status: int | None
    """0, its exit status, or minus the signal that killed it; None: it hung, and was ended here."""
    words: str
    """What it wrote to stdout and stderr."""


def _child(target: Callable[..., None], args: tuple[Any, ...]) -> None:
    # A DataLoader's workers fork, too, and need no warm server of their own.
    multiprocessing.set_start_method("fork", force=True)
    target(*args)


def run(words: Path, target: Callable[..., None], *args: Any, fresh: bool = False, modules: Sequence[str] = ()) -> End:
    """Call a function in a process of its own, and wait for its end.

    Args:
        words: The file for what it says.
        target: A function at the top of a module.
        args: For it; pickled on the way.
        fresh: Start an interpreter, rather than fork one that has imported everything and computed nothing.
        modules: What the one that is forked has imported beyond everything.
    """
    with open(words, "wb", buffering=0) as file:
        if fresh:
            status = _run_in_new_interpreter(file.fileno(), target, args)
        else:
            child = forkserver.call(
                _child, target, args, modules=modules, stdout=file.fileno(), stderr=subprocess.STDOUT
            )
            status = _ended(child)
    return End(status, words.read_text(errors="replace"))


def _run_in_new_interpreter(words: int, target: Callable[..., None], args: tuple[Any, ...]) -> int | None:
    paths = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "tests.training.processes"]
    with tempfile.TemporaryFile() as order:
        pickle.dump((target, args), order)
        order.seek(0)
        environment = {**os.environ, "PYTHONPATH": paths}
        return _ended(subprocess.Popen(command, env=environment, stdin=order, stdout=words, stderr=words))


def _ended(process: forkserver.Child | subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


class Jobs(dict[Key, "Future[Outcome]"]):
    """What tests want to have run, by their keys.

    All of it begins at once, and runs on all cores while the tests look at it. Where the tests themselves run in
    several processes, each of these lists all tests and does some: then a job begins when its test asks for it.

    Args:
        begin: Begins one.
        wanted: The keys of all.
    """

    def __init__(self, begin: Callable[[Key], Future[Outcome]], wanted: Iterable[Key]) -> None:
        super().__init__()
        self._begin = begin
        if "PYTEST_XDIST_WORKER" not in os.environ:
            self.update({key: begin(key) for key in wanted})

    def __missing__(self, key: Key) -> Future[Outcome]:
        """Begin a job that is asked for."""
        self[key] = self._begin(key)
        return self[key]


def pool() -> ThreadPoolExecutor:
    """Threads that wait for processes: as many as there are cores."""
    return ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0)))


if __name__ == "__main__":
    _child(*pickle.load(sys.stdin.buffer))
