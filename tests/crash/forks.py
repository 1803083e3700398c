"""Work in forks of a process that has everything imported: one at a time, or several side by side."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import select
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from tests.crash.tracer import TIMEOUT_SECONDS

A = TypeVar("A")
B = TypeVar("B")


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
