"""Hold Ctrl-C back while the steps of a commit run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Hold Ctrl-C back while a block runs that must not end half done, and soon ends; yield whether it was pressed."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    interrupts: list[FrameType | None] = []
    before = signal.getsignal(signal.SIGINT)
    if before is None:  # not installed from Python: it could not be restored
        yield lambda: False
        return
    signal.signal(signal.SIGINT, lambda _signum, frame: interrupts.append(frame))
    try:
        yield lambda: bool(interrupts) and before is signal.default_int_handler
    except KeyboardInterrupt:
        interrupts.clear()
        raise
    finally:
        signal.signal(signal.SIGINT, before)
        if interrupts and callable(before):
            before(signal.SIGINT, interrupts[0])
