"""One piece of work at a time in a thread, a mutex for threads, and host copies of what is being written."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - its exit hook must be registered before this module's: the last one is called first
import ctypes
import logging
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import torch

from hfshard._util.threads import ForkSafeLock, run_in_threads, start_worker, wait_all
from hfshard.errors import HfshardError
from hfshard.tensors.stored_tensor import TensorLike, is_torch_tensor_type
from hfshard.training.state.collect_state import SavePayload

logger = logging.getLogger(__name__)

_all: Final[weakref.WeakSet[ForkSafe]] = weakref.WeakSet()
_listing: Final = ForkSafeLock()
"""Locked briefly while an object or a thread is noted: any thread may start, wait or end the process."""


class ForkSafe:
    """An object that knows threads of its process, and forgets them in a forked one, where they do not exist."""

    def __init__(self) -> None:
        self.forget()
        with _listing.held():
            _all.add(self)

    def forget(self) -> None:
        """Become as new."""
        raise NotImplementedError


class Background(ForkSafe):
    """Runs one piece of work in a thread in parallel with the caller.

    It waits for a future, not for the thread: after Ctrl-C in `Thread.join`, Python 3.11 considers the thread ended.
    """

    def forget(self) -> None:
        """Forget the work."""
        self._work: Future[None] | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], object], what: str) -> None:
        """Start some work, or do it here if no thread can be started; nothing else may be running."""

        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - kept, and raised where the caller looks for it
                logger.error("%s failed: %s", what, error)
                self._error = error

        with _listing.held():
            self._work = start_worker(run, "hfshard-save")
            if self._work is not None:
                return
        run()

    @property
    def is_running(self) -> bool:
        """True while the work is running."""
        under_way = self._work
        return under_way is not None and not under_way.done()

    def join(self) -> None:
        """Wait until the work is done; its error is left to `wait`."""
        under_way = self._work
        if under_way is not None:
            wait_all([under_way])

    def wait(self) -> None:
        """Wait until the work is done, and raise its error, once: in one of the threads that wait."""
        under_way = self._work
        if under_way is not None:
            wait_all([under_way])
        with _listing.held():
            if self._work is under_way:
                self._work = None
            error = self._error
            self._error = None
        if error is not None:
            raise error


def _under_way() -> list[Future[None]]:
    with _listing.held():
        works = [one._work for one in _all if isinstance(one, Background)]
    return [work for work in works if work is not None and not work.done()]


def _wait_for_all() -> None:
    while under_way := _under_way():
        wait_all(under_way)  # check again: a save may have started a push


def _forget_in_child() -> None:
    for one in list(_all):
        one.forget()


# At exit, Python first forbids new work in thread pools, which a push to the Hub needs, and only then waits for
# threads. No public hook runs before that; `test_exit_waits_for_a_save_in_flight` fails if this one is gone.
_before_pools_close = threading._register_atexit  # type: ignore[attr-defined]
_before_pools_close(_wait_for_all)
os.register_at_fork(after_in_child=_forget_in_child)


# Turns of threads, and checkpoints that stay while a thread reads them.


class ReentrantLocks(ForkSafe):
    """A mutex for the threads that use one object."""

    def forget(self) -> None:
        """Forget which thread has the mutex."""
        self._lock = threading.RLock()
        self._changing = ""

    @contextmanager
    def taken(self, changing: str = "") -> Iterator[None]:
        """Wait until no other thread has the mutex, and keep it. A thread that has it already may take it again.

        Args:
            changing: The change that the block makes, if it must not run within another such block of the same thread,
                as a signal handler may try; empty: the block only reads.

        Raises:
            HfshardError: This thread is in the middle of another change.
        """
        with self._lock:
            before = self._changing
            if changing and before:
                raise HfshardError(
                    f"{changing} was called in the middle of {before}, in the same thread: by a signal handler, a hook "
                    "or a state_dict. Set a flag there, and check it in the training loop."
                )
            self._changing = changing or before
            try:
                yield
            finally:
                self._changing = before


class PinnedSteps(ForkSafe):
    """Steps whose checkpoints must stay where they are, and the threads that read them."""

    def forget(self) -> None:
        """Forget all uses."""
        self._changed = threading.Condition()
        self._used: list[tuple[int, int]] = []

    @property
    def steps(self) -> set[int]:
        """All steps in use."""
        with self._changed:
            return {step for step, _ in self._used}

    @contextmanager
    def used(self, steps: Iterable[int]) -> Iterator[None]:
        """Use the checkpoints of some steps while the block runs."""
        uses = [(step, threading.get_ident()) for step in steps]
        with self._changed:
            self._used += uses
        try:
            yield
        finally:
            with self._changed:
                for one in uses:
                    self._used.remove(one)
                self._changed.notify_all()

    def wait_for(self, step: int) -> None:
        """Wait until no other thread uses the checkpoint of a step."""
        me = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: all(used != step or thread == me for used, thread in self._used))


# Host copies: a state's tensors in reused host memory, so that training continues while they are written.


_THREADS: Final = 4
"""The most copies at a time: two saturate a desktop's memory; new pages, which the kernel clears, need more."""


class HostBuffers:
    """Buffers as large as the state, allocated at the first save and filled at each one."""

    def __init__(self) -> None:
        self._buffers: dict[Hashable, torch.Tensor] = {}

    def copy_of(self, payload: SavePayload) -> SavePayload:
        """Return the payload with copies of all tensors; earlier copies are overwritten."""
        tensors: dict[Hashable, torch.Tensor] = {
            (base, name): tensor
            for base, request in payload.requests.items()
            for name, tensor in request.tensors.items()
            if isinstance(tensor, torch.Tensor)
        }
        copies = self.copies_of(tensors)
        requests = {}
        for base, request in payload.requests.items():
            copied: dict[str, TensorLike] = {
                name: copies.get((base, name), tensor) for name, tensor in request.tensors.items()
            }
            requests[base] = replace(request, tensors=copied)
        return replace(payload, requests=requests)

    def copies_of(self, tensors: Mapping[Hashable, torch.Tensor]) -> dict[Hashable, torch.Tensor]:
        """Copy tensors; earlier copies are overwritten.

        Buffers of tensors that are no longer part of the state are freed. Tensors of an accelerator are copied into
        page-locked memory, several at once.
        """
        with (
            torch.inference_mode(False),
            torch.no_grad(),
        ):  # buffers that are allocated in inference mode are used outside of it, too
            self._fill(tensors)
        return dict(self._buffers)

    def _fill(self, tensors: Mapping[Hashable, torch.Tensor]) -> None:
        old = {key: buffer for key, buffer in self._buffers.items() if key in tensors}
        self._buffers = {}  # free unused ones first: the copies must not come on top of them
        self._buffers = {key: _buffer_for(tensor, old.pop(key, None)) for key, tensor in tensors.items()}
        devices = {tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"}
        for device in devices:  # work that was started on any stream
            torch.accelerator.synchronize(device)
        pairs = [(self._buffers[key], tensor) for key, tensor in tensors.items()]
        run_in_threads(lambda pair, _: _copy(*pair), pairs, min(_THREADS, os.cpu_count() or 1))
        for device in devices:
            torch.accelerator.synchronize(device)


def _buffer_for(tensor: torch.Tensor, old: torch.Tensor | None) -> torch.Tensor:
    if old is not None and old.shape == tensor.shape and old.dtype == tensor.dtype:
        return old
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.device.type != "cpu")


def _copy(buffer: torch.Tensor, tensor: torch.Tensor) -> None:
    is_plain = is_torch_tensor_type(tensor) and tensor.device.type == "cpu" and tensor.is_contiguous()
    is_plain = is_plain and not (tensor.is_conj() or tensor.is_neg())
    if is_plain:  # plain bytes, past the caches: torch's own copy takes 1.5 times as long
        ctypes.memmove(buffer.data_ptr(), tensor.data_ptr(), tensor.nbytes)
        return
    with torch.no_grad():
        buffer.copy_(tensor, non_blocking=True)
