"""One save at a time, in a thread of its own: its error is raised at the next call, and the process's end waits."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - before ours is registered below: the last one is called first
import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import Final

logger = logging.getLogger(__name__)

_running: Final[weakref.WeakSet[Background]] = weakref.WeakSet()


class Background:
    """Runs one piece of work beside the caller's."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], object], what: str) -> None:
        """Begin some work; nothing else may be running."""

        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - kept, and raised where the caller looks for it
                logger.error("%s failed: %s", what, error)
                self._error = error

        thread = threading.Thread(target=run, name="hfshard-save")
        thread.start()
        self._thread = thread
        _running.add(self)

    @property
    def is_running(self) -> bool:
        """Whether the work is not done yet."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait until it is done, and raise what it raised, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            _running.discard(self)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def forget(self) -> None:
        """In a process that was forked: the thread is not in it."""
        self._thread = self._error = None


def _wait_for_all() -> None:
    while threads := [one._thread for one in list(_running) if one._thread is not None and one._thread.is_alive()]:
        for thread in threads:
            thread.join()  # and look again: a save may have begun a push


def _forget_in_child() -> None:
    for one in list(_running):
        one.forget()


# Python's exit first forbids new work to thread pools, which a save needs, and then waits for threads: too late. No
# public hook comes before; `test_exit_waits_for_a_save_in_flight` fails when this one is gone.
_before_pools_close = threading._register_atexit  # type: ignore[attr-defined]
_before_pools_close(_wait_for_all)
os.register_at_fork(after_in_child=_forget_in_child)
