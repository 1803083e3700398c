"""Work in several threads."""

from __future__ import annotations

import _thread
import gc
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from functools import partial
from types import FrameType

import pytest
import torch

from hfshard._util.threads import (
    ForkSafeLock,
    LendingLock,
    bound,
    result_unless_cancelled,
    run_in_threads,
    sleep_unless_cancelled,
    start_worker,
)
from hfshard.errors import HubConnectionError


def test_error_in_one_thread_stops_the_others() -> None:
    started, stopped = threading.Barrier(2), threading.Event()

    def work(item: int, stop: threading.Event) -> int:
        started.wait(60)
        if item == 0:
            raise HubConnectionError("no")
        if stop.wait(60):
            stopped.set()
        return item

    with pytest.raises(HubConnectionError):
        run_in_threads(work, [0, 1], 2)
    assert stopped.is_set()


@pytest.mark.parametrize(
    "pause",
    [
        lambda: sleep_unless_cancelled(600),
        lambda: sleep_unless_cancelled(600, threading.Event()),
        lambda: result_unless_cancelled(Future[None]()),
    ],
    ids=["sleeps", "sleeps, with an event of its own", "waits for a result"],
)
def test_a_thread_that_pauses_ends_with_the_others(pause: Callable[[], None]) -> None:
    has_begun = threading.Event()

    def work(item: int, stop: threading.Event) -> None:
        if item == 0:
            has_begun.set()
            pause()
        assert has_begun.wait(60)
        raise HubConnectionError("no")

    with pytest.raises(HubConnectionError):
        run_in_threads(work, [0, 1], 2)


def test_a_pause_elsewhere_ends_in_its_time_or_by_its_own_event() -> None:
    own = threading.Event()
    own.set()

    sleep_unless_cancelled(0)
    with pytest.raises(InterruptedError):
        sleep_unless_cancelled(600, own)


def test_the_cause_is_raised_and_not_what_it_has_cancelled() -> None:
    has_begun = threading.Event()

    def work(item: int, stop: threading.Event) -> None:
        if item == 0:
            assert has_begun.wait(60)
            raise InterruptedError("another item failed")
        has_begun.set()
        assert stop.wait(60)
        raise HubConnectionError("no")

    with pytest.raises(HubConnectionError):
        run_in_threads(work, [0, 1], 2)


def test_a_result_or_error_that_is_waited_for_holds_no_memory_afterwards() -> None:
    class Block:
        """What a failed request would have filled."""

    def fail(block: Block) -> None:
        raise HubConnectionError("no")

    block = Block()
    freed = weakref.ref(block)
    gc.disable()
    try:
        with pytest.raises(HubConnectionError):
            wait_for_worker(partial(fail, block))
        del block
        assert freed() is None
    finally:
        gc.enable()
    assert wait_for_worker(lambda: 5) == 5


def wait_for_worker(work: Callable[[], int | None]) -> int | None:
    """What a worker's function gives."""
    worker = start_worker(work, "name")
    assert worker is not None
    try:
        return result_unless_cancelled(worker)
    finally:
        del worker


def test_first_error_in_time_is_raised_and_nothing_more_is_begun() -> None:
    begun: list[int] = []

    def work(item: int, stop: threading.Event) -> None:
        begun.append(item)
        if item == 1:
            raise HubConnectionError("first")
        stop.wait(60)
        raise InterruptedError("told to stop")

    with pytest.raises(HubConnectionError, match="first"):
        run_in_threads(work, range(5), 2)
    assert sorted(begun) == [0, 1]


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no thread be started."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)


@pytest.mark.usefixtures("no_threads")
def test_calling_thread_works_where_no_thread_can_be_started() -> None:
    assert start_worker(list, "name") is None
    assert run_in_threads(lambda item, _: (item, threading.current_thread()), [3, 1, 2], 2) == [
        (item, threading.main_thread()) for item in (3, 1, 2)
    ]


def test_error_before_the_first_item_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: bool) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch, "set_grad_enabled", refuse)

    with torch.inference_mode():
        with pytest.raises(RuntimeError, match="out of memory"):
            run_in_threads(lambda item, _: item, range(4), 2)
        gc.collect()
        # What torch keeps of a mode resets that of the thread in which it is collected.
        assert torch.is_inference_mode_enabled()


@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize("has_gradients", [False, True])
def test_threads_work_in_the_modes_of_their_caller(is_inference: bool, has_gradients: bool) -> None:
    with torch.inference_mode(is_inference), torch.set_grad_enabled(has_gradients):
        found = run_in_threads(lambda _, __: (torch.is_inference_mode_enabled(), torch.is_grad_enabled()), range(4), 2)

    assert found == [(is_inference, has_gradients)] * 4


@pytest.mark.parametrize("is_waiting", [False, True])
def test_ctrl_c_stops_threads_that_were_started(is_waiting: bool) -> None:
    """While the main thread starts others, mostly; and while it waits for them, without being woken by the signal."""
    has_begun = threading.Barrier(8)

    def work(number: int, cancelled: threading.Event) -> None:
        if is_waiting:
            has_begun.wait(60)
        if number == 0:
            time.sleep(0.5 if is_waiting else 0)
            _thread.interrupt_main()
        was_told.append(cancelled.wait(60))

    was_told: list[bool] = []
    for _ in range(1 if is_waiting else 20):
        with pytest.raises(KeyboardInterrupt):
            run_in_threads(work, range(8), 8)
    assert all(was_told)
    for one in threading.enumerate():
        if one.name == "hfshard-work":
            one.join(60)
    assert "hfshard-work" not in {one.name for one in threading.enumerate()}


def test_ctrl_c_in_the_lock_of_a_thread_that_starts_is_ctrl_c() -> None:
    """The lock is not taken again, and Python says so by a RuntimeError when it is to be released."""

    def interrupt(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == "_acquire_restore":
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)

    begun = threading.Event()
    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            for _ in range(1000):  # until this thread has to wait for one that starts
                start_worker(begun.set, "hfshard-work")
    finally:
        sys.setprofile(None)
    assert begun.wait(60)


def test_ctrl_c_as_a_thread_is_started_waits_for_what_that_thread_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    has_begun, done = threading.Event(), []
    start = threading.Thread.start

    def interrupt(thread: threading.Thread) -> None:
        start(thread)
        assert has_begun.wait(60)
        raise KeyboardInterrupt

    def work(_: int, cancelled: threading.Event) -> None:
        has_begun.set()
        assert cancelled.wait(60)
        time.sleep(0.1)
        done.append(1)

    monkeypatch.setattr(threading.Thread, "start", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_in_threads(work, range(2), 2)
    assert done == [1]


@pytest.mark.usefixtures("no_threads")
def test_no_thread_while_ctrl_c_is_handled_is_no_second_ctrl_c() -> None:
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert start_worker(list, "name") is None


def test_a_lock_is_lent_to_a_thread_that_its_holder_joins_and_to_no_other() -> None:
    lock = LendingLock()
    order: list[str] = []

    def work(name: str) -> None:
        with lock.held():
            order.append(name)

    joined, other = (threading.Thread(target=work, args=(name,)) for name in ("joined", "other"))
    with lock.held(), lock.held():
        other.start()
        joined.start()
        joined.join()
        order.append("holder")
    other.join(60)

    assert order == ["joined", "holder", "other"]


def test_who_waits_for_a_lock_keeps_nothing_of_other_threads() -> None:
    """What their functions hold goes when these return, and not when garbage is collected."""
    lock = LendingLock()
    held: list[weakref.ref[set[int]]] = []
    has_lock = threading.Event()

    def hold() -> None:
        local = {1}
        held.append(weakref.ref(local))
        with lock.held():
            has_lock.set()
            time.sleep(0.3)

    gc.collect()
    gc.disable()
    try:
        holder = threading.Thread(target=hold)
        holder.start()
        has_lock.wait(60)
        with lock.held():
            pass
        holder.join(60)
        assert held[0]() is None
    finally:
        gc.enable()


def test_the_value_before_is_back_after_the_block_and_after_an_error() -> None:
    variable: ContextVar[str | None] = ContextVar("variable", default=None)

    with bound(variable, "outer"):
        with pytest.raises(KeyError), bound(variable, "inner"):
            assert variable.get() == "inner"
            raise KeyError
        assert variable.get() == "outer"

    assert variable.get() is None


def test_an_interrupt_leaves_no_lock_behind() -> None:
    # Wherever it comes: a block that a generator opens stays locked if Ctrl-C comes between two of its steps.
    lock = ForkSafeLock()
    free: list[bool] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def try_it() -> None:
        with lock.held():
            free.append(True)

    old = signal.signal(signal.SIGALRM, interrupt)
    try:
        for at in range(400):
            try:
                signal.setitimer(signal.ITIMER_REAL, (20 + at % 100) * 1e-6)
                while True:
                    with lock.held():
                        pass
            except KeyboardInterrupt:  # while it is handled, its traceback keeps the frames
                other = threading.Thread(target=try_it, daemon=True)
                other.start()
                other.join(60)
                assert len(free) == at + 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
