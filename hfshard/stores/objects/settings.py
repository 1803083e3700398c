"""How long to wait for an answer, as the environment says; and how large parts are."""

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

_LEAST_PART: Final = 8 << 20
"""S3 and GCS take parts of 5 MiB and more, but for the last one."""
_MOST_PARTS: Final = 10_000
"""S3 and GCS; Azure takes 50,000."""


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


def part_bytes(object_bytes: int) -> int:
    """How large the parts of an object are: a function of its size alone, the same for every writer.

    Example:
        >>> part_bytes(5 << 40) >> 20
        525
    """
    least = -(-object_bytes // _MOST_PARTS)
    whole_mib = -(-least // (1 << 20)) << 20
    return max(_LEAST_PART, whole_mib)
