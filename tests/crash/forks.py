"""Work in forks of a process that has everything imported: one at a time, one that lives on, several side by side."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import select
import signal
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any, NoReturn, ParamSpec, TypeVar

from tests.crash.tracer import TIMEOUT_SECONDS

A = TypeVar("A")
B = TypeVar("B")
P = ParamSpec("P")


def in_fork(work: Callable[[], A]) -> A:
    """Do something in a child of its own, so that its crash, its hang or its threads stay there."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            data = pickle.dumps((True, work()))
        except BaseException as error:
            data = pickle.dumps((False, f"{type(error).__name__}: {error}"))
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(data)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        ready, _, _ = select.select([pipe], [], [], 2 * TIMEOUT_SECONDS)
        if not ready:
            os.kill(pid, signal.SIGKILL)
        data = pipe.read()
    _, status = os.waitpid(pid, 0)
    if not data:
        raise RuntimeError(f"The judging process died or hung: wait status {status}.")
    is_done, result = pickle.loads(data)
    if not is_done:
        raise RuntimeError(result)
    return result  # type: ignore[no-any-return]


class Aside:
    """A fork of the process that asks it first, which does one thing after the other, and keeps what it has learned.

    A fork for each thing would copy the page tables, and then the pages that it touches, of all that is imported. What
    crashes or hangs ends the sweep, as in `in_fork`.
    """

    def __init__(self) -> None:
        self._owner = self._pid = 0
        self._connection: Connection[Any, Any]

    def call(self, function: Callable[P, B], *args: P.args, **options: P.kwargs) -> B:
        """Call a function at the top of a module there."""
        if self._owner != os.getpid():
            self._begin()
        self._connection.send((function, args, options))
        if not self._connection.poll(2 * TIMEOUT_SECONDS):
            os.kill(self._pid, signal.SIGKILL)
        try:
            is_done, result = self._connection.recv()
        except EOFError:
            _, status = os.waitpid(self._pid, 0)
            self._owner = 0
            raise RuntimeError(f"The judging process died or hung: wait status {status}.") from None
        if not is_done:
            raise RuntimeError(result)
        return result  # type: ignore[no-any-return]

    def _begin(self) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        self._owner = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            self._connection.close()
            _answer(theirs)
        theirs.close()


def _answer(connection: Connection[Any, Any]) -> NoReturn:
    """Do what is asked, until the process that asks has ended."""
    gc.freeze()
    gc.enable()
    try:
        while True:
            function, args, options = connection.recv()
            try:
                answer = True, function(*args, **options)
            except BaseException as error:
                answer = False, f"{type(error).__name__}: {error}"
            connection.send(answer)
    finally:
        os._exit(0)


def parallel(work: Callable[[A], B], items: Iterable[A], jobs: int) -> Iterator[B]:
    """Map in `jobs` forks of this process, in any order; in this process when there is one job."""
    if jobs <= 1:
        yield from map(work, items)
        return
    global _work
    _work = work  # inherited by the forks: it need not be pickled
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap_unordered(_call, items)


_work: Callable[..., object]


def _call(item: object) -> object:
    return _work(item)
