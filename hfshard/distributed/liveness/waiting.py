"""How long a rank waits for others, and when it says for whom."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from hfshard.distributed.liveness.call_group import call_group

_UNKNOWN_SECONDS: Final = 600.0
"""Where the backend does not say: what torch gives NCCL."""
_FIRST_WORD_SECONDS: Final = 10.0
"""Ranks that do the same work come within a few seconds."""
_FIRST_WORD_SHARE: Final = 0.25
"""Of a short patience: the word comes long before the error."""
_PAUSE_SHARE: Final = 0.2
"""Of the time that a wait has lasted: it ends at most so much later than it could, after some twenty looks."""
_SHORTEST_PAUSE_SECONDS: Final = 0.001
_LONGEST_PAUSE_SECONDS: Final = 0.05


class Wait:
    """One wait for other ranks, which has an end; a word about it is due after ten seconds, twenty, forty ...

    Args:
        most_seconds: How long it may take.
    """

    def __init__(self, most_seconds: float) -> None:
        self._start = time.monotonic()
        self._most_seconds = most_seconds
        self._word_after_seconds = min(_FIRST_WORD_SECONDS, most_seconds * _FIRST_WORD_SHARE)

    @property
    def seconds(self) -> float:
        """For how long it has lasted."""
        return time.monotonic() - self._start

    @property
    def left_seconds(self) -> float:
        """For how long it will go on."""
        return self._most_seconds - self.seconds

    @property
    def is_over(self) -> bool:
        """Whether it has lasted too long."""
        return self.left_seconds < 0

    def pause(self) -> None:
        """Sleep until the next look at what is waited for."""
        time.sleep(min(max(self.seconds * _PAUSE_SHARE, _SHORTEST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS))

    def is_word_due(self) -> bool:
        """Whether to say now that it lasts; the next time twice as late."""
        if self.seconds < self._word_after_seconds:
            return False
        self._word_after_seconds *= 2
        return True


def group_timeout_seconds() -> float:
    """For how long the process group of a call waits for a rank, as `init_process_group(timeout=)` or `new_group` says.

    torch has no public name for it: where several backends serve the group, the shortest counts.
    """
    group: Any = call_group() or dist.group.WORLD
    backends = [group._get_backend(device) for device in group._device_types]
    timeouts = [getattr(getattr(backend, "options", None), "_timeout", None) for backend in backends]
    return min((one.total_seconds() for one in timeouts if isinstance(one, timedelta)), default=_UNKNOWN_SECONDS)
