"""The beats by which ranks know that the others live."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Final

from hfshard._util.threads import start_thread
from hfshard.distributed.liveness.store import AnsweringStore
from hfshard.errors import RankFailedError

_BEATS_PER_DEATH: Final = 15
"""A beat a second, where fifteen seconds of silence are death."""
_DEAD_KEY: Final = "hfshard/dead"


class Heart:
    """The beats of this rank: a counter under a key, by a thread, or where none can be started by who looks."""

    def __init__(self, store: AnsweringStore, key: str, death_seconds: float) -> None:
        self.key = key
        self.seconds = death_seconds / _BEATS_PER_DEATH
        self._store = store
        self._is_stopped = threading.Event()
        self._count = 0
        self._thread: Future[None] | None = None

    def start(self) -> None:
        """Beat once, so that the key is there, and go on in a thread."""
        self._beat()
        self._thread = start_thread(self._go_on, "hfshard-beat", daemon=True)

    def stop(self) -> None:
        """Beat no more; a beat that is under way has ended."""
        self._is_stopped.set()
        if self._thread is not None:
            self._thread.result()
            self._thread = None

    def beat_without_thread(self) -> None:
        """Beat, where no thread does."""
        if self._thread is None and not self._is_stopped.is_set():
            self._beat()

    def _go_on(self) -> None:
        try:
            while not self._is_stopped.wait(self.seconds):
                self._beat()
        except RankFailedError:
            # The store is gone: whoever waits asks it, too, and raises.
            return

    def _beat(self) -> None:
        self._count += 1
        self._store.put(self.key, str(self._count).encode())


class LifeSigns:
    """For how long other ranks have not beaten, as far as this one has looked."""

    def __init__(self, store: AnsweringStore, key: str, death_seconds: float) -> None:
        self._store, self._key, self._death_seconds = store, key, death_seconds
        self._seen: dict[int, tuple[bytes | None, float, float]] = {}

    def look(self, ranks: Iterable[int]) -> dict[int, float]:
        """Look at ranks' beats; gives for how many seconds each has been silent.

        Time for which this process did not look counts little: it may have been stopped itself.
        """
        numbers = list(ranks)
        now = time.monotonic()
        for rank, beat in zip(numbers, self._store.get_many(f"{self._key}/{rank}" for rank in numbers), strict=True):
            last, silent, looked_at = self._seen.get(rank, (beat, 0.0, now))
            silent = silent + min(now - looked_at, self._death_seconds / 5) if beat == last else 0.0
            self._seen[rank] = beat, silent, now
        return {rank: self._seen[rank][1] for rank in numbers}


def dead_key(rank: int) -> str:
    """The key that is there where somebody took a rank for dead, which has joined nothing since."""
    return f"{_DEAD_KEY}/{rank}"
