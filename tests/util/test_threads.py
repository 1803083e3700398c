"""Work in several threads."""

from __future__ import annotations

import threading

import pytest

from hfshard._util.threads import in_threads
from hfshard.errors import HubConnectionError

pytestmark = pytest.mark.compat


def test_error_in_one_thread_stops_the_others() -> None:
    started, stopped = threading.Barrier(2), threading.Event()

    def work(item: int, stop: threading.Event) -> int:
        started.wait(30)
        if item == 0:
            raise HubConnectionError("no")
        if stop.wait(30):
            stopped.set()
        return item

    with pytest.raises(HubConnectionError):
        in_threads(work, [0, 1], 2)
    assert stopped.is_set()
