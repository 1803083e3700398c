"""Trying a request again: after which failures, how soon and for how long; and leaving one that may never end."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import Final, TypeVar

from hfshard._util.threads import pause, start_thread
from hfshard.stores.objects.failures import Failure
from hfshard.stores.patience import first_wait, retry_seconds

_QUICK: Final = 0.2
"""A connection that broke may be tried again sooner than a service that asks for rest."""
_LONGEST_WAIT: Final = 15.0
_UNREACHED_SECONDS: Final = 15.0
"""A service that can't be connected to at all is not waited for as long as one that fails."""
_LOOK_SECONDS: Final = 0.1
"""How soon who waits for an answer notices that the work of its thread was cancelled."""

_Answer = TypeVar("_Answer")


def ask(request: Callable[[], _Answer]) -> _Answer:
    """Send a request that changes nothing in the store; Ctrl-C, or the failure of others, does not wait for its answer.

    obstore lets no signal through while it waits for a service that is silent. So another thread waits, and is left to
    itself where nobody wants the answer any more.

    Raises:
        InterruptedError: The work of this thread was cancelled; see `pause`.
        Everything that the request raises.
    """
    answer = start_thread(request, "hfshard-request", daemon=True)
    if answer is None:
        return request()
    try:
        while not wait([answer], _LOOK_SECONDS).done:
            pause(0)
        return answer.result()
    finally:
        del answer  # its error's traceback holds this frame


class Patience:
    """The waiting of one request, from its first failure on."""

    def __init__(self, follow: Callable[[Failure], bool] = lambda failure: False) -> None:
        """Begin.

        Args:
            follow: After a failure, tells whether the request now goes elsewhere; see `Connection.follower`.
        """
        self._follow = follow
        self._begin = time.monotonic()
        self._failures = 0

    def wait_after(self, failure: Failure) -> bool:
        """Wait until the request should be tried again; False, at once, if it should not.

        Raises:
            InterruptedError: The work of this thread was cancelled; see `pause`.
        """
        if self._follow(failure):
            return True
        if not failure.is_transient:
            return False
        first = first_wait() * (1 if failure.is_slow_down else _QUICK)
        wait = min(first * 2**self._failures, _LONGEST_WAIT) * random.uniform(1, 1.2)
        limit = retry_seconds()
        if failure.transport == "Connect":
            limit = min(limit, _UNREACHED_SECONDS)
        if time.monotonic() - self._begin + wait > limit:
            return False
        self._failures += 1
        pause(wait)
        return True

    def reset(self) -> None:
        """Begin anew, as the request got on."""
        self._begin = time.monotonic()
        self._failures = 0
