"""How long to wait for services and for the Hub, as the environment says."""

from __future__ import annotations

import os
from typing import Final

from hfshard.errors import InvalidArgumentError

TIMEOUT_VARIABLE: Final = "HFSHARD_STORE_TIMEOUT"
"""The environment variable that says how many seconds a service may be silent."""
_TIMEOUT: Final = 60.0

RETRY_VARIABLE: Final = "HFSHARD_STORE_RETRY_SECONDS"
"""The environment variable that says for how many seconds a request that failed is tried again."""
_RETRY: Final = 120.0

_FIRST_WAIT: Final = 1.0
_WAITS: Final = 32
"""The sum of the first five waits is 31 of the first one."""


def stall_seconds() -> float:
    """How long a service may be silent while it is asked."""
    return _seconds(TIMEOUT_VARIABLE, _TIMEOUT)


def retry_seconds() -> float:
    """For how long a request that failed is tried again."""
    return _seconds(RETRY_VARIABLE, _RETRY)


def first_wait() -> float:
    """How many seconds to wait after the first failure: twice as many after each further one.

    One, where nothing else is said, for the sake of services that ask for it: obstore does not show their Retry-After.
    """
    return min(_FIRST_WAIT, retry_seconds() / _WAITS)


def _seconds(variable: str, default: float) -> float:
    wanted = os.environ.get(variable, "").strip()
    try:
        seconds = float(wanted) if wanted else default
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise InvalidArgumentError(f"{variable}={wanted!r} is not a number of seconds. Give one, such as 60.")
    return seconds
