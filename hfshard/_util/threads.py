"""Work in several threads that ends early when one of them fails, or Ctrl-C comes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def cancellable(progress_callback: Callable[[int], object] | None, cancelled: threading.Event) -> Callable[[int], None]:
    """Wrap a progress callback so that the work that calls it ends early when `cancelled` is set."""

    def report(count_bytes: int) -> None:
        if cancelled.is_set():
            raise InterruptedError("another file failed, or Ctrl-C came")
        if progress_callback is not None:
            progress_callback(count_bytes)

    return report


def in_threads(
    work: Callable[[_Item, threading.Event], _Result], items: Iterable[_Item], threads: int
) -> list[_Result]:
    """Do some work for all items, several at once; an error or Ctrl-C sets the event that the others check.

    Raises:
        The first error, in the order of the items.
    """
    cancelled = threading.Event()
    with ThreadPoolExecutor(threads, thread_name_prefix="hfshard-hash") as pool:
        futures = [pool.submit(work, item, cancelled) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            cancelled.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
