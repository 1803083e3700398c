"""Which thread's turn it is, and what a thread keeps as it is meanwhile; a forked process knows nothing of either."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from hfshard.errors import HfshardError

_all: Final[weakref.WeakSet[Turns | StepsInUse]] = weakref.WeakSet()


class Turns:
    """The turns of the threads that use one object."""

    def __init__(self) -> None:
        self._changing = ""
        self.renew()
        _all.add(self)

    @contextmanager
    def taken(self, changing: str = "") -> Iterator[None]:
        """Wait until no other thread has the turn, and keep it. A thread that has it already may take it again.

        Args:
            changing: What the block does, where it must not be done within another such block of the same thread, as a
                signal handler may try; empty: it only looks.

        Raises:
            HfshardError: This thread is in the middle of another change.
        """
        with self._lock:
            before = self._changing
            if changing and before:
                raise HfshardError(
                    f"{changing} was called in the middle of {before}, in the same thread: by a signal handler, a hook "
                    "or a state_dict. Set a flag there, and look at it in the training loop."
                )
            self._changing = changing or before
            try:
                yield
            finally:
                self._changing = before

    def renew(self) -> None:
        """Forget whose turn it is."""
        self._lock = threading.RLock()
        self._changing = ""


class StepsInUse:
    """Steps whose checkpoints must stay where they are, and the threads that read them."""

    def __init__(self) -> None:
        self._used: list[tuple[int, int]] = []
        self.renew()
        _all.add(self)

    @property
    def steps(self) -> set[int]:
        """All of them."""
        with self._changed:
            return {step for step, _ in self._used}

    @contextmanager
    def used(self, steps: Iterable[int]) -> Iterator[None]:
        """Use the checkpoints of some steps while the block runs."""
        mine = [(step, threading.get_ident()) for step in steps]
        with self._changed:
            self._used += mine
        try:
            yield
        finally:
            with self._changed:
                for one in mine:
                    self._used.remove(one)
                self._changed.notify_all()

    def wait_for(self, step: int) -> None:
        """Wait until no other thread uses the checkpoint of a step."""
        me = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: all(used != step or thread == me for used, thread in self._used))

    def renew(self) -> None:
        """Forget what is used."""
        self._changed = threading.Condition()
        self._used = []


def _renew_in_child() -> None:
    for one in list(_all):
        one.renew()


os.register_at_fork(after_in_child=_renew_in_child)
