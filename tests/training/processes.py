"""Processes for the runs: forked from a warm server, or started from nothing; and what became of each."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

from tests import REPOSITORY

Key = TypeVar("Key")
Outcome = TypeVar("Outcome")

PATIENCE_SECONDS = 120
"""A run takes a second; one that hangs is a failure with a name, and not a session that never ends."""

_PRELOADED = ["torch", "transformers.optimization", "tests.training.resume.roles", "pytest"]
"""What takes seconds to import: pytest too, which a child of `pytest` imports as its main module."""
_lock = Lock()
"""`start()` polls the processes of other threads: two that ask for one exit status would lose it."""


@dataclass(frozen=True, slots=True)
class End:
    """How a process ended."""

    status: int | None
    """0, its exit status, or minus the signal that killed it; None: it hung, and was ended here."""
    words: str
    """What it wrote to stdout and stderr."""


def _child(words: Path, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    with open(words, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # Inherited is the method by which this process was started; workers that fork need no second warm server.
    multiprocessing.set_start_method("fork", force=True)
    try:
        target(*args)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def run(words: Path, target: Callable[..., None], *args: Any, fresh: bool = False) -> End:
    """Call a function in a process of its own, and wait for its end.

    Args:
        words: The file for what it says.
        target: A function at the top of a module.
        args: For it; pickled on the way.
        fresh: Start an interpreter, rather than fork one that has imported everything and computed nothing.
    """
    context: Any = multiprocessing.get_context("spawn" if fresh else "forkserver")
    process = context.Process(target=_child, args=(words, target, args))
    with _lock:
        _start(context, process)
    ended = wait([process.sentinel], timeout=PATIENCE_SECONDS)
    with _lock:
        if not ended:
            process.kill()
        process.join()
        status = process.exitcode if ended else None
    return End(status, words.read_text(errors="replace") if words.exists() else "")


def _start(context: Any, process: Any) -> None:
    """Start it with the checkout on the path of the server, too, which does not ask for ours."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *([before] if before else [])])
    try:
        context.set_forkserver_preload(_PRELOADED)
        process.start()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


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
