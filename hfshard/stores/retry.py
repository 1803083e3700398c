"""Timeouts and retry periods for services and the Hub, set by environment variables."""

from __future__ import annotations

import os
from typing import Final

from hfshard.errors import InvalidArgumentError

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
