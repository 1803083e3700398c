"""Runs one piece of work at a time in a thread: its error is raised by the next call, and the process waits for it."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - its exit hook must be registered before ours: the last one is called first
import logging
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from hfshard._util.threads import start_thread, wait_for

logger = logging.getLogger(__name__)

_running: Final[weakref.WeakSet[Background]] = weakref.WeakSet()
_listing = threading.RLock()
"""Held for a moment where a thread is noted or forgotten: any thread may start, wait or end the process."""


class Background:
    """Runs one piece of work in a thread beside the caller.

    It waits for a future, not for the thread: after Ctrl-C in `Thread.join`, Python 3.11 takes the thread for ended.
    """

    def __init__(self) -> None:
        self._work: Future[None] | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], object], what: str) -> None:
        """Start some work, or do it here where no thread can be started; nothing else may be running."""

        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - kept, and raised where the caller looks for it
                logger.error("%s failed: %s", what, error)
                self._error = error

        with _listing:
            self._work = start_thread(run, "hfshard-save")
            if self._work is not None:
                _running.add(self)
                return
        run()

    @property
    def is_running(self) -> bool:
        """Whether the work is still running."""
        under_way = self._work
        return under_way is not None and not under_way.done()

    def join(self) -> None:
        """Wait until the work is done; its error is left to `wait`."""
        under_way = self._work
        if under_way is not None:
            wait_for([under_way])

    def wait(self) -> None:
        """Wait until the work is done, and raise its error, once: in one of the threads that wait."""
        under_way = self._work
        if under_way is not None:
            wait_for([under_way])
        with _listing:
            if self._work is under_way:
                self._work = None
                _running.discard(self)
            error = self._error
            self._error = None
        if error is not None:
            raise error

    def forget(self) -> None:
        """Forget the work in a forked process, where the thread does not exist."""
        self._work = self._error = None


def _under_way() -> list[Future[None]]:
    with _listing:
        return [one._work for one in _running if one._work is not None and not one._work.done()]


def _wait_for_all() -> None:
    while under_way := _under_way():
        wait_for(under_way)  # and look again: a save may have started a push


def _forget_in_child() -> None:
    global _listing
    _listing = threading.RLock()
    for one in list(_running):
        one.forget()


# At its exit Python first forbids new work in thread pools, which a push to the Hub needs, and only then waits for
# threads. No public hook runs before that; `test_exit_waits_for_a_save_in_flight` fails when this one is gone.
_before_pools_close = threading._register_atexit  # type: ignore[attr-defined]
_before_pools_close(_wait_for_all)
os.register_at_fork(after_in_child=_forget_in_child)
