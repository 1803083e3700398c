"""Threads that have done their work: they end a moment after their result is there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_PATIENCE_SECONDS = 60.0


@contextmanager
def no_thread_is_left() -> Iterator[None]:
    """Check that each thread that was started in the block ends."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(_PATIENCE_SECONDS)
        assert not thread.is_alive(), thread.name
