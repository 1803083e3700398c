"""What a rank makes of another one whose process has ended, or is one of this machine and runs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch.distributed as dist

from hfshard.distributed import liveness
from hfshard.distributed.group_store import TimeoutStore
from hfshard.distributed.liveness import Heartbeat, Watch, beat_key, current_process, failed_key, failure_record
from hfshard.distributed.rendezvous import GroupSession
from hfshard.errors import RankFailedError

# torch lists its stores in its documentation only
_HASH_STORE: Any = dist.HashStore  # type: ignore[attr-defined]
BROKEN = RuntimeError("Connection closed by peer")


class TellsLate(TimeoutStore):
    """One in which something is told right before it is looked whether a rank lives."""

    last_words: Mapping[str, bytes] = {}

    def get_many(self, keys: Iterable[str]) -> list[bytes | None]:
        names = list(keys)
        if any(name.startswith(beat_key("save")) for name in names):
            for name, words in self.last_words.items():
                self.put(name, words)
        return super().get_many(names)


class Ranks:
    """Two ranks, of which the second one has beaten once."""

    def __init__(self, store: TimeoutStore, process: bytes) -> None:
        self.store = store
        self.watch = Watch(store, "save", 0, Heartbeat(store, "save/beat/0", 3.0), 3.0)
        store.put(f"{beat_key('save')}/1", b"1 " + process)


def ended_record() -> bytes:
    """The record of a process that has ended."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, current_process())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        return pipe.read()


def test_a_process_that_has_ended_is_named_at_the_first_look() -> None:
    ranks = Ranks(TimeoutStore(_HASH_STORE()), ended_record())

    with pytest.raises(RankFailedError, match=r"^Rank 1 sent no more heartbeats: its process has ended") as caught:
        ranks.watch.check([0, 1])
    broke = ranks.watch.find_failed_rank(BROKEN, [0, 1])

    assert (caught.value.rank, broke.rank) == (1, 1)
    assert not ranks.watch.is_anyone_alive([1])


def test_what_a_process_told_before_it_ended_counts() -> None:
    store = TellsLate(_HASH_STORE())
    ranks = Ranks(store, ended_record())
    store.last_words = {failed_key("save"): failure_record(MemoryError("no room"), 1)}

    broke = ranks.watch.find_failed_rank(BROKEN, [0, 1])

    assert str(broke).startswith("Rank 1 failed, so the other ranks gave up: MemoryError: no room")


class Clock:
    """Time that goes by when somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        monkeypatch.setattr(liveness, "time", self)
        monkeypatch.setattr(liveness, "time", self)

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


class BeatsLate(TimeoutStore):
    """One in which the second rank beats again after 2.5 seconds."""

    clock: Clock

    def get_many(self, keys: Iterable[str]) -> list[bytes | None]:
        if self.clock.seconds >= 2.5:
            self.put(f"{beat_key('save')}/1", b"%d " % (self.clock.seconds * 100) + current_process())
        return super().get_many(keys)


def test_a_process_of_this_machine_that_is_held_up_has_not_broken_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    store = BeatsLate(_HASH_STORE())
    store.clock = Clock(monkeypatch)
    ranks = Ranks(store, current_process())

    broke = ranks.watch.find_failed_rank(BROKEN, [0, 1])

    assert broke.rank is None
    assert "ranks 0, 1 failed, though all of them are alive: Connection closed by peer" in str(broke)
    store.clock.seconds = 0.0
    elsewhere = Ranks(store, b"")
    assert elsewhere.watch.find_failed_rank(BROKEN, [0, 1]).rank == 1
    assert store.clock.seconds < 2


def test_a_process_of_this_machine_that_stays_silent_has_broken_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    ranks = Ranks(TimeoutStore(_HASH_STORE()), current_process())

    broke = ranks.watch.find_failed_rank(BROKEN, [0, 1])

    assert broke.rank == 1
    assert str(broke).startswith("Rank 1 sent no heartbeat for 3 s: it was killed, was stopped")
    assert 3 <= clock.seconds < 3.2


def test_what_another_rank_told_does_not_hide_that_the_leader_has_ended() -> None:
    store = TellsLate(_HASH_STORE())
    store.last_words = {
        "save/failed": failure_record(KeyboardInterrupt(), 2),
        "save/beat/0": b"2 " + ended_record(),
    }

    with (
        pytest.raises(RankFailedError, match=r"^Rank 0 sent no more heartbeats: its process has ended") as caught,
        GroupSession("save", [0, 1, 2], 1, store=store, death_seconds=1.5, timeout_seconds=60) as ranks,
    ):
        ranks.finish()
    assert caught.value.rank == 0
    assert "The outcome is unknown" in str(caught.value)


def test_the_outcome_of_a_leader_that_has_ended_is_heard() -> None:
    store = TellsLate(_HASH_STORE())
    store.last_words = {"save/outcome": b"done", "save/beat/0": b"2 " + ended_record()}

    with GroupSession("save", [0, 1], 1, store=store, death_seconds=1.5, timeout_seconds=60) as ranks:
        assert ranks.finish() == b"done"
