"""Liveness of the other ranks: heartbeats, processes that have ended, waits with an end, and records of failures."""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from hfshard._util.call_ranks import call_group
from hfshard._util.text import describe_error, shorten_list
from hfshard._util.threads import start_worker
from hfshard.distributed.group_store import DEATH_SECONDS, TimeoutStore, open_group_store
from hfshard.errors import RankFailedError, RankMissingError

_BEATS_PER_DEATH: Final = 15
"""One beat a second, if fifteen seconds of silence count as death."""
_DEAD_KEY: Final = "hfshard/dead"
_WAY_KEY: Final = "hfshard/way"
_PROCESS_KEY: Final = "hfshard/process"


class Heartbeat:
    """Heartbeats of this rank: a counter under a key, sent by a thread, or by the rank's checks if none can be started.

    Each beat identifies the process, too, so that other processes on this machine see at once that it has ended.
    """

    def __init__(self, store: TimeoutStore, key: str, death_seconds: float) -> None:
        self.key = key
        self.seconds = death_seconds / _BEATS_PER_DEATH
        self._store = store
        self._is_stopped = threading.Event()
        self._count = 0
        self._process = current_process()
        self._beaten_at = time.monotonic()
        self._longest_silence = 0.0
        self._thread: Future[None] | None = None

    def start(self) -> None:
        """Beat once, so that the key exists, and continue in a thread."""
        self._beat()
        self._thread = start_worker(self._go_on, "hfshard-beat", daemon=True)

    def stop(self) -> None:
        """Stop beating; a beat in progress is completed first."""
        self._is_stopped.set()
        if self._thread is not None:
            self._thread.result()
            self._thread = None

    def beat_without_thread(self) -> None:
        """Beat if no thread does."""
        if self._thread is None and not self._is_stopped.is_set():
            self._beat()

    def _go_on(self) -> None:
        try:
            while not self._is_stopped.wait(self.seconds):
                self._beat()
        except RankFailedError:
            # The store is gone: a thread that waits for others uses it, too, and raises.
            return

    def silent_seconds(self) -> float:
        """Return the longest time without a beat since the last call: the process may have been stopped."""
        longest = max(self._longest_silence, time.monotonic() - self._beaten_at)
        self._longest_silence = 0.0
        return longest

    def _beat(self) -> None:
        self._longest_silence = max(self._longest_silence, time.monotonic() - self._beaten_at)
        self._beaten_at = time.monotonic()
        self._count += 1
        self._store.put(self.key, b"%d %b" % (self._count, self._process))


class PeerHeartbeats:
    """Silence of other ranks: how long this rank has seen no new beat of each."""

    def __init__(self, store: TimeoutStore, key: str, death_seconds: float) -> None:
        self._store, self._key, self._death_seconds = store, key, death_seconds
        self._seen: dict[int, tuple[bytes | None, float, float]] = {}

    def look(self, ranks: Iterable[int]) -> dict[int, float]:
        """Check ranks' beats; return how many seconds each has been silent, infinity for a process that has ended.

        Time in which this process did not check counts little, because it may have been stopped itself.
        """
        numbers = list(ranks)
        now = time.monotonic()
        for rank, beat in zip(numbers, self._store.get_many(f"{self._key}/{rank}" for rank in numbers), strict=True):
            last, silent, looked_at = self._seen.get(rank, (beat, 0.0, now))
            silent = silent + min(now - looked_at, self._death_seconds / 5) if beat == last else 0.0
            self._seen[rank] = beat, math.inf if beat == last and has_ended(_process(beat)) else silent, now
        return {rank: self._seen[rank][1] for rank in numbers}

    def has_heard(self, rank: int) -> bool:
        """Return whether a rank had a beat at the last check."""
        return self._seen[rank][0] is not None

    def runs_here(self, rank: int) -> bool:
        """Return whether a rank's last beat came from a process of this machine that has not ended."""
        return runs_here(_process(self._seen[rank][0]))


def _process(beat: bytes | None) -> bytes:
    return (beat or b"").partition(b" ")[2]


@contextmanager
def announce_arrival(rank: int, death_seconds: float = DEATH_SECONDS) -> Iterator[None]:
    """Send heartbeats while the block prepares for a call of several ranks, which wait for this one.

    Afterwards the rank joins them, and deletes the key; if the block raises, the rank does not join.
    """
    with closing(open_group_store(death_seconds)) as store:
        heart = Heartbeat(store, arrival_key(rank), death_seconds)
        heart.start()
        try:
            yield
        except BaseException:
            heart.stop()
            with suppress(RankFailedError):  # the store is gone, and the block's error is more specific
                store.delete([heart.key])
            raise
        finally:
            heart.stop()


class ArrivalHeartbeats:
    """Detection of ranks that died before they arrived, or, on this machine, between two calls."""

    def __init__(self, store: TimeoutStore, death_seconds: float) -> None:
        self._life = PeerHeartbeats(store, _WAY_KEY, death_seconds)
        self._pause_seconds = death_seconds / _BEATS_PER_DEATH
        self._death_seconds = death_seconds
        self._store = store
        self._looked_at = -math.inf

    def look(self, ranks: Iterable[int]) -> None:
        """Check the awaited ranks, if the last check was a while ago; set the `dead_key` of a dead one."""
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
    """Return the key of the process that a rank was when it last joined others."""
    return f"{_PROCESS_KEY}/{rank}"


def arrival_key(rank: int) -> str:
    """Return the key of the beats of a rank that has not arrived yet."""
    return f"{_WAY_KEY}/{rank}"


def dead_key(rank: int) -> str:
    """Return the key that exists if a rank was declared dead and has joined nothing since."""
    return f"{_DEAD_KEY}/{rank}"


# Process records, by which another process of the same machine sees at once that a rank has ended.


_PROCESSES: Final = Path("/proc")
_ENDED: Final = (b"Z", b"X")
"""States of a process that has ended, and that its parent has not waited for."""


def current_process() -> bytes:
    """Describe this process for `has_ended`; empty if the system does not show it."""
    pid = os.getpid()
    machine = _machine(pid)
    if machine is None:
        return b""
    try:
        _, started = _state_and_start(pid)
    except OSError:
        return b""
    return json.dumps([machine, pid, started]).encode()


def has_ended(record: bytes | None) -> bool:
    """Return whether a process is one of this machine and has ended; a stopped one has not."""
    return _is_running(record) is False


def runs_here(record: bytes | None) -> bool:
    """Return whether a process is one of this machine and runs or is stopped."""
    return _is_running(record) is True


def _is_running(record: bytes | None) -> bool | None:
    """Return whether a process has not ended; None if that is unknown."""
    if not record:
        return None
    machine, pid, started = json.loads(record)
    if machine != _machine(os.getpid()):
        return None
    try:
        state, begun = _state_and_start(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None if _is_hidden(pid) else False
    except OSError:
        return None
    return state not in _ENDED and begun == started


@lru_cache(maxsize=1)
def _machine(pid: int) -> list[Any] | None:
    """Identify this process's PID namespace; computed once per process, whose PID is the argument.

    Return None if the system does not show it, or shows the processes of another namespace.
    """
    try:
        if os.readlink(_PROCESSES / "self") != str(pid):
            return None
        boot = (_PROCESSES / "sys/kernel/random/boot_id").read_text().strip()
        return [socket.gethostname(), boot, os.stat(_PROCESSES / "self/ns/pid").st_ino]
    except OSError:
        return None


def _is_hidden(pid: int) -> bool:
    """Return whether a process exists that the system does not show: another user's, if `/proc` has `hidepid`."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _state_and_start(pid: int) -> tuple[bytes, str]:
    """Read a process's state and start time; the name before them may contain anything, and end within a character."""
    fields = (_PROCESSES / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    return fields[0], fields[19].decode()


# Watching the other ranks of an operation for failures and for silence.


_LOOK_SECONDS: Final = 0.3
"""Between two checks for a failure."""
_BEATS_OF_A_SUSPECT: Final = 3
"""A rank that misses this many beats after a collective failed is the one that broke it."""
_SUSPICION_PAUSE_SECONDS: Final = 0.05


class Watch:
    """One rank's view of the others in an operation: the failures that they reported, and their silences.

    Args:
        store: Open.
        tag: The prefix of the operation's keys.
        rank: This one, which does not watch itself.
        heart: Its own; it beats with each check if no thread can.
        death_seconds: A rank without a beat for longer counts as dead.

    Attributes:
        has_final_word: Whether the failure that it raised settles the outcome: the leader reported it when it gave up,
            or was not awaited.
    """

    def __init__(self, store: TimeoutStore, tag: str, rank: int, heart: Heartbeat, death_seconds: float) -> None:
        self._store, self._rank, self._heart, self._death_seconds = store, rank, heart, death_seconds
        self._failed_key = failed_key(tag)
        self._life = PeerHeartbeats(store, beat_key(tag), death_seconds)
        self._looked_at = time.monotonic()
        self._watched_at = self._looked_at
        self._told_at = 0.0
        self.has_final_word = False

    def look(self, ranks: Collection[int], *, awaits_leader: bool = False) -> None:
        """Raise for a failure, or a death of one of the ranks, if the last check was a while ago."""
        now = time.monotonic()
        if now - self._looked_at > _LOOK_SECONDS:
            self._check_told(awaits_leader=awaits_leader)
        if now - self._watched_at > self._heart.seconds:
            self._check_life(ranks, self._death_seconds, awaits_leader=awaits_leader)

    def check(self, ranks: Collection[int]) -> None:
        """Raise if any rank has reported a failure, or one of these sends no heartbeats.

        Raises:
            RankFailedError: It names the rank.
        """
        self._check_told(awaits_leader=False)
        self._check_life(ranks, self._death_seconds)

    def is_anyone_alive(self, ranks: Iterable[int]) -> bool:
        """Return whether any of these ranks sends heartbeats."""
        return any(silent_seconds <= self._death_seconds for silent_seconds in self._life.look(ranks).values())

    def reset_suspicion(self, ranks: Collection[int]) -> None:
        """If this process was stopped, wait until each rank has beaten again: some may have given up by now.

        Raises:
            RankFailedError: One has.
        """
        if self._heart.silent_seconds() < self._death_seconds / 2:
            return
        left = [rank for rank in ranks if rank != self._rank]
        self._life.look(left)  # beats from before do not count
        while left:
            time.sleep(_SUSPICION_PAUSE_SECONDS)
            self._check_told(awaits_leader=False)
            left = [rank for rank, seconds in self._check_life(left, self._death_seconds).items() if seconds]

    def await_collective(
        self, work: Any, ranks: Collection[int], watched: Collection[int], patience_seconds: float
    ) -> None:
        """Wait for a collective, and check repeatedly whether a rank failed.

        Args:
            work: The `torch.distributed.Work` of a call with `async_op=True`, for CPU tensors.
            ranks: The ranks that take part.
            watched: The ranks whose heartbeats are checked.
            patience_seconds: How long to wait if all of them are alive.

        Raises:
            RankFailedError: A rank failed or died, or the collective did.
        """
        end = time.monotonic() + patience_seconds
        while not _ends_within(work, _LOOK_SECONDS):
            self.look(watched)
            if time.monotonic() > end:
                raise RankFailedError(
                    f"A collective among ranks {_listed(ranks)} did not end within {patience_seconds:g} s, though all "
                    "of them are alive. Check what each of them is doing, and start the job again."
                )
        try:
            work.wait()
        except RuntimeError as error:
            raise self.find_failed_rank(error, ranks) from error

    def find_failed_rank(self, error: RuntimeError, ranks: Collection[int]) -> RankFailedError:
        """Find the rank that made a collective fail: one that reports it, or one that falls silent.

        A rank whose process runs on this machine gets the full `death_seconds`, because it may only be delayed.
        """
        suspicion_seconds = self._heart.seconds * _BEATS_OF_A_SUSPECT
        end = time.monotonic() + suspicion_seconds + 2 * self._heart.seconds
        longest_silence = 0.0
        try:
            while time.monotonic() < end or longest_silence > suspicion_seconds:
                self._check_told(awaits_leader=False)
                longest_silence = max(self._check_life(ranks, suspicion_seconds).values(), default=0.0)
                time.sleep(_SUSPICION_PAUSE_SECONDS)
        except RankFailedError as failure:
            return failure
        return RankFailedError(
            f"A collective among ranks {_listed(ranks)} failed, though all of them are alive: {error}. Check the "
            "network between them, and start the job again."
        )

    def _check_told(self, *, awaits_leader: bool) -> None:
        """Raise a reported failure; a rank that awaits the leader waits for its final record, which may be success."""
        self._looked_at = time.monotonic()
        self._heart.beat_without_thread()
        record = self._store.get(self._failed_key)
        if record is None:
            return
        if awaits_leader and not is_final(record):
            self._told_at = self._told_at or self._looked_at
            if self._looked_at - self._told_at < self._death_seconds:
                return
        self.has_final_word = is_final(record) or not awaits_leader
        raise error_from_record(record)

    def _check_life(
        self, ranks: Collection[int], most_seconds: float, *, awaits_leader: bool = False
    ) -> dict[int, float]:
        """Raise for a death; return how many seconds each of the ranks has been silent.

        A rank on this machine whose process has not ended gets the full `death_seconds`.
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
        """Raise what was reported before a rank died; if the leader is awaited, only its final record or the dead's."""
        record = self._store.get(self._failed_key)
        if record is None:
            return
        error = error_from_record(record)
        if not awaits_leader or is_final(record) or error.rank == rank:
            self.has_final_word = is_final(record) or not awaits_leader
            raise error


def failed_key(tag: str) -> str:
    """Return the key for the first failure of an operation."""
    return f"{tag}/failed"


def beat_key(tag: str) -> str:
    """Return the key of an operation below which its ranks beat."""
    return f"{tag}/beat"


def _ends_within(work: Any, seconds: float) -> bool:
    """Wait a while for a collective, which continues afterwards; return whether it has ended, well or not."""
    with suppress(RuntimeError):  # "timed out", or an error that the next wait raises again
        work.wait(timedelta(seconds=seconds))
    return bool(work.is_completed())


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


# Waits for other ranks: how long they last, and when a message names the ranks.


PEER_TIMEOUT_SECONDS: Final = 3600.0
"""How long to wait for a live rank: the owner of a large file may write to a slow disk."""
_UNKNOWN_SECONDS: Final = 600.0
"""If the backend has no timeout: torch's default for NCCL."""
_FIRST_WORD_SECONDS: Final = 10.0
"""Ranks that do the same work arrive within a few seconds."""
_FIRST_WORD_SHARE: Final = 0.25
"""Share of a short timeout: the message comes long before the error."""
_PAUSE_SHARE: Final = 0.2
"""Share of the time that a wait has lasted: it ends late by at most this share, after some twenty checks."""
_SHORTEST_PAUSE_SECONDS: Final = 0.001
_LONGEST_PAUSE_SECONDS: Final = 0.05


class Wait:
    """One wait for other ranks, with an end; a message about it is due after ten seconds, twenty, forty ...

    Args:
        most_seconds: How long it may take.
    """

    def __init__(self, most_seconds: float) -> None:
        self._start = time.monotonic()
        self._most_seconds = most_seconds
        self._word_after_seconds = min(_FIRST_WORD_SECONDS, most_seconds * _FIRST_WORD_SHARE)

    @property
    def seconds(self) -> float:
        """The seconds that it has lasted."""
        return time.monotonic() - self._start

    @property
    def is_over(self) -> bool:
        """True if it has lasted too long."""
        return self.seconds > self._most_seconds

    def pause(self) -> None:
        """Sleep until the next check of what is waited for."""
        time.sleep(min(max(self.seconds * _PAUSE_SHARE, _SHORTEST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS))

    def is_word_due(self) -> bool:
        """Return whether a message is due now; the next one is due after twice the time."""
        if self.seconds < self._word_after_seconds:
            return False
        self._word_after_seconds *= 2
        return True


def group_timeout_seconds() -> float:
    """Return how long a call's process group waits for a rank: `timeout=` of `init_process_group` or `new_group`.

    torch has no public name for it. If several backends serve the group, the shortest timeout counts.
    """
    group: Any = call_group() or dist.group.WORLD
    backends = [group._get_backend(device) for device in group._device_types]
    timeouts = [getattr(getattr(backend, "options", None), "_timeout", None) for backend in backends]
    return min((one.total_seconds() for one in timeouts if isinstance(one, timedelta)), default=_UNKNOWN_SECONDS)


# Values that ranks write into the store: several values packed into one, and records of failures.


_OUTCOME_UNKNOWN: Final = (
    "The outcome is unknown: this call took effect completely, or not at all. Check the result with 'hfshard verify'."
)

_SHOWN_RANKS: Final = 8
"""The number of ranks that a message lists."""


def with_unknown_outcome(words: str) -> str:
    """Add to a failure message that the ranks' operation may be done nevertheless."""
    return words if _OUTCOME_UNKNOWN in words else f"{words} {_OUTCOME_UNKNOWN}"


def failure_record(error: BaseException, rank: int, *, may_be_done: bool = False) -> bytes:
    """Build the record by which a rank reports its failure; one that another rank caused is attributed to that rank.

    Args:
        error: The failure.
        rank: The rank that reports it.
        may_be_done: Whether the ranks' operation may be done nevertheless.
    """
    record = {"kind": type(error).__name__, "rank": rank, "words": describe_error(error)}
    record["may_be_done"] = may_be_done
    if isinstance(error, RankFailedError):
        record |= {"rank": error.rank, "words": str(error)}
    return json.dumps(record).encode()


def final_record(record: bytes) -> bytes:
    """Mark a record as the leader's final one, after which nothing follows."""
    return json.dumps(json.loads(record) | {"is_final": True}).encode()


def is_final(record: bytes) -> bool:
    """Return whether the leader has given up, too."""
    return "is_final" in json.loads(record)


def error_from_record(record: bytes) -> RankFailedError:
    """Create the error to raise for another rank's record."""
    values: Mapping[str, Any] = json.loads(record)
    if values["kind"] in ("RankFailedError", "RankMissingError"):
        kind = RankMissingError if values["kind"] == "RankMissingError" else RankFailedError
        return kind(values["words"], rank=values["rank"])
    message = values["words"].removesuffix(".")
    advice = "Call" if values["kind"] == "CheckpointChangedError" else "Fix that, and call"
    words = f"Rank {values['rank']} failed, so the other ranks gave up: {message}. {advice} again on every rank."
    return RankFailedError(with_unknown_outcome(words) if values["may_be_done"] else words, rank=values["rank"])


def death_error(rank: int, silent_seconds: float) -> RankFailedError:
    """Create the error to raise for a silent rank; infinite silence means that its process has ended."""
    if silent_seconds == math.inf:
        words = f"Rank {rank} sent no more heartbeats: its process has ended."
        return RankFailedError(f"{words} Check its output, and start the job again.", rank=rank)
    return RankFailedError(
        f"Rank {rank} sent no heartbeat for {silent_seconds:.0f} s: it was killed, was stopped, or cannot be reached. "
        "Check its output, and start the job again.",
        rank=rank,
    )


def waiting_message(rank: int, missing: Collection[int], place: str, seconds: float, patience_seconds: float) -> str:
    """Compose the message of a rank that is waiting for others."""
    others = shorten_list(list(map(str, sorted(missing))), _SHOWN_RANKS)
    return (
        f"Rank {rank} has waited {seconds:.0f} s for rank {others} to make the same call, for {place!r}. It gives up "
        f"after {patience_seconds:g} s (the timeout of collectives: init_process_group(timeout=...)). Every rank must "
        "call."
    )


def missing_error(door: Mapping[str, list[int]], place: str, patience_seconds: float) -> RankMissingError:
    """Create the error to raise on all ranks that have come, if others are needed.

    Args:
        door: Which ranks are "absent", and of these "declined" or "dead".
        place: What the operation is about.
        patience_seconds: How long they were waited for.
    """
    absent = sorted(door["absent"], key=lambda rank: (rank not in door["dead"], rank))
    why = f"did not arrive within {patience_seconds:g} s"
    if absent[0] in door["dead"]:
        why = "had stopped sending heartbeats, and did not arrive"
    elif absent[0] in door["declined"]:
        why = "was called with is_main_process=False and without a part of a tensor"
    others = f", nor did rank {', '.join(map(str, absent[1:]))}" if absent[1:] else ""
    return RankMissingError(
        f"Rank {absent[0]} {why}{others}, but this call for {place!r} needs every rank. Make it on every rank, "
        "outside `if rank == 0:`; or, for a model that only some ranks have, with their process_group=.",
        rank=absent[0],
        path=place,
    )


def pack(values: Mapping[int, bytes]) -> bytes:
    """Pack numbered values into one: a line of JSON with their lengths, and then the values."""
    head = json.dumps({number: len(value) for number, value in values.items()}).encode()
    return b"\n".join([head, b"".join(values.values())])


def unpack(packed: bytes) -> dict[int, bytes]:
    """Unpack the values that `pack` was given."""
    head, _, rest = packed.partition(b"\n")
    values = {}
    start = 0
    for number, length in json.loads(head).items():
        values[int(number)] = rest[start : start + length]
        start += length
    return values
