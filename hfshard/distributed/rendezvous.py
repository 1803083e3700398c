"""Rendezvous of the ranks that make the same call. A missing or dead rank raises; nothing waits forever."""

from __future__ import annotations

import hashlib
import json
import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from threading import Condition
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import torch.distributed as dist

from hfshard._util.call_ranks import WAITS_FOR_OTHERS, Role, Session, call_ranks, has_other_ranks
from hfshard._util.text import describe_error
from hfshard.distributed import liveness
from hfshard.distributed.group_store import DEATH_SECONDS, TimeoutStore, open_group_store
from hfshard.errors import DirectoryLockedError, RankFailedError, RankMissingError

logger = logging.getLogger(__name__)

_Value = TypeVar("_Value")

WAIT_SECONDS = 1.0
"""How long the first rank to arrive waits for ranks that are not needed."""
_FAREWELL_SECONDS: Final = 1.0


@contextmanager
def session(
    call: str,
    *,
    needs_all: bool,
    may_join: bool = True,
    wait_seconds: float | None = None,
    timeout_seconds: float | None = None,
    death_seconds: float = DEATH_SECONDS,
) -> Iterator[Session]:
    """Meet the ranks of the call's process group that make the same call; the session lasts as long as the block.

    If the tensors are replicated, every rank has all of them, so any of the ranks may call: the first to arrive waits
    briefly for the others, and closes the rendezvous. A rank that comes later awaits the outcome. If one of the ranks
    that came needs all ranks, all of them are waited for. A call without other ranks gets a session at once.

    Args:
        call: What the ranks do, such as the absolute path of the directory into which they save. One session per call
            lasts at a time; a rank that names another call is in another session.
        needs_all: Whether the call needs all ranks, for example because this one has only part of a tensor.
        may_join: False: the rank does not take part, and no other waits for it, unless it `needs_all`.
        wait_seconds: How long the first one waits for ranks that are not needed; None: `WAIT_SECONDS`, or not at all
            without `WAITS_FOR_OTHERS`.
        timeout_seconds: How long it waits for ranks that are needed, which may still compute or load data; None: as
            long as the process group waits for a rank in a collective, `init_process_group(timeout=)`.
        death_seconds: A rank without a beat for longer counts as dead.

    Raises:
        RankMissingError: A rank that is needed has not come; raised on every rank that has.
        RankFailedError: A rank failed or died.
        DirectoryLockedError: Another thread of this process does not end its session.

    Example:
        with session(directory, needs_all=True) as ranks:
            if ranks.role is Role.LEADER:
                ranks.finish(save(...))
    """
    if not has_other_ranks():
        yield Session()
        return
    rank = dist.get_rank()
    words = _place_of_call(call).encode(errors="surrogateescape")
    key = f"hfshard/{hashlib.sha256(words).hexdigest()[:32]}"
    with closing(open_group_store(death_seconds)) as store:
        if not may_join and not needs_all:
            store.add(f"{key}/declined/{rank}", 1)
            yield GroupSession(f"{key}/none", (), rank, store=store)
            return
        if wait_seconds is None:
            wait_seconds = WAIT_SECONDS if WAITS_FOR_OTHERS.get() else 0.0
        timeout_seconds = liveness.group_timeout_seconds() if timeout_seconds is None else timeout_seconds
        with _turn(call, key, timeout_seconds):
            while True:
                with _Rendezvous(store, key, call, rank, death_seconds) as rendezvous:
                    rendezvous.gather(needs_all, wait_seconds, timeout_seconds)
                    if rendezvous.session.role is Role.LATE and needs_all:
                        # The others' session is another one, of replicated tensors: this rank's is the next.
                        with suppress(RankFailedError):
                            rendezvous.session.finish()
                        continue
                    yield rendezvous.session
                    return


def _place_of_call(place: str) -> str:
    """Name what a call is about, so that it differs from the same call of other ranks."""
    ranks = call_ranks()
    return place if len(ranks) == dist.get_world_size() else f"{place} of ranks {', '.join(map(str, ranks))}"


class _Rendezvous:
    """The arrival of the ranks of one session. The first rank draws its name, and its keeper gives it up at the end.

    The keeper is the rank that came first, and after the rendezvous closes the leader; if that one died, any rank that
    notices takes its place. The key of the place stays in the store; the last rank to leave deletes all others.
    """

    def __init__(self, store: TimeoutStore, key: str, place: str, rank: int, death_seconds: float) -> None:
        self._store, self._key, self._place, self._rank = store, key, place, rank
        self._death_seconds = death_seconds
        self._keeper: int | None = None
        self._is_gathered = False
        self._name = ""
        self._world = call_ranks()
        self.session: GroupSession

    def __enter__(self) -> Self:
        self._name = self._enter()
        tag = f"{self._key}/{self._name}"
        self.session = GroupSession(
            tag, self._world, self._rank, death_seconds=self._death_seconds, store=self._store, keep_outcome_keys=True
        )
        self.session.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not self._is_gathered and error is not None:
                self.session.fail(error)
                self.session.narrow({self._rank, *self._came(self._world)})
            self.session.__exit__(kind, error, trace)
            self._give_up(error)
        except RankFailedError:
            # The store is gone, and the keys with it.
            if error is None and not self._is_gathered:
                raise

    def gather(self, needs_all: bool, wait_seconds: float, timeout_seconds: float) -> None:
        """Report that this rank has come, and find out which others take part; raise if a needed one has not come."""
        self.session.put_key(f"who/{self._rank}", b"all" if needs_all else b"any")
        self._store.delete(
            [self._declined_key(self._rank), liveness.dead_key(self._rank), liveness.arrival_key(self._rank)]
        )
        self._store.put(liveness.process_key(self._rank), liveness.current_process())
        opener = int(self._store.swap(self._tagged("opener"), "", str(self._rank)))
        self._keeper = opener
        if opener == self._rank:
            door = self._collect_arrivals(wait_seconds, timeout_seconds)
            self._store.put(self._tagged("door"), json.dumps(door).encode())
        else:
            door = json.loads(self.session.await_key("door", opener))
        self.session.narrow(door["members"])
        self._keeper = self.session.leader
        self._is_gathered = True
        if door["absent"]:
            raise liveness.missing_error(door, self._place, timeout_seconds)

    def _enter(self) -> str:
        """Return the name of the current or next session, which cannot end now until this rank leaves."""
        self._await_end_of_last()
        while True:
            name = self._store.swap(f"{self._key}/now", "", uuid.uuid4().hex[:12])
            self._store.add(f"{self._key}/{name}/came", 1)
            if self._is_now(name):
                return name
            self._count_out(name)

    def _await_end_of_last(self) -> None:
        """Wait until the keeper of this rank's last session has given it up, or is dead."""
        if self._key not in _LEFT:
            return
        name, keeper = _LEFT.pop(self._key)
        life = liveness.PeerHeartbeats(self._store, f"{self._key}/{name}/beat", self._death_seconds)
        waiting = liveness.Wait(liveness.PEER_TIMEOUT_SECONDS)
        while self._is_now(name):
            if life.look([keeper])[keeper] > self._death_seconds or waiting.is_over:
                self._store.swap(f"{self._key}/now", name, "")
            waiting.pause()

    def _collect_arrivals(self, wait_seconds: float, timeout_seconds: float) -> dict[str, list[int]]:
        """Wait for the others: briefly, or for long if all are needed."""
        waiting = liveness.Wait(timeout_seconds)
        came: dict[int, bytes] = {}
        way_signs = liveness.ArrivalHeartbeats(self._store, self._death_seconds)
        while True:
            came |= self._came(rank for rank in self._world if rank not in came)
            others = [rank for rank in self._world if rank not in came]
            way_signs.look(others)
            declined = self._those_with(map(self._declined_key, others), others)
            dead = self._those_with(map(liveness.dead_key, others), others)
            needs_all = b"all" in came.values()
            missing = set(others) if needs_all else {*others}.difference(declined, dead)
            can_stop_waiting = not needs_all or bool(dead)
            if not missing or waiting.seconds > (wait_seconds if can_stop_waiting else timeout_seconds):
                break
            if waiting.is_word_due():
                logger.warning(
                    "%s", liveness.waiting_message(self._rank, missing, self._place, waiting.seconds, timeout_seconds)
                )
            self.session.look(list(came))
            waiting.pause()
        for rank in declined:
            if self._store.add(self._declined_key(rank), -1) <= 0:
                self._store.delete([self._declined_key(rank)])
        return {"members": sorted(came), "absent": others if needs_all else [], "declined": declined, "dead": dead}

    def _came(self, ranks: Iterable[int]) -> dict[int, bytes]:
        """Return the ranks, among these, that have come: rank -> b"all" or b"any", for the ranks that it needs."""
        numbers = list(ranks)
        words = self._store.get_many(self._tagged(f"who/{rank}") for rank in numbers)
        return {rank: word for rank, word in zip(numbers, words, strict=True) if word is not None}

    def _those_with(self, keys: Iterable[str], ranks: list[int]) -> list[int]:
        return [rank for rank, is_there in zip(ranks, self._store.has_many(keys), strict=True) if is_there]

    def _declined_key(self, rank: int) -> str:
        return f"{self._key}/declined/{rank}"

    def _give_up(self, error: BaseException | None) -> None:
        """Let the next session begin, if this rank is the keeper or the keeper is dead; then leave."""
        if self._keeper in (None, self._rank):
            self._store.swap(f"{self._key}/now", self._name, "")
            self._linger_for_late_ranks()
        elif self._keeper == getattr(error, "rank", None):
            self._store.swap(f"{self._key}/now", self._name, "")
        else:
            _LEFT[self._key] = self._name, self._keeper
        self._count_out(self._name)

    def _linger_for_late_ranks(self) -> None:
        """Give the ranks that still need the outcome a moment: the store may end with this process."""
        end = time.monotonic() + _FAREWELL_SECONDS
        while time.monotonic() < end and self._store.add(self._tagged("left"), 0) + 1 < self._store.add(
            self._tagged("came"), 0
        ):
            time.sleep(0.002)

    def _count_out(self, name: str) -> None:
        """Leave; the last one deletes what is left of the session."""
        tag = f"{self._key}/{name}"
        left = self._store.add(f"{tag}/left", 1)
        # If none have come, another rank has just deleted everything, and this check has created the key again.
        if not self._is_now(name) and left >= self._store.add(f"{tag}/came", 0):
            self._store.delete(f"{tag}/{key}" for key in ("came", "left", "opener"))
            self._store.delete_values(f"{tag}/{key}" for key in ("door", *LAST_NAMES))

    def _is_now(self, name: str) -> bool:
        return self._store.holds(f"{self._key}/now", name)

    def _tagged(self, name: str) -> str:
        return f"{self._key}/{self._name}/{name}"


_LEFT: dict[str, tuple[str, int]] = {}
"""Key of a place -> the last session in which this process was not the keeper, and that session's keeper."""
_BUSY: set[str] = set()
"""The keys of the places that threads of this process are using."""
_CHANGED = Condition()


@contextmanager
def _turn(place: str, key: str, timeout_seconds: float) -> Iterator[None]:
    """Let one thread of this process at a time take part in sessions of one call."""
    with _CHANGED:
        if not _CHANGED.wait_for(lambda: key not in _BUSY, timeout=timeout_seconds):
            raise DirectoryLockedError(
                f"Another thread of this process has been busy with {place!r} for {timeout_seconds:g} s. Wait for it.",
                path=place,
            )
        _BUSY.add(key)
    try:
        yield
    finally:
        with _CHANGED:
            _BUSY.discard(key)
            _CHANGED.notify_all()


# What the ranks of a session report to each other, and which failed or died, so that nothing hangs.


ANY_PLACE: Final = ""
"""The name by which a rank joins the others' next meeting, whichever it is."""

LAST_NAMES: Final = ("outcome", "failed", "result")
"""Names of the keys that record how a session ended: the leader sets its result before its outcome."""
LEAVE_SECONDS: Final = 5.0
"""How long the leader waits, after a failure, until the others have seen it: its process may host the store."""


class GroupSession(Session):
    """The session of several ranks: all of them reach its end, or all raise. Use `session(...)`.

    All communication uses keys of the store, never a collective, in which a dead rank would hang the others. Each rank
    beats in a thread; the first rank, the leader, watches all the others, and they watch the leader and the ranks for
    which they wait. A rank that leaves with an exception reports it, and the others soon raise `RankFailedError`.

    Every rank calls `meet`, and the methods that meet (`all_of`, `first`, `each`, `agree`), in the same order. The keys
    are deleted at the end.

    Args:
        tag: The prefix of all keys; never used before in this store.
        ranks: The ranks of the default process group that take part.
        rank: This one; if it is not one of them, it only awaits the outcome.
        death_seconds: A rank without a beat for longer counts as dead.
        timeout_seconds: How long to wait for a live rank; None: an hour, or the process group's timeout if longer.
        store: An open one, which is not closed at the end; None: one of its own.
        keep_outcome_keys: Leave the keys of `outcome_keys` to the caller, to be deleted when no rank needs them.

    Example:
        with GroupSession("save/7", range(4), rank) as ranks:
            names = ranks.meet("names", b"...")
            ...
            ranks.finish()
    """

    def __init__(
        self,
        tag: str,
        ranks: Iterable[int],
        rank: int,
        *,
        death_seconds: float = DEATH_SECONDS,
        timeout_seconds: float | None = None,
        store: TimeoutStore | None = None,
        keep_outcome_keys: bool = False,
    ) -> None:
        super().__init__(ranks, rank)
        self.tag = tag
        self.death_seconds = death_seconds
        self._timeout_seconds = timeout_seconds or max(liveness.PEER_TIMEOUT_SECONDS, liveness.group_timeout_seconds())
        self._is_store_mine = store is None
        self._keep_outcome_keys = keep_outcome_keys
        self._given_store = store
        self._store: TimeoutStore
        self._watch: liveness.Watch
        self._heart: liveness.Heartbeat
        self._keys: list[str] = []
        self._meetings = 0
        self._may_be_done = False

    @property
    def is_alone(self) -> bool:
        """False, even if the other ranks have not come."""
        return False

    @property
    def outcome_keys(self) -> list[str]:
        """The keys that record how the session ended."""
        return [self._key(name) for name in LAST_NAMES]

    def __enter__(self) -> Self:
        self._store = self._given_store or open_group_store(self.death_seconds)
        self._heart = liveness.Heartbeat(self._store, f"{liveness.beat_key(self.tag)}/{self.rank}", self.death_seconds)
        self._watch = liveness.Watch(self._store, self.tag, self.rank, self._heart, self.death_seconds)
        self._heart.start()
        self._keys.append(self._heart.key)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                self.fail(error)
            with suppress(RankFailedError):  # the store is gone: the work is done, or another error is more specific
                self._leave(LEAVE_SECONDS if error is not None else self.death_seconds)
        finally:
            self._heart.stop()
            if self._is_store_mine:
                self._store.close()

    def narrow(self, ranks: Collection[int]) -> None:
        """Continue with only these ranks: the others do not take part."""
        self.ranks = sorted(ranks)

    def meet(self, name: str, value: bytes = b"") -> dict[int, bytes]:
        """Wait until all ranks have come here, or raise on all of them.

        Args:
            name: The same on every rank, except those that come to `ANY_PLACE`.
            value: This rank's, of any length.

        Returns:
            Rank -> value, in the order of the ranks.

        Raises:
            RankFailedError: A rank failed, died, or came to another meeting.
        """
        self._meetings += 1
        place = f"meet/{self._meetings}"
        labelled = liveness.pack({0: name.encode(), 1: value})
        if not self.is_leader:
            self.put_key(f"{place}/{self.rank}", labelled)
            return liveness.unpack(self._await(f"{place}/all", self.leader, [self.leader]))
        values = {self.rank: value}
        for rank in self.ranks[1:]:
            said = liveness.unpack(self._await(f"{place}/{rank}", rank, self.ranks))
            if said[0].decode() not in (name, ANY_PLACE) and name != ANY_PLACE:
                raise RankFailedError(
                    f"Rank {rank} is at {said[0].decode()!r}, but rank {self.rank} is at {name!r}. Make the same "
                    "call, with the same arguments, on every rank.",
                    rank=rank,
                )
            values[rank] = said[1]
        self._watch.reset_suspicion(self.ranks)
        self.put_key(f"{place}/all", liveness.pack(values))
        return values

    def all_of(self, value: _Value) -> list[_Value]:
        """Return the values of all ranks in order, on every rank, as `meet` does; JSON must support them."""
        return [json.loads(raw) for raw in self.meet("gather", json.dumps(value).encode()).values()]

    def first(self, work: Callable[[], _Value]) -> _Value:
        """Run work on the leader, and return its result, which JSON must support, on every rank.

        Raises:
            RankFailedError: The work failed; raised on the other ranks. The leader raises its own error.
        """
        value: Any = None
        error: BaseException | None = None
        if self.is_leader:
            try:
                value = work()
            except BaseException as caught:  # noqa: BLE001 - raised below: the other ranks wait for the outcome
                error = caught
        own = [value, None if error is None else describe_error(error)] if self.is_leader else None
        value, failure = json.loads(self.meet("share", json.dumps(own).encode())[self.leader])
        if error is not None:
            raise error
        if failure is not None:
            raise self._failed(self.leader, failure)
        return value  # type: ignore[no-any-return]

    def each(self, work: Callable[[], _Value]) -> _Value:
        """Run work on every rank, and return each rank's own result if none failed.

        Raises:
            RankFailedError: It failed on another rank. A rank where it failed raises its own error.
        """
        made: list[_Value] = []
        error: Exception | None = None
        try:
            made.append(work())
        except Exception as caught:  # noqa: BLE001 - raised by `agree`, when all ranks know
            error = caught
        self.agree(error)
        return made[0]

    def agree(self, error: BaseException | None) -> None:
        """Continue only if no rank has an error: the end of what `each` does, for work that is more than a function.

        Raises:
            RankFailedError: Another rank has an error. A rank with its own error raises that.
        """
        failures = self.all_of(None if error is None else describe_error(error))
        failed = next(((rank, text) for rank, text in zip(self.ranks, failures, strict=True) if text is not None), None)
        if error is None and failed is not None:
            raise self._failed(*failed)
        if error is not None:
            raise error

    def _failed(self, rank: int, text: str) -> RankFailedError:
        return RankFailedError(f"Rank {rank} failed, so all {self.world_size} ranks stop: {text}", rank=rank)

    def wait_for(self, name: str, from_rank: int) -> bytes:
        """Wait for the value that a rank publishes by this name, and return it.

        Raises:
            RankFailedError: A rank failed; or the awaited rank or the leader died.
        """
        return self._await(f"told/{from_rank}/{name}", from_rank, self._watched(from_rank))

    def put_key(self, name: str, value: bytes) -> None:
        """Set a key under the tag, to be deleted at the end."""
        self._keys += self._store.put(self._key(name), value)

    def await_key(self, name: str, from_rank: int) -> bytes:
        """Wait for a key under the tag that a rank sets, and return its value; only that rank is watched."""
        return self._await(name, from_rank, [from_rank])

    def check(self, ranks: Collection[int] | None = None) -> None:
        """Raise if a rank has failed, or one of these sends no heartbeats.

        Args:
            ranks: The ranks to watch; None: the leader, or on the leader all.

        Raises:
            RankFailedError: It names the rank.
        """
        self._watch.check(self._watched() if ranks is None else ranks)

    def look(self, ranks: Collection[int] | None = None) -> None:
        """Do what `check` does, but only if the last check was a while ago."""
        self._watch.look(self._watched() if ranks is None else ranks)

    def await_work(self, work: Any) -> None:
        """Wait for a collective, and check repeatedly whether a rank failed.

        Args:
            work: The `torch.distributed.Work` of a call with `async_op=True`, for CPU tensors.

        Raises:
            RankFailedError: A rank failed or died, or the collective did.
        """
        self._watch.await_collective(work, self.ranks, self._watched(), self._timeout_seconds)

    def find_failed_rank(self, error: RuntimeError) -> RankFailedError:
        """Find the rank that made a collective fail: one that reports it, or one that falls silent."""
        return self._watch.find_failed_rank(error, self.ranks)

    def fail(self, error: BaseException) -> None:
        """Report to the others that this rank failed, so that they raise; the first failure counts.

        A rank that waits for the leader raises when the leader gives up, too: the leader may be past the point where
        the failure matters. If the store is gone, nothing can be reported, and the others detect the failure
        themselves.
        """
        if self.rank not in self.ranks:
            return
        record = liveness.failure_record(error, self.rank, may_be_done=self._may_be_done)
        with suppress(RankFailedError):
            known = self._store.get(liveness.failed_key(self.tag))
            if self.is_leader:
                self.put_key("failed", liveness.final_record(known or record))
            elif known is None:
                self.put_key("failed", record)

    def begin_step(self) -> None:
        """Note that from here on the leader's step for all ranks, such as a commit, may be done: errors state this.

        This is no context manager: a save begins its step deep inside its commit, and an error that leaves the step
        must still state that it may be done.

        The leader calls this right before the step, once the others have reported that they have called it, too. These
        need not do so if they call `finish` next.
        """
        self._may_be_done = True

    def end_step(self) -> None:
        """Note that the step was not the last one: until the next one begins, errors mean that it is not done."""
        self._may_be_done = False

    def finish(self, value: bytes = b"", *, timeout_seconds: float | None = None) -> bytes:
        """Publish the outcome, on the leader; wait for it, on the others.

        The leader's step for all ranks comes right before: see `begin_step`. After it no failure matters any more, and
        nothing is raised here on the leader.

        Args:
            value: The leader's.
            timeout_seconds: How long to wait for a live leader; None: as long as elsewhere.

        Returns:
            What the leader published.

        Raises:
            RankFailedError: A rank failed before, or the leader died; then its step may be done or not.
        """
        if self.is_leader:
            with suppress(RankFailedError):  # the store is gone: the others raise, but the step is done
                self.put_key("outcome", value)
            return value
        self.begin_step()
        return self._await("outcome", self.leader, [self.leader], timeout_seconds)

    def _key(self, name: str) -> str:
        return f"{self.tag}/{name}"

    def _watched(self, *more: int) -> Collection[int]:
        return self.ranks if self.is_leader else {self.leader, *more}

    def _await(self, name: str, rank: int, watched: Collection[int], timeout_seconds: float | None = None) -> bytes:
        try:
            return self._awaited(name, rank, watched, timeout_seconds or self._timeout_seconds)
        except RankFailedError as error:
            if self._watch.has_final_word or not self._may_be_done:
                raise
            raise type(error)(liveness.with_unknown_outcome(str(error)), rank=error.rank) from error

    def _awaited(self, name: str, rank: int, watched: Collection[int], timeout_seconds: float) -> bytes:
        waiting = liveness.Wait(timeout_seconds)
        while (value := self._store.get(self._key(name))) is None:
            try:
                self._watch.look(watched, awaits_leader=rank == self.leader != self.rank)
            except RankFailedError:
                if (value := self._store.get(self._key(name))) is None:
                    raise
                return value  # the rank set it before it ended
            if waiting.is_word_due():
                logger.info("Rank %d has waited for rank %d for %.0f s: %r.", self.rank, rank, waiting.seconds, name)
            if waiting.is_over:
                raise RankMissingError(
                    f"Rank {rank} is alive, but did not reach {name!r} within {timeout_seconds:g} s. Check what it "
                    "is doing: every rank must make the same call.",
                    rank=rank,
                )
            waiting.pause()
        return value

    def _leave(self, timeout_seconds: float) -> None:
        """Leave. The leader, whose process may host the store, leaves last, and deletes the keys of all ranks."""
        if not self.is_leader:
            self._heart.stop()
            bye = self._key(f"bye/{self.rank}")
            mine = self._without_last(self._keys)
            if self.rank in self.ranks:
                self._store.put(bye, json.dumps([*mine, bye]).encode())
            else:
                self._store.delete(mine)
            return
        keys_of_others = self._keys_of_others(timeout_seconds)
        self._heart.stop()
        if keys_of_others is None:  # A rank that was stopped may continue: it must find what it waits for.
            return
        keys = {*keys_of_others, *self._keys, *self.outcome_keys}
        self._store.delete(self._without_last(keys) if self._keep_outcome_keys else keys)

    def _without_last(self, keys: Iterable[str]) -> list[str]:
        """Return the keys without the last ones and the pieces of their values."""
        return [key for key in keys if key.partition("#")[0] not in self.outcome_keys]

    def _keys_of_others(self, timeout_seconds: float) -> list[str] | None:
        """Wait until the others have left; return the keys that they have set, or None if one has not left."""
        end = time.monotonic() + timeout_seconds
        left = self.ranks[1:]
        keys: list[str] = []
        while left:
            byes = self._store.get_many(self._key(f"bye/{rank}") for rank in left)
            keys += [key for bye in byes if bye is not None for key in json.loads(bye)]
            left = [rank for rank, bye in zip(left, byes, strict=True) if bye is None]
            if left and (time.monotonic() > end or not self._watch.is_anyone_alive(left)):
                return None
            time.sleep(0.002 if left else 0)
        return keys
