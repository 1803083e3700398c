"""Which processes of this machine have ended."""

from __future__ import annotations

import ctypes
import json
import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hfshard.distributed import liveness
from hfshard.distributed.group_store import TimeoutStore
from hfshard.distributed.liveness import (
    Heartbeat,
    Watch,
    beat_key,
    current_process,
    error_from_record,
    failed_key,
    failure_record,
    has_ended,
    runs_here,
)
from hfshard.distributed.rendezvous import GroupSession
from hfshard.errors import RankFailedError


def test_a_process_has_ended_before_its_parent_knows_and_one_that_is_stopped_has_not() -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, current_process())
        signal.pause()
    record = os.read(reader, 1000)
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)

    assert (has_ended(record), runs_here(record)) == (False, True)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert (has_ended(record), runs_here(record)) == (True, False)
    os.waitpid(pid, 0)
    assert (has_ended(record), runs_here(record)) == (True, False)


def test_who_is_elsewhere_or_unknown_has_not_ended() -> None:
    machine, pid, started = json.loads(current_process())

    assert runs_here(current_process())
    assert not has_ended(b"")
    assert not has_ended(None)
    elsewhere = json.dumps([["elsewhere", *machine[1:]], pid, "0"]).encode()
    assert (has_ended(elsewhere), runs_here(elsewhere)) == (False, False)
    assert has_ended(json.dumps([machine, pid, f"{started}0"]).encode())


@contextmanager
def waiting_process(name: bytes) -> Iterator[bytes]:
    """The record of a process that lives in the block."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(15, name)  # PR_SET_NAME
        os.write(writer, current_process())
        signal.pause()
    os.close(writer)
    with open(reader, "rb", buffering=0) as pipe:
        record = pipe.read(1000)
    try:
        yield record
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.fixture
def other_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place that is taken for /proc, and is empty."""
    monkeypatch.setattr(liveness, "_PROCESSES", tmp_path)
    liveness._machine.cache_clear()
    yield tmp_path
    liveness._machine.cache_clear()


def show_this_process(proc: Path, pid: int) -> None:
    """Let a place say what /proc says of this process, with a number of its own."""
    (proc / "sys/kernel/random").mkdir(parents=True)
    (proc / "sys/kernel/random/boot_id").write_bytes(Path("/proc/sys/kernel/random/boot_id").read_bytes())
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "ns").symlink_to("/proc/self/ns")
    (proc / str(pid) / "stat").write_bytes(Path("/proc/self/stat").read_bytes())
    (proc / "self").symlink_to(str(pid))


def test_a_process_has_any_name() -> None:
    with waiting_process("ranknr-00-训练".encode()[:15]) as record:
        assert record
        assert (has_ended(record), runs_here(record)) == (False, True)


def test_nobody_has_ended_where_the_system_does_not_tell(other_proc: Path) -> None:
    elsewhere = json.dumps([["host", "boot", 1], os.getpid(), "1"]).encode()

    assert current_process() == b""
    assert (has_ended(elsewhere), runs_here(elsewhere)) == (False, False)


def test_the_processes_of_another_space_are_not_told_of(other_proc: Path) -> None:
    show_this_process(other_proc, os.getpid() + 1)

    assert current_process() == b""


def test_a_process_that_is_hidden_has_not_ended(other_proc: Path) -> None:
    """As of another user, where /proc is mounted with hidepid."""
    show_this_process(other_proc, os.getpid())
    assert runs_here(current_process())

    machine, _, started = json.loads(current_process())
    hidden = json.dumps([machine, 1, started]).encode()  # which is always there
    assert (has_ended(hidden), runs_here(hidden)) == (False, False)
    gone = json.dumps([machine, 4_194_305, started]).encode()  # more than a process number can be
    assert has_ended(gone)


# What a rank that failed tells the others.


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (OSError("The disk is full."), "OSError: The disk is full"),
    ],
)
def test_the_others_are_told_what_failed_in_one_sentence(error: BaseException, said: str) -> None:
    told = error_from_record(failure_record(error, 1))

    assert told.rank == 1
    assert str(told) == f"Rank 1 failed, so the other ranks gave up: {said}. Fix that, and call again on every rank."


# What a rank makes of another one whose process has ended, or is one of this machine and runs.

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
