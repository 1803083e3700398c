"""Threads that end early together, in the caller's torch modes; their variables; delayed Ctrl-C and garbage collection.

If no thread can be started, the calling thread does the work: while Python exits, thread pools accept no work (in
`atexit`) and since 3.12 no thread starts, and the system has a limit. So this module has no `ThreadPoolExecutor`.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from types import FrameType
from typing import Any, Final, Generic, TypeVar

_LOOK_SECONDS: Final = 0.2
"""Interval at which a thread that waits checks for Ctrl-C, and for the cancellation of its work."""

_LENDING_SECONDS: Final = 0.05
"""Interval at which a thread that waits for a `LendingLock` checks whether the lock's holder waits for it."""

_of_thread = threading.local()
"""`cancelled`: the event of the `run_in_threads` that this thread works for."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_Value = TypeVar("_Value")


def cancellable(progress_callback: Callable[[int], object] | None, cancelled: threading.Event) -> Callable[[int], None]:
    """Wrap a progress callback so that the work that calls it ends early when `cancelled` is set."""

    def report(count_bytes: int) -> None:
        if cancelled.is_set():
            raise InterruptedError("another file failed, or Ctrl-C was pressed")
        if progress_callback is not None:
            progress_callback(count_bytes)

    return report


def run_in_threads(
    work: Callable[[_Item, threading.Event], _Result],
    items: Iterable[_Item],
    threads: int,
    *,
    cancelled: threading.Event | None = None,
) -> list[_Result]:
    """Process all items, several at once; an error or Ctrl-C sets the event that the others check.

    Args:
        work: Gets an item and the event.
        items: Started in this order.
        threads: The largest number of threads; with one, or one item, the calling thread does everything.
        cancelled: The event; None: a new one.

    Returns:
        The results of the items, in order.

    Raises:
        The first error of any item, after every started item has ended.
    """
    all_items = list(items)
    run = _Run(work, all_items, cancelled or threading.Event())
    count = min(threads, len(all_items))
    under_way: list[Future[None]] = []
    try:
        for _ in range(count if count > 1 else 0):  # Ctrl-C may come in here, too
            started = start_worker(run.do_items_beside, "hfshard-work")
            under_way += [] if started is None else [started]
        if not under_way:
            run.run_items()
        wait_all(under_way)
    except BaseException:
        run.stop()
        raise
    finally:
        wait_all([*under_way, *run.begun])
    for one in under_way:
        one.result()  # raises what came before the first item
    return run.outcome()


def wait_all(futures: Collection[Future[Any]]) -> None:
    """Wait until all have ended, or Ctrl-C comes.

    One long wait would not do: Python's main thread checks for signals and then goes to sleep, and a signal in between
    does not wake it (measured on a busy machine: 2 of 1,065 were lost); nor does one that another thread has received.
    """
    while wait(futures, _LOOK_SECONDS).not_done:
        pass


def result_of(future: Future[_Result]) -> _Result:
    """Wait until it has ended, or Ctrl-C comes (see `wait_all`); return its result, or raise its error."""
    wait_all([future])
    return future.result()


def result_unless_cancelled(future: Future[_Result]) -> _Result:
    """Wait like `result_of`; in a thread of `run_in_threads` only until another item fails, or Ctrl-C comes.

    Raises:
        InterruptedError: Another item failed, or Ctrl-C came.
        Everything that the future raises.
    """
    try:
        while not wait([future], _LOOK_SECONDS).done:
            sleep_unless_cancelled(0)
        return future.result()
    finally:
        del future  # its error's traceback holds this frame


def sleep_unless_cancelled(seconds: float, cancelled: threading.Event | None = None) -> None:
    """Sleep; in a thread of `run_in_threads` only until another item fails, or Ctrl-C comes.

    Args:
        seconds: For how long; with 0, only check.
        cancelled: Another event that ends the sleep.

    Raises:
        InterruptedError: Another item failed, or Ctrl-C came.
    """
    events = list({event for event in (cancelled, current_cancellation()) if event is not None})
    if not events:
        if seconds:
            time.sleep(seconds)
    elif events[0].wait(seconds) if len(events) == 1 else _wait_for_any(events, seconds):
        raise InterruptedError("another item failed, or Ctrl-C was pressed")


def _wait_for_any(events: Sequence[threading.Event], seconds: float) -> bool:
    """Wait until one of the events is set, or the time is over; return whether one is."""
    end = time.monotonic() + seconds
    while not any(event.is_set() for event in events):
        if (left := end - time.monotonic()) <= 0:
            return False
        events[0].wait(min(left, _LOOK_SECONDS))
    return True


def current_cancellation() -> threading.Event | None:
    """Return the event that `run_in_threads` sets to end this thread's item early; None in other threads."""
    return getattr(_of_thread, "cancelled", None)


def start_worker(work: Callable[[], _Result], name: str, *, daemon: bool = False) -> Future[_Result] | None:
    """Start a thread that does some work in the caller's torch modes; return None if no thread can be started.

    Args:
        work: The function to run.
        name: The thread's name.
        daemon: Whether Python may exit before it has ended.
    """
    future: Future[_Result] = Future()
    thread = threading.Thread(target=_work_in, args=(_modes_of_caller(), work, future), name=name, daemon=daemon)
    handled = sys.exc_info()[1]
    try:
        thread.start()
    except RuntimeError as error:
        came = error.__context__
        if isinstance(came, KeyboardInterrupt) and came is not handled:  # in a lock, when the thread had started
            raise came from None
        return None
    return future


def can_use_thread_pools() -> bool:
    """Return whether another library's `ThreadPoolExecutor` would work: it does not while Python exits."""
    try:
        from concurrent.futures import ThreadPoolExecutor  # its first import fails while Python exits

        with ThreadPoolExecutor(1) as pool:
            pool.submit(int)
    except RuntimeError:
        return False
    return True


def _work_in(
    modes: Callable[[], AbstractContextManager[object]], work: Callable[[], _Result], future: Future[_Result]
) -> None:
    try:
        with modes():
            result = work()
    except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
        future.set_exception(error)
        del future  # the error's traceback holds this frame
    else:
        future.set_result(result)


def _modes_of_caller() -> Callable[[], AbstractContextManager[object]]:
    """Capture the caller's torch modes, inference and gradients, for use in another thread: they are per thread.

    A tensor that was created in inference mode can only be filled in inference mode. The default device is per thread
    too, but cannot be queried: all code in the package that creates a tensor passes its device.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return nullcontext
    is_inference, has_gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def enter() -> ExitStack:
        with ExitStack() as stack:  # leaves the first if the second cannot be entered
            stack.enter_context(torch.inference_mode(is_inference))
            stack.enter_context(torch.set_grad_enabled(has_gradients))
            return stack.pop_all()

    return enter


class _Run(Generic[_Item, _Result]):
    """The items of one call, shared by its threads."""

    def __init__(
        self, work: Callable[[_Item, threading.Event], _Result], items: Sequence[_Item], cancelled: threading.Event
    ) -> None:
        self._work, self._cancelled = work, cancelled
        self._left = iter(enumerate(items))
        self._lock = threading.Lock()
        self._results: dict[int, _Result] = {}
        self._error: BaseException | None = None
        self._is_stopped = False
        self.begun: list[Future[None]] = []
        """One for each thread that began, even if its start was interrupted."""

    def run_items(self) -> None:
        """Do one item after another, until none is left, or one has failed."""
        outer = getattr(_of_thread, "cancelled", None)
        _of_thread.cancelled = self._cancelled
        try:
            self._do_items()
        finally:
            _of_thread.cancelled = outer

    def do_items_beside(self) -> None:
        """Do the same in a thread that does not receive Ctrl-C."""
        ended: Future[None] = Future()
        self.begun.append(ended)
        try:
            self.run_items()
        finally:
            ended.set_result(None)

    def _do_items(self) -> None:
        while (numbered := self._next()) is not None:
            number, item = numbered
            try:
                self._results[number] = self._work(item, self._cancelled)
            except BaseException as error:  # noqa: BLE001 - raised by the calling thread
                with self._lock:
                    if self._error is None or (
                        isinstance(self._error, InterruptedError) and not isinstance(error, InterruptedError)
                    ):
                        self._error = error  # the cause, and not what it has cancelled
                self.stop()

    def stop(self) -> None:
        """Begin no more items, and signal the running ones."""
        self._is_stopped = True
        self._cancelled.set()

    def outcome(self) -> list[_Result]:
        """Return the results in the order of the items, or raise the first error."""
        error = self._error
        if error is not None:
            self._error = None  # its traceback holds this object
            try:
                raise error
            finally:
                del error
        return [self._results[number] for number in sorted(self._results)]

    def _next(self) -> tuple[int, _Item] | None:
        with self._lock:
            return None if self._is_stopped else next(self._left, None)


class ForkSafeLock:
    """A re-entrant lock that is new in a forked process, where the thread that held it in the parent does not exist."""

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.RLock()

    def held(self) -> AbstractContextManager[bool]:
        """Hold the lock; after a fork inside the block, each process releases the lock that was acquired.

        This is the lock itself: an exception of Ctrl-C between the steps of a generator would leave it locked.
        """
        return self._lock


class LendingLock:
    """A re-entrant lock that a thread lends to one that it waits for; otherwise they would wait for each other.

    A thread waits for another if it joins it, or waits for the result of a future that the other works for, without a
    timeout. It continues once the other has ended, so what the other does under the lock happens within its own block.
    For other means (events, queues), Python does not record which thread waits for which.

    It is new in a forked process, as a `ForkSafeLock` is.
    """

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._changed = threading.Condition()
        self._holders: list[int] = []
        """Each thread once for each block that it is in; the last one holds the lock, the others wait for it."""

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock; after a fork inside the block, each process releases the lock that was acquired."""
        changed, holders, own = self._changed, self._holders, threading.get_ident()
        with changed:
            while holders and holders[-1] != own and not _is_waiting_for(holders[-1], own):
                changed.wait(_LENDING_SECONDS)
            holders.append(own)
        try:
            yield
        finally:
            if holders is self._holders:  # else this is a forked process, where no other thread has acquired it
                with changed:
                    del holders[len(holders) - 1 - holders[::-1].index(own)]
                    changed.notify_all()


def _is_waiting_for(thread: int, other: int) -> bool:
    """Return whether a thread waits, directly or through others, until another has ended or has a result."""
    frames = sys._current_frames()
    try:
        seen: set[int | None] = set()
        waiting: int | None = thread
        while waiting is not None and waiting not in seen:
            seen.add(waiting)
            waiting = _awaited_thread(waiting, frames)
            if waiting == other:
                return True
        return False
    finally:
        frames.clear()  # it includes this frame: all threads' objects would stay alive until a garbage collection


def _awaited_thread(thread: int, frames: Mapping[int, FrameType]) -> int | None:
    """Find the thread that another one joins, or whose result it waits for."""
    for frame in _stack(frames.get(thread)):
        if frame.f_code not in (threading.Thread.join.__code__, Future.result.__code__):
            continue
        if frame.f_locals.get("timeout") is not None:
            return None
        awaited = frame.f_locals.get("self")
        if isinstance(awaited, threading.Thread):
            return awaited.ident
        return next((worker for worker, top in frames.items() if _works_for(top, awaited)), None)
    return None


def _works_for(top: FrameType, future: Any) -> bool:
    """Return whether a thread runs a method of an object that has the future, such as an executor's work item."""
    for frame in _stack(top):
        if frame.f_code.co_name == "run" and getattr(frame.f_locals.get("self"), "future", None) is future:
            return True
    return False


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


# Garbage collection: paused while many objects are created, none of them in a cycle.


@contextmanager
def pause_gc() -> Iterator[None]:
    """Pause garbage collection in a short block that creates a million objects, none of them in a cycle.

    Scanning them again and again took half of the time for planning or loading 100,000 tensors.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# Ctrl-C: delayed while the steps of a commit run.


@contextmanager
def delay_interrupt() -> Iterator[Callable[[], bool]]:
    """Delay Ctrl-C during a short block that must not end half done; yield a function that tells whether it came."""
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


# Context variables: another value in this thread until a block ends.


@contextmanager
def bound(variable: ContextVar[_Value], value: _Value) -> Iterator[None]:
    """Give a variable a value in this thread until the block ends."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
