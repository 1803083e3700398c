"""Waits between attempts: how long, how often, and what ends them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from hfshard._util.threads import run_in_threads
from hfshard.stores.connection import Failure, RequestRetry
from hfshard.stores.hub_calls import hub_retry
from hfshard.stores.retry import Retry, retry_after


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits, which take no time."""
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    return waits


def test_each_wait_is_twice_the_one_before_until_the_longest(waits: list[float]) -> None:
    retry = Retry(attempts=6, first_seconds=0.5, longest_seconds=3.0)

    assert [retry.wait() for _ in range(7)] == [True] * 5 + [False] * 2
    assert waits == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert retry.failures == 5


def test_progress_starts_over(waits: list[float]) -> None:
    retry = Retry(attempts=3, first_seconds=1.0)
    assert [retry.wait(), retry.wait(), retry.wait()] == [True, True, False]

    retry.reset()

    assert [retry.wait(), retry.wait(), retry.wait()] == [True, True, False]
    assert waits == [1.0, 2.0, 1.0, 2.0]


def test_a_server_can_ask_for_a_longer_wait_but_not_for_none(waits: list[float]) -> None:
    retry = Retry(first_seconds=1.0)

    assert retry.wait(retry_after=30.0) and retry.wait(retry_after=0.0) and retry.wait(retry_after=None)
    assert waits == [30.0, 2.0, 4.0]


def test_a_wait_that_exceeds_the_budget_does_not_begin(waits: list[float]) -> None:
    retry = Retry(first_seconds=30.0)

    assert retry.wait(budget_seconds=60.0)
    assert not retry.wait(budget_seconds=60.0)
    assert not retry.wait(first_seconds=1.0, retry_after=90.0, budget_seconds=60.0)
    assert retry.wait(first_seconds=1.0, budget_seconds=60.0)
    assert waits == [30.0, 2.0]


def test_waits_stay_numbers_after_hours_of_failures(waits: list[float]) -> None:
    retry = Retry(first_seconds=0.2, longest_seconds=15.0)

    assert all(retry.wait() for _ in range(2000))
    assert waits[-1] == 15.0


def test_jitter_leaves_the_random_numbers_of_a_training_alone(waits: list[float]) -> None:
    before = random.getstate()

    assert Retry(first_seconds=1.0, jitter=0.2).wait() and RequestRetry().wait_after(Failure(status=503))

    assert random.getstate() == before
    assert all(1.0 <= seconds <= 1.2 for seconds in waits)


@pytest.mark.parametrize("kind", ["service", "hub", "event"])
def test_a_failure_of_another_item_ends_a_wait(kind: str) -> None:
    event = threading.Event()
    retries: dict[str, Callable[[], bool]] = {
        "service": lambda: RequestRetry().wait_after(Failure(status=503)),
        "hub": lambda: hub_retry().wait(retry_after=600.0),
        "event": lambda: hub_retry(cancelled=event).wait(retry_after=600.0),
    }
    is_waiting = threading.Event()

    def work(item: str, cancelled: threading.Event) -> str:
        if item == "fails":
            assert is_waiting.wait(60)
            event.set()
            raise ValueError("failed")
        try:
            is_waiting.set()
            while retries[kind]():
                pass
        except InterruptedError as error:
            ended.append(str(error))
        return item

    ended: list[str] = []
    with pytest.raises(ValueError, match="failed"):
        run_in_threads(work, ["waits", "fails"], 2)
    assert ended == ["another item failed, or Ctrl-C was pressed"]


def test_a_store_is_retried_sooner_after_a_lost_connection_and_never_after_a_refusal(
    waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HFSHARD_STORE_RETRY_SECONDS", "120")
    retry = RequestRetry()

    assert retry.wait_after(Failure(status=503)) and retry.wait_after(Failure(transport="Timeout"))
    assert not retry.wait_after(Failure(status=403)) and not retry.wait_after(Failure(missing=True))
    assert 1.0 <= waits[0] <= 1.2 and 0.4 <= waits[1] <= 0.48
    for _ in range(6):
        retry.wait_after(Failure(status=503))
    assert all(15.0 <= seconds <= 18.0 for seconds in waits[-2:])
    assert not retry.wait_after(Failure(transport="Connect"))  # it may wait for 15 s at most
    assert RequestRetry(lambda failure: True).wait_after(Failure(wrong_region=True)) and len(waits) == 8


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("7", 7.0),
        ("0.5", 0.5),
        ("-3", 0.0),
        ("86400", 600.0),
        ("Fri, 31 Dec 1999 23:59:59 GMT", 0.0),
        ("Fri, 31 Dec 9998 23:59:59 GMT", 600.0),
        ("soon", None),
        ("nan", None),
        ("Fri, 31 Dec 99999999999999999999 00:00:00 GMT", None),
        ("", None),
        (None, None),
    ],
)
def test_a_server_may_ask_for_ten_minutes_at_most(value: str | None, expected: float | None) -> None:
    headers = {} if value is None else {"Retry-After": value}

    assert retry_after(SimpleNamespace(headers=headers)) == expected
