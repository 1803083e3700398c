"""The budget of memory that transfers share: who waits for whom, and what ends the waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from hfshard._util.threads import run_in_threads
from hfshard.stores import xet
from hfshard.stores.byte_budget import ByteBudget, ByteShare
from hfshard.stores.hub_calls import XetTokens
from hfshard.stores.object_store import BufferPool
from hfshard.stores.xet import XetReader

MIB = 1 << 20


def taken_by_another_thread(budget: ByteBudget, nbytes: int, limit: int) -> tuple[threading.Thread, list[ByteShare]]:
    """A thread that takes bytes, and what it got so far."""
    got: list[ByteShare] = []
    thread = threading.Thread(target=lambda: got.append(budget.take(nbytes, limit)))
    thread.start()
    thread.join(0.05)
    return thread, got


def test_another_thread_waits_until_all_fits() -> None:
    budget = ByteBudget()
    with budget.take(60, 100):
        _, got_first = taken_by_another_thread(budget, 40, 100)
        second, got_second = taken_by_another_thread(budget, 41, 100)
        # The first thread has ended: the second may have its number, and not its bytes.
        assert len(got_first) == 1 and not got_second
        assert budget.taken_bytes == 100
    second.join(60)
    assert len(got_second) == 1 and budget.taken_bytes == 81

    got_first.pop().end()
    got_second.pop().end()
    assert budget.taken_bytes == 0


def test_more_than_the_limit_waits_to_be_alone() -> None:
    budget = ByteBudget()
    small = budget.take(1, 100)
    thread, got = taken_by_another_thread(budget, 1000, 100)
    assert not got

    small.end()
    small.end()  # once more does nothing
    thread.join(60)
    assert len(got) == 1 and budget.taken_bytes == 1000


def test_a_thread_that_has_some_gets_more_and_what_is_forgotten_returns() -> None:
    budget = ByteBudget()
    first, again, nothing = budget.take(100, 100), budget.take(100, 100), budget.take(0, 100)
    thread, got = taken_by_another_thread(budget, 100, 100)

    assert not got  # the thread that has some got more; the other thread waits for both
    again.end()
    nothing.end()
    thread.join(0.05)
    assert not got
    del first  # forgotten, not ended
    thread.join(60)
    assert len(got) == 1


def test_a_thread_waits_for_its_own_bytes_where_others_return_them() -> None:
    budget = ByteBudget(by_thread=False)
    first = budget.take(100, 100)
    timer = threading.Timer(0.05, first.end)
    timer.start()

    with budget.take(100, 100):
        assert budget.taken_bytes == 100
    timer.join()


@pytest.mark.parametrize("kind", ["parts", "uploads", "downloads"])
def test_a_failure_of_another_item_ends_the_waiting(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv("HFSHARD_STORE_MEMORY", "32MiB")
    pool = BufferPool()
    target = memoryview(bytearray(9_000_000))
    cases: dict[str, tuple[ByteBudget, Callable[[], object]]] = {
        "parts": (pool, lambda: pool.take_buffer(24 * MIB)),
        "uploads": (xet._UPLOADS, lambda: xet._UPLOADS.take(24 * MIB, 24 * MIB)),
        "downloads": (xet._DOWNLOADS, lambda: XetReader(XetTokens("")).read_into("0" * 64, len(target), 0, target)),
    }
    budget, take = cases[kind]
    is_waiting = threading.Event()
    ended: list[str] = []

    def work(item: str, cancelled: threading.Event) -> None:
        if item == "fails":
            assert is_waiting.wait(60)
            raise ValueError("failed")
        is_waiting.set()
        try:
            take()
        except InterruptedError as error:
            ended.append(str(error))

    with budget.take(24 * MIB, 24 * MIB), pytest.raises(ValueError, match="failed"):
        run_in_threads(work, ["waits", "fails"], 2)
    assert ended == ["another item failed, or Ctrl-C was pressed"]
    assert budget.taken_bytes == 0
