"""Looks whether other ranks of an operation have failed, or give no sign of life."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

from hfshard.distributed.liveness.heartbeat import Heart, LifeSigns, dead_key
from hfshard.distributed.liveness.messages import death_error, is_final, told_error
from hfshard.distributed.liveness.store import AnsweringStore
from hfshard.errors import RankFailedError

_LOOK_SECONDS: Final = 0.3
"""Between two looks whether somebody failed."""
_BEATS_OF_A_SUSPECT: Final = 3
"""A rank that misses so many beats after a collective failed is the one that broke it."""
_SUSPICION_PAUSE_SECONDS: Final = 0.05


class Watch:
    """What one rank of an operation knows of the others: what they told of failures, and who is silent.

    Args:
        store: Open.
        tag: Begins the keys of the operation.
        rank: This one, which does not watch itself.
        heart: Its own; it beats with each look where no thread can.
        death_seconds: A rank without a beat for so long is taken for dead.

    Attributes:
        has_final_word: Whether the failure that it raised settles the outcome: the leader told it when it gave up, or
            was not awaited.
    """

    def __init__(self, store: AnsweringStore, tag: str, rank: int, heart: Heart, death_seconds: float) -> None:
        self._store, self._rank, self._heart, self._death_seconds = store, rank, heart, death_seconds
        self._failed_key = failed_key(tag)
        self._life = LifeSigns(store, beat_key(tag), death_seconds)
        self._looked_at = time.monotonic()
        self._watched_at = self._looked_at
        self._told_at = 0.0
        self.has_final_word = False

    def look(self, ranks: Collection[int], *, awaits_leader: bool = False) -> None:
        """Raise for a failure or a death, where the last look was a while ago; arguments as for `check`."""
        now = time.monotonic()
        if now - self._looked_at > _LOOK_SECONDS:
            self._check_told(awaits_leader=awaits_leader)
        if now - self._watched_at > self._heart.seconds:
            self._check_life(ranks, self._death_seconds, awaits_leader=awaits_leader)

    def check(self, ranks: Collection[int]) -> None:
        """Raise if a rank has told that it failed, or one of these gives no sign of life.

        Raises:
            RankFailedError: It names the rank.
        """
        self._check_told(awaits_leader=False)
        self._check_life(ranks, self._death_seconds)

    def is_anyone_alive(self, ranks: Iterable[int]) -> bool:
        """Whether one of some ranks gives signs of life."""
        return any(silent_seconds <= self._death_seconds for silent_seconds in self._life.look(ranks).values())

    def trust_again(self, ranks: Collection[int]) -> None:
        """Where this process was stopped, wait until each rank has beaten again: some may have given up meanwhile.

        Raises:
            RankFailedError: One has.
        """
        if self._heart.silent_seconds() < self._death_seconds / 2:
            return
        left = [rank for rank in ranks if rank != self._rank]
        self._life.look(left)  # what was beaten meanwhile does not count
        while left:
            time.sleep(_SUSPICION_PAUSE_SECONDS)
            self._check_told(awaits_leader=False)
            left = [rank for rank, seconds in self._check_life(left, self._death_seconds).items() if seconds]

    def await_collective(
        self, work: Any, ranks: Collection[int], watched: Collection[int], patience_seconds: float
    ) -> None:
        """Wait for a collective, and look meanwhile whether a rank failed.

        Args:
            work: The `torch.distributed.Work` of a call with `async_op=True`, for tensors of the CPU.
            ranks: Who takes part.
            watched: Whose signs of life are looked for.
            patience_seconds: How long to wait, where all of them live.

        Raises:
            RankFailedError: A rank failed or died, or the collective did.
        """
        end = time.monotonic() + patience_seconds
        while not _ends_within(work, _LOOK_SECONDS):
            self.look(watched)
            if time.monotonic() > end:
                raise RankFailedError(
                    f"A collective among ranks {_listed(ranks)} has not ended within {patience_seconds:g} s, though "
                    "all of them live. Look what each of them does, and start the job again."
                )
        try:
            work.wait()
        except RuntimeError as error:
            raise self.who_broke_it(error, ranks) from error

    def who_broke_it(self, error: RuntimeError, ranks: Collection[int]) -> RankFailedError:
        """The rank that let a collective fail: one that says so, or one that falls silent.

        One whose process runs on this machine is waited for as long as a death takes: it may only be held up.
        """
        suspicion_seconds = self._heart.seconds * _BEATS_OF_A_SUSPECT
        end = time.monotonic() + suspicion_seconds + 2 * self._heart.seconds
        longest_silence = 0.0
        try:
            while time.monotonic() < end or longest_silence > suspicion_seconds:
                self._check_told(awaits_leader=False)
                longest_silence = max(self._check_life(ranks, suspicion_seconds).values(), default=0.0)
                time.sleep(_SUSPICION_PAUSE_SECONDS)
        except RankFailedError as told:
            return told
        return RankFailedError(
            f"A collective among ranks {_listed(ranks)} failed, though all of them live: {error}. Look at the network "
            "between them, and start the job again."
        )

    def _check_told(self, *, awaits_leader: bool) -> None:
        """Raise what a rank told; who awaits the leader waits for its last word, which may be that all is done."""
        self._looked_at = time.monotonic()
        self._heart.beat_without_thread()
        told = self._store.get(self._failed_key)
        if told is None:
            return
        if awaits_leader and not is_final(told):
            self._told_at = self._told_at or self._looked_at
            if self._looked_at - self._told_at < self._death_seconds:
                return
        self.has_final_word = is_final(told) or not awaits_leader
        raise told_error(told)

    def _check_life(
        self, ranks: Collection[int], most_seconds: float, *, awaits_leader: bool = False
    ) -> dict[int, float]:
        """Raise for a death; gives for how many seconds each of the ranks has been silent.

        One of this machine that did not end has so many seconds as a death takes.
        """
        self._watched_at = time.monotonic()
        silent = self._life.look([rank for rank in ranks if rank != self._rank])
        for rank, silent_seconds in silent.items():
            if silent_seconds <= most_seconds:
                continue
            if silent_seconds <= self._death_seconds and self._life.runs_here(rank):
                continue
            self._store.put(dead_key(rank), b"")
            self._check_last_words(rank, awaits_leader=awaits_leader)
            raise death_error(rank, silent_seconds)
        return silent

    def _check_last_words(self, rank: int, *, awaits_leader: bool) -> None:
        """Raise what was told before a rank ended; who awaits the leader, which may be it, takes its words only."""
        told = self._store.get(self._failed_key)
        if told is None:
            return
        error = told_error(told)
        if not awaits_leader or is_final(told) or error.rank == rank:
            self.has_final_word = is_final(told) or not awaits_leader
            raise error


def failed_key(tag: str) -> str:
    """The key of an operation that tells its first failure."""
    return f"{tag}/failed"


def beat_key(tag: str) -> str:
    """The key of an operation below which its ranks beat."""
    return f"{tag}/beat"


def _ends_within(work: Any, seconds: float) -> bool:
    """Wait a while for a collective, which goes on after it; whether it has ended, well or not."""
    with suppress(RuntimeError):  # "timed out", or what went wrong, which the next wait says again
        work.wait(timedelta(seconds=seconds))
    return bool(work.is_completed())


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
