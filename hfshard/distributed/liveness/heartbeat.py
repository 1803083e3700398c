"""The beats by which ranks know that the others live."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from typing import Final

from hfshard._util.threads import start_thread
from hfshard.distributed.liveness.process_record import has_ended, own_record, runs_here
from hfshard.distributed.liveness.store import DEATH_SECONDS, AnsweringStore, open_group_store
from hfshard.errors import RankFailedError

_BEATS_PER_DEATH: Final = 15
"""A beat a second, where fifteen seconds of silence are death."""
_DEAD_KEY: Final = "hfshard/dead"
_WAY_KEY: Final = "hfshard/way"
_PROCESS_KEY: Final = "hfshard/process"


class Heart:
    """The beats of this rank: a counter under a key, by a thread, or where none can be started by who looks.

    Each tells the process, too, so that others of this machine see at once that it has ended.
    """

    def __init__(self, store: AnsweringStore, key: str, death_seconds: float) -> None:
        self.key = key
        self.seconds = death_seconds / _BEATS_PER_DEATH
        self._store = store
        self._is_stopped = threading.Event()
        self._count = 0
        self._process = own_record()
        self._beaten_at = time.monotonic()
        self._longest_silence = 0.0
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

    def silent_seconds(self) -> float:
        """The longest time without a beat since the last call of this: the process may have been stopped."""
        longest = max(self._longest_silence, time.monotonic() - self._beaten_at)
        self._longest_silence = 0.0
        return longest

    def _beat(self) -> None:
        self._longest_silence = max(self._longest_silence, time.monotonic() - self._beaten_at)
        self._beaten_at = time.monotonic()
        self._count += 1
        self._store.put(self.key, b"%d %b" % (self._count, self._process))


class LifeSigns:
    """For how long other ranks have not beaten, as far as this one has looked."""

    def __init__(self, store: AnsweringStore, key: str, death_seconds: float) -> None:
        self._store, self._key, self._death_seconds = store, key, death_seconds
        self._seen: dict[int, tuple[bytes | None, float, float]] = {}

    def look(self, ranks: Iterable[int]) -> dict[int, float]:
        """Look at ranks' beats; gives for how many seconds each has been silent, infinity for a process that has ended.

        Time for which this process did not look counts little: it may have been stopped itself.
        """
        numbers = list(ranks)
        now = time.monotonic()
        for rank, beat in zip(numbers, self._store.get_many(f"{self._key}/{rank}" for rank in numbers), strict=True):
            last, silent, looked_at = self._seen.get(rank, (beat, 0.0, now))
            silent = silent + min(now - looked_at, self._death_seconds / 5) if beat == last else 0.0
            self._seen[rank] = beat, math.inf if beat == last and has_ended(_process(beat)) else silent, now
        return {rank: self._seen[rank][1] for rank in numbers}

    def has_heard(self, rank: int) -> bool:
        """Whether there was a beat of a rank at the last look."""
        return self._seen[rank][0] is not None

    def runs_here(self, rank: int) -> bool:
        """Whether the process that beat for a rank at the last look is one of this machine, and has not ended."""
        return runs_here(_process(self._seen[rank][0]))


def _process(beat: bytes | None) -> bytes:
    """The record of who beat."""
    return (beat or b"").partition(b" ")[2]


@contextmanager
def on_the_way(rank: int, death_seconds: float = DEATH_SECONDS) -> Iterator[None]:
    """Give signs of life while the block prepares for a call of several ranks, who wait for this one meanwhile.

    Afterwards the rank comes to them, and deletes the key; where the block raises, it does not come.
    """
    with closing(open_group_store(death_seconds)) as store:
        heart = Heart(store, way_key(rank), death_seconds)
        heart.start()
        try:
            yield
        except BaseException:
            heart.stop()
            with suppress(RankFailedError):  # the store is gone, and the block's error says more
                store.delete([heart.key])
            raise
        finally:
            heart.stop()


class WaySigns:
    """Which ranks have died on their way, as far as this one has looked, or between two calls on this machine."""

    def __init__(self, store: AnsweringStore, death_seconds: float) -> None:
        self._life = LifeSigns(store, _WAY_KEY, death_seconds)
        self._pause_seconds = death_seconds / _BEATS_PER_DEATH
        self._death_seconds = death_seconds
        self._store = store
        self._looked_at = -math.inf

    def look(self, ranks: Iterable[int]) -> None:
        """Look at those that are waited for, where the last time was a while ago; who is dead gets its `dead_key`."""
        if time.monotonic() - self._looked_at < self._pause_seconds:
            return
        self._looked_at = time.monotonic()
        silent = self._life.look(ranks)
        records = self._store.get_many(map(process_key, silent))
        for (rank, silent_seconds), record in zip(silent.items(), records, strict=True):
            is_silent = silent_seconds > self._death_seconds and self._life.has_heard(rank)
            if is_silent or has_ended(record):
                self._store.put(dead_key(rank), b"")


def process_key(rank: int) -> str:
    """The key of the process that a rank was when it came to others."""
    return f"{_PROCESS_KEY}/{rank}"


def way_key(rank: int) -> str:
    """The key of the beats of a rank that is on its way."""
    return f"{_WAY_KEY}/{rank}"


def dead_key(rank: int) -> str:
    """The key that is there where somebody took a rank for dead, which has joined nothing since."""
    return f"{_DEAD_KEY}/{rank}"
