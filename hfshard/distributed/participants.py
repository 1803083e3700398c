"""Who takes part in a call that several ranks make, or only some: it is not known before, and nobody may hang."""

from __future__ import annotations

import hashlib
import json
import logging
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from threading import Condition
from types import TracebackType
from typing import Final, Self

import torch.distributed as dist

from hfshard.distributed.liveness.call_group import call_ranks, place_of_call
from hfshard.distributed.liveness.heartbeat import LifeSigns, WaySigns, dead_key, process_key, way_key
from hfshard.distributed.liveness.messages import missing_error, missing_word
from hfshard.distributed.liveness.process_record import own_record
from hfshard.distributed.liveness.store import DEATH_SECONDS, AnsweringStore, open_group_store
from hfshard.distributed.liveness.waiting import Wait, group_timeout_seconds
from hfshard.distributed.status import LAST_NAMES, PATIENCE_SECONDS, SaveStatus
from hfshard.errors import DirectoryLockedError, RankFailedError

logger = logging.getLogger(__name__)

WAIT_SECONDS = 1.0
"""How long the first to come waits for ranks that are not needed."""
_FAREWELL_SECONDS: Final = 1.0


class Role(StrEnum):
    """What a rank has to do in one operation."""

    LEADER = "leader"
    """Take part, and lead: commit, and call `status.finish(...)`."""
    MEMBER = "member"
    """Take part."""
    LATE = "late"
    """The others began without it: call `status.finish()`, which awaits and gives the outcome of theirs."""
    DECLINED = "declined"
    """Nothing."""


@dataclass(frozen=True, slots=True)
class Participation:
    """What one rank has to do in an operation, and with whom."""

    role: Role
    rank: int
    """Of this process, in the default process group."""
    status: SaveStatus | None
    """Of the operation; None where the rank declined."""

    @property
    def members(self) -> list[int]:
        """The ranks that take part, in order; the first one leads."""
        return [] if self.status is None else self.status.ranks


@contextmanager
def gather_participants(
    place: str,
    *,
    needs_all: bool,
    is_writer: bool = True,
    wait_seconds: float | None = None,
    patience_seconds: float | None = None,
    death_seconds: float = DEATH_SECONDS,
) -> Iterator[Participation]:
    """Find out which ranks of the call's process group make it, too; the operation lasts as long as the block.

    Of replicated tensors every rank has all, so any of the ranks may call: the first to arrive waits a moment for the
    others, and closes the door. Who comes later awaits the outcome. Where one of those who came needs all ranks, all of
    them are waited for.

    Args:
        place: What the operation is about, such as the directory's absolute path: one at a time is under way, and who
            names another place is in another operation.
        needs_all: Whether the call needs all ranks, as where this one has a part of a tensor only.
        is_writer: False: the rank does not take part, and nobody waits for it, unless it `needs_all`.
        wait_seconds: How long the first one waits for ranks that are not needed; None: `WAIT_SECONDS`.
        patience_seconds: How long it waits for ranks that are, which may still compute or load data; None: as long as
            the process group waits for a rank in a collective, `init_process_group(timeout=)`.
        death_seconds: As for `SaveStatus`.

    Raises:
        RankMissingError: A rank that is needed has not come; raised on every rank that has.
        RankFailedError: A rank failed or died meanwhile.
        DirectoryLockedError: Another thread of this process does not come to the end of its operation.

    Example:
        with gather_participants(directory, needs_all=True) as participation:
            status = participation.status
            if participation.role is Role.LEADER:
                status.finish(save(...))
    """
    rank = dist.get_rank()
    words = place_of_call(place).encode(errors="surrogateescape")
    key = f"hfshard/{hashlib.sha256(words).hexdigest()[:32]}"
    with closing(open_group_store(death_seconds)) as store:
        if not is_writer and not needs_all:
            store.add(f"{key}/declined/{rank}", 1)
            yield Participation(Role.DECLINED, rank, None)
            return
        wait_seconds = WAIT_SECONDS if wait_seconds is None else wait_seconds
        patience_seconds = group_timeout_seconds() if patience_seconds is None else patience_seconds
        with _turn(place, key, patience_seconds):
            while True:
                with _Operation(store, key, place, rank, death_seconds) as operation:
                    operation.gather(needs_all, wait_seconds, patience_seconds)
                    role = operation.role
                    if role is Role.LATE and needs_all:
                        # Theirs is another one, of replicated tensors: this rank's is the next.
                        with suppress(RankFailedError):
                            operation.status.finish()
                        continue
                    yield Participation(role, rank, operation.status)
                    return


class _Operation:
    """One operation about a place. Its name is drawn by the first that comes, and given up by its keeper at the end.

    The keeper is the one that came first, and once the door is closed the leader; where that one died, whoever notices
    takes its place. The key of the place stays in the store; all others are deleted by the last who leaves.
    """

    def __init__(self, store: AnsweringStore, key: str, place: str, rank: int, death_seconds: float) -> None:
        self._store, self._key, self._place, self._rank = store, key, place, rank
        self._death_seconds = death_seconds
        self._keeper: int | None = None
        self._is_gathered = False
        self._name = ""
        self._world = call_ranks()
        self.status: SaveStatus

    @property
    def role(self) -> Role:
        if self._rank not in self.status.ranks:
            return Role.LATE
        return Role.LEADER if self._rank == self.status.leader else Role.MEMBER

    def __enter__(self) -> Self:
        self._name = self._enter()
        tag = f"{self._key}/{self._name}"
        self.status = SaveStatus(
            tag, self._world, self._rank, death_seconds=self._death_seconds, store=self._store, keeps_outcome=True
        )
        self.status.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not self._is_gathered and error is not None:
                self.status.fail(error)
                self.status.narrow({self._rank, *self._came(self._world)})
            self.status.__exit__(kind, error, trace)
            self._give_up(error)
        except RankFailedError:
            # The store is gone, and the keys with it.
            if error is None and not self._is_gathered:
                raise

    def gather(self, needs_all: bool, wait_seconds: float, patience_seconds: float) -> None:
        """Say that this rank has come, and find out who else takes part.

        Raises:
            RankMissingError: Somebody is needed, and has not come.
            RankFailedError: Somebody failed or died.
        """
        self.status.put_key(f"who/{self._rank}", b"all" if needs_all else b"any")
        self._store.delete([self._declined_key(self._rank), dead_key(self._rank), way_key(self._rank)])
        self._store.put(process_key(self._rank), own_record())
        opener = int(self._store.swap(self._tagged("opener"), "", str(self._rank)))
        self._keeper = opener
        if opener == self._rank:
            door = self._keep_door(wait_seconds, patience_seconds)
            self._store.put(self._tagged("door"), json.dumps(door).encode())
        else:
            door = json.loads(self.status.await_key("door", opener))
        self.status.narrow(door["members"])
        self._keeper = self.status.leader
        self._is_gathered = True
        if door["absent"]:
            raise missing_error(door, self._place, patience_seconds)

    def _enter(self) -> str:
        """The name of the operation that is under way or to begin, which can't end now without this rank's leaving."""
        self._await_end_of_last()
        while True:
            name = self._store.swap(f"{self._key}/now", "", uuid.uuid4().hex[:12])
            self._store.add(f"{self._key}/{name}/came", 1)
            if self._is_now(name):
                return name
            self._count_out(name)

    def _await_end_of_last(self) -> None:
        """Wait until the keeper of the operation that this rank was in has given it up, or is dead."""
        if self._key not in _LEFT:
            return
        name, keeper = _LEFT.pop(self._key)
        life = LifeSigns(self._store, f"{self._key}/{name}/beat", self._death_seconds)
        waiting = Wait(PATIENCE_SECONDS)
        while self._is_now(name):
            if life.look([keeper])[keeper] > self._death_seconds or waiting.is_over:
                self._store.swap(f"{self._key}/now", name, "")
            waiting.pause()

    def _keep_door(self, wait_seconds: float, patience_seconds: float) -> dict[str, list[int]]:
        """Wait for the others: a moment, or where all are needed for long."""
        waiting = Wait(patience_seconds)
        came: dict[int, bytes] = {}
        way_signs = WaySigns(self._store, self._death_seconds)
        while True:
            came |= self._came(rank for rank in self._world if rank not in came)
            others = [rank for rank in self._world if rank not in came]
            way_signs.look(others)
            declined = self._those_with(map(self._declined_key, others), others)
            dead = self._those_with(map(dead_key, others), others)
            needs_all = b"all" in came.values()
            missing = set(others) if needs_all else {*others}.difference(declined, dead)
            is_hopeless = not needs_all or bool(dead)
            if not missing or waiting.seconds > (wait_seconds if is_hopeless else patience_seconds):
                break
            if waiting.is_word_due():
                logger.warning("%s", missing_word(self._rank, missing, self._place, waiting.seconds, patience_seconds))
            self.status.look(list(came))
            waiting.pause()
        for rank in declined:
            if self._store.add(self._declined_key(rank), -1) <= 0:
                self._store.delete([self._declined_key(rank)])
        return {"members": sorted(came), "absent": others if needs_all else [], "declined": declined, "dead": dead}

    def _came(self, ranks: Iterable[int]) -> dict[int, bytes]:
        """Those of some ranks that have come: rank -> "all" or "any" of the ranks are needed."""
        numbers = list(ranks)
        words = self._store.get_many(self._tagged(f"who/{rank}") for rank in numbers)
        return {rank: word for rank, word in zip(numbers, words, strict=True) if word is not None}

    def _those_with(self, keys: Iterable[str], ranks: list[int]) -> list[int]:
        return [rank for rank, is_there in zip(ranks, self._store.has_many(keys), strict=True) if is_there]

    def _declined_key(self, rank: int) -> str:
        return f"{self._key}/declined/{rank}"

    def _give_up(self, error: BaseException | None) -> None:
        """Let the next operation begin, where this rank is the keeper or the keeper is dead; and leave."""
        if self._keeper in (None, self._rank):
            self._store.swap(f"{self._key}/now", self._name, "")
            self._await_late_ones()
        elif self._keeper == getattr(error, "rank", None):
            self._store.swap(f"{self._key}/now", self._name, "")
        else:
            _LEFT[self._key] = self._name, self._keeper
        self._count_out(self._name)

    def _await_late_ones(self) -> None:
        """Give who still looks for the outcome a moment: the store may end with this process."""
        end = time.monotonic() + _FAREWELL_SECONDS
        while time.monotonic() < end and self._store.add(self._tagged("left"), 0) + 1 < self._store.add(
            self._tagged("came"), 0
        ):
            time.sleep(0.002)

    def _count_out(self, name: str) -> None:
        """Leave; the last one deletes what is left of the operation."""
        tag = f"{self._key}/{name}"
        left = self._store.add(f"{tag}/left", 1)
        # None have come where another rank has just deleted all: then this very question has made the key anew.
        if not self._is_now(name) and left >= self._store.add(f"{tag}/came", 0):
            self._store.delete(f"{tag}/{key}" for key in ("came", "left", "opener"))
            self._store.delete_values(f"{tag}/{key}" for key in ("door", *LAST_NAMES))

    def _is_now(self, name: str) -> bool:
        return self._store.holds(f"{self._key}/now", name)

    def _tagged(self, name: str) -> str:
        return f"{self._key}/{self._name}/{name}"


_LEFT: dict[str, tuple[str, int]] = {}
"""Key of a place -> the last operation that this process was in and did not keep, and its keeper."""
_BUSY: set[str] = set()
"""The keys of the places that threads of this process are busy with."""
_CHANGED = Condition()


@contextmanager
def _turn(place: str, key: str, patience_seconds: float) -> Iterator[None]:
    """Let one thread of this process at a time take part in operations about a place."""
    with _CHANGED:
        if not _CHANGED.wait_for(lambda: key not in _BUSY, timeout=patience_seconds):
            raise DirectoryLockedError(
                f"Another thread of this process is busy with {place!r} since {patience_seconds:g} s. Wait for it.",
                path=place,
            )
        _BUSY.add(key)
    try:
        yield
    finally:
        with _CHANGED:
            _BUSY.discard(key)
            _CHANGED.notify_all()
