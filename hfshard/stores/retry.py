"""Retries of failed requests: waits between attempts, and the timeouts that environment variables set."""

from __future__ import annotations

import logging
import math
import os
import random
import threading
import time
from email.utils import parsedate_to_datetime
from typing import Any, Final

from hfshard._util.text import without_url_secrets
from hfshard._util.threads import sleep_unless_cancelled
from hfshard.errors import InvalidArgumentError

logger = logging.getLogger(__name__)

TIMEOUT_VARIABLE: Final = "HFSHARD_STORE_TIMEOUT"
"""Environment variable: the number of seconds that a service may be silent."""
_TIMEOUT: Final = 60.0

RETRY_VARIABLE: Final = "HFSHARD_STORE_RETRY_SECONDS"
"""Environment variable: the number of seconds for which a failed request is retried."""
_RETRY: Final = 120.0

_FIRST_WAIT: Final = 1.0
_WAITS: Final = 32
"""The first five waits add up to 31 times the first one."""


def idle_timeout() -> float:
    """Return the number of seconds that a service may be silent during a request."""
    return _seconds(TIMEOUT_VARIABLE, _TIMEOUT)


def retry_seconds() -> float:
    """Return the number of seconds for which a failed request is retried."""
    return _seconds(RETRY_VARIABLE, _RETRY)


def initial_backoff() -> float:
    """Return the number of seconds to wait after the first failure; the wait doubles after each further one.

    The default is one second, for services that ask for a pause: obstore does not expose their Retry-After.
    """
    return min(_FIRST_WAIT, retry_seconds() / _WAITS)


def _seconds(variable: str, default: float) -> float:
    wanted = os.environ.get(variable, "").strip()
    try:
        seconds = float(wanted) if wanted else default
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise InvalidArgumentError(f"{variable} must be a number of seconds, such as 60, got {wanted!r}.")
    return seconds


# Waits between the attempts of one operation.


_RANDOM: Final = random.SystemRandom()
"""Source of jitter without a state: a retry must not change the random numbers that a training draws."""
_MOST_DOUBLINGS: Final = 64
"""More would exceed a float after hours of retries; `longest_seconds` has long been reached."""
_LONGEST_RETRY_AFTER: Final = 600.0
"""The longest wait, in seconds, that a server may ask for."""


class Retry:
    """Waits between the attempts of one operation: each twice as long as the one before, within limits.

    Cancellation ends a wait. Callers decide which failures may pass.

    `wait` returns False instead of raising the error, as callers raise different ones: with its cause, or without it if
    that shows signatures. The first wait and the budget are also arguments of `wait`, since they depend on the failure.
    """

    def __init__(
        self,
        what: str = "",
        *,
        attempts: int | None = None,
        first_seconds: float = 0.0,
        longest_seconds: float = math.inf,
        jitter: float = 0.0,
        cancelled: threading.Event | None = None,
    ) -> None:
        """Start the clock at zero failures.

        Args:
            what: The failure, for a warning before each wait; "" logs none.
            attempts: Number of attempts without progress, the first one included; None: only the budget limits them.
            first_seconds: The first wait.
            longest_seconds: The longest wait, before jitter.
            jitter: The largest share by which a wait is extended at random.
            cancelled: The event that ends a wait; None: the one of this thread's work, see `sleep_unless_cancelled`.
        """
        self.failures = 0
        """Number of failures in a row after which there was a wait."""
        self._what, self._attempts = what, attempts
        self._first_seconds, self._longest_seconds = first_seconds, longest_seconds
        self._jitter, self._cancelled = jitter, cancelled
        self._began = time.monotonic()

    def wait(
        self,
        error: BaseException | None = None,
        *,
        retry_after: float | None = None,
        first_seconds: float | None = None,
        budget_seconds: float | None = None,
    ) -> bool:
        """Wait until the next attempt; return False at once if there is none.

        Args:
            error: The last attempt's error, for the warning.
            retry_after: The fewest seconds to wait, because the server asks for them; see `retry_after`.
            first_seconds: The first wait, if it depends on the failure.
            budget_seconds: The longest time from the start of the first attempt, or from the last progress, to that of
                the next attempt; None: no limit.

        Raises:
            InterruptedError: The work was cancelled.
        """
        if self._attempts is not None and self.failures + 1 >= self._attempts:
            return False
        first = self._first_seconds if first_seconds is None else first_seconds
        seconds = min(math.ldexp(first, min(self.failures, _MOST_DOUBLINGS)), self._longest_seconds)
        seconds = max(seconds * _RANDOM.uniform(1, 1 + self._jitter), retry_after or 0.0)
        if budget_seconds is not None and time.monotonic() - self._began + seconds > budget_seconds:
            return False
        self.failures += 1
        if self._what:
            logger.warning(
                "%s (%s); retrying in %g s, attempt %d of %s.",
                self._what,
                without_url_secrets(str(error)),
                seconds,
                self.failures + 1,
                self._attempts,
            )
        sleep_unless_cancelled(seconds, self._cancelled)
        return True

    def reset(self) -> None:
        """Start over, because the operation made progress."""
        self._began = time.monotonic()
        self.failures = 0


def retry_after(response: Any) -> float | None:
    """Return the seconds that a response asks clients to wait; None if it does not say."""
    value = response.headers.get("Retry-After")
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    if math.isnan(seconds):
        return None
    return min(max(seconds, 0.0), _LONGEST_RETRY_AFTER)
