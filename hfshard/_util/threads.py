"""Threads that end early together and in the caller's modes of torch; Ctrl-C and garbage collection held back.

Where no thread can be started, the calling thread does the work: Python takes none while it exits (in `atexit`, thread
pools take no work, and since 3.12 no thread starts), and a system has a limit. Hence no `ThreadPoolExecutor` here.
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
from types import FrameType
from typing import Any, Final, Generic, TypeVar

_LOOK_SECONDS: Final = 0.2
"""How often the main thread, while it waits, looks whether Ctrl-C came."""

_LENDING_SECONDS: Final = 0.05
"""How often a thread that waits for a `LendingLock` looks whether its holder waits for it."""

_of_thread = threading.local()
"""`cancelled`: the event of the `in_threads` that this thread works for."""

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
    work: Callable[[_Item, threading.Event], _Result],
    items: Iterable[_Item],
    threads: int,
    *,
    cancelled: threading.Event | None = None,
) -> list[_Result]:
    """Do some work for all items, several at once; an error or Ctrl-C sets the event that the others check.

    Args:
        work: Gets an item and the event.
        items: Begun in this order.
        threads: At most so many; with one, or one item, the calling thread does everything.
        cancelled: The event; None: one of its own.

    Returns:
        What the work returned for each item, in order.

    Raises:
        The first error of any item, when all that was begun has ended.
    """
    all_items = list(items)
    run = _Run(work, all_items, cancelled or threading.Event())
    count = min(threads, len(all_items))
    under_way: list[Future[None]] = []
    try:
        for _ in range(count if count > 1 else 0):  # Ctrl-C may come in here, too
            started = start_thread(run.do_items_beside, "hfshard-work")
            under_way += [] if started is None else [started]
        if not under_way:
            run.do_items()
        wait_for(under_way)
    except BaseException:
        run.stop()
        raise
    finally:
        wait_for([*under_way, *run.begun])
    for one in under_way:
        one.result()  # raises what came before the first item
    return run.outcome()


def wait_for(futures: Collection[Future[Any]]) -> None:
    """Wait until all have ended, or Ctrl-C comes.

    Not by one long wait: Python's main thread looks for signals and then goes to sleep, and one that comes in between
    does not wake it (measured on a busy machine: 2 of 1,065 were lost); nor does one that another thread has taken.
    """
    while wait(futures, _LOOK_SECONDS).not_done:
        pass


def result_of(future: Future[_Result]) -> _Result:
    """Wait until it has ended, or Ctrl-C comes (see `wait_for`); give its result, or raise its error."""
    wait_for([future])
    return future.result()


def pause(seconds: float) -> None:
    """Sleep; in a thread of `in_threads` only until another item fails, or Ctrl-C comes.

    Raises:
        InterruptedError: It did.
    """
    cancelled = cancellation()
    if cancelled is None:
        time.sleep(seconds)
    elif cancelled.wait(seconds):
        raise InterruptedError("another item failed, or Ctrl-C came")


def cancellation() -> threading.Event | None:
    """The event that `in_threads` sets where this thread's item shall end early; None in other threads."""
    return getattr(_of_thread, "cancelled", None)


def start_thread(work: Callable[[], _Result], name: str, *, daemon: bool = False) -> Future[_Result] | None:
    """Start a thread that does some work in the caller's modes of torch; None where no thread can be started.

    Args:
        work: What to do.
        name: The thread's.
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


def pools_take_work() -> bool:
    """Whether a `ThreadPoolExecutor` of another library would work: not while Python exits."""
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
    """What brings another thread into the caller's modes of torch, which belong to a thread: inference and gradients.

    A tensor that was made in inference mode can only be filled in inference mode. The default device belongs to a
    thread, too, but can't be asked for: whoever makes a tensor in the package says on which device.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return nullcontext
    is_inference, has_gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def enter() -> ExitStack:
        with ExitStack() as stack:  # leaves the first where the second can't be entered
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
        """Of each thread that began, also of one whose start was interrupted."""

    def do_items(self) -> None:
        """Do one item after another, until none is left, or one has failed."""
        outer = getattr(_of_thread, "cancelled", None)
        _of_thread.cancelled = self._cancelled
        try:
            self._do_items()
        finally:
            _of_thread.cancelled = outer

    def do_items_beside(self) -> None:
        """The same, in a thread that Ctrl-C does not come to."""
        ended: Future[None] = Future()
        self.begun.append(ended)
        try:
            self.do_items()
        finally:
            ended.set_result(None)

    def _do_items(self) -> None:
        while (numbered := self._next()) is not None:
            number, item = numbered
            try:
                self._results[number] = self._work(item, self._cancelled)
            except BaseException as error:  # noqa: BLE001 - raised by the calling thread
                with self._lock:
                    self._error = self._error or error
                self.stop()

    def stop(self) -> None:
        """Begin no more items, and tell those that are under way."""
        self._is_stopped = True
        self._cancelled.set()

    def outcome(self) -> list[_Result]:
        """The results in the order of the items, or the first error."""
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


class ProcessLock:
    """A re-entrant lock that a forked process has anew: the thread that held it in its parent does not exist there."""

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.RLock()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold it; who forks meanwhile releases, in either process, the lock that was taken."""
        with self._lock:
            yield


class LendingLock:
    """A re-entrant lock that a thread lends to one that it waits for: else they would wait for each other.

    A thread waits for another where it joins it, or waits for the result of a future that the other works for, without
    a timeout: it goes on once the other has ended, so what the other does under the lock is done within its own block.
    Of other means (events, queues) Python does not tell who waits for whom.

    A forked process has it anew, as a `ProcessLock`.
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
        """Hold it; who forks meanwhile releases, in either process, the lock that was taken."""
        changed, holders, own = self._changed, self._holders, threading.get_ident()
        with changed:
            while holders and holders[-1] != own and not _is_waiting_for(holders[-1], own):
                changed.wait(_LENDING_SECONDS)
            holders.append(own)
        try:
            yield
        finally:
            if holders is self._holders:  # else this is a forked process, where nobody else has taken it
                with changed:
                    del holders[len(holders) - 1 - holders[::-1].index(own)]
                    changed.notify_all()


def _is_waiting_for(thread: int, other: int) -> bool:
    """Whether a thread goes on only when another has ended, or has a result; by way of others, too."""
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
        frames.clear()  # it has this frame, too: what all threads hold would stay until a collection of garbage


def _awaited_thread(thread: int, frames: Mapping[int, FrameType]) -> int | None:
    """The thread that another one joins, or whose result it waits for."""
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
    """Whether a thread is in a call of an object that has the future, as the work items of an executor."""
    for frame in _stack(top):
        if frame.f_code.co_name == "run" and getattr(frame.f_locals.get("self"), "future", None) is future:
            return True
    return False


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


# Python's garbage collection, put off while many objects are made that no cycle holds.


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


# Hold Ctrl-C back while the steps of a commit run.


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
