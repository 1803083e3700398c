"""Python's garbage collection, put off while many objects are made that no cycle holds."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Put off garbage collection in a short block that makes a million objects, none of them in a cycle.

    Looking through them again and again took half of the time in which 100,000 tensors are planned or loaded.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
