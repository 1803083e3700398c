"""Ranks of a call: those of the process group that it was given, or else of the default one; and their session."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from enum import StrEnum
from typing import Any, Final, TypeVar

import torch.distributed as dist

from hfshard._util.threads import bound
from hfshard.errors import InvalidArgumentError, RankFailedError

_Value = TypeVar("_Value")

_GIVEN: Final[ContextVar[dist.ProcessGroup | None]] = ContextVar("hfshard_process_group", default=None)
"""The process group of this thread's call; None: it has the ranks of the default one."""


WAITS_FOR_OTHERS: Final[ContextVar[bool]] = ContextVar("hfshard_waits_for_others", default=True)
"""Whether this thread's calls wait for ranks that they do not need; False where the others are known not to call."""


@contextmanager
def among(process_group: dist.ProcessGroup | None) -> Iterator[None]:
    """Give the calls in the block the ranks of a process group.

    Args:
        process_group: Of torch.distributed, with this rank; None: that of the enclosing block, if there is one.

    Raises:
        InvalidArgumentError: It is not a process group, or this rank is not in it.
    """
    check_process_group(process_group)
    if process_group is None:
        yield
        return
    with bound(_GIVEN, process_group):
        yield


def check_process_group(process_group: Any) -> None:
    """Reject what is not a process group of this rank; None is accepted as the default one.

    Raises:
        InvalidArgumentError: It is not one, or this rank is not in it.
    """
    if process_group is None:
        return
    if not (dist.is_available() and dist.is_initialized()):
        raise InvalidArgumentError(
            "process_group was passed, but torch.distributed has none. Call init_process_group first."
        )
    if process_group == dist.GroupMember.NON_GROUP_MEMBER:  # what new_group returns to the others
        raise _not_in_it("")
    if not isinstance(process_group, dist.ProcessGroup):
        raise InvalidArgumentError(
            f"process_group must be a ProcessGroup of torch.distributed, got a {type(process_group).__name__}. Pass "
            "what new_group returned, or mesh.get_group() of a one-dimensional DeviceMesh."
        )
    try:
        ranks = dist.get_process_group_ranks(process_group)
    except (KeyError, ValueError) as error:
        raise InvalidArgumentError(
            "process_group is unknown to torch.distributed: it was destroyed, or was not created by new_group."
        ) from error
    if dist.get_rank() not in ranks:
        raise _not_in_it(f" of ranks {', '.join(map(str, sorted(ranks)))}")


def call_group() -> dist.ProcessGroup | None:
    """Return the process group that this call was given; None: the default one."""
    return _GIVEN.get()


def call_ranks() -> tuple[int, ...]:
    """Return the ranks of this call, ascending, numbered as in the default process group; empty if there is none."""
    if not (dist.is_available() and dist.is_initialized()):
        return ()
    given = call_group()
    return tuple(range(dist.get_world_size()) if given is None else sorted(dist.get_process_group_ranks(given)))


def has_other_ranks() -> bool:
    """Return whether this call has several ranks."""
    return len(call_ranks()) > 1


def _not_in_it(which: str) -> InvalidArgumentError:
    rank = dist.get_rank()
    return InvalidArgumentError(
        f"Rank {rank} is not in the process group{which} that was passed as process_group=. Make this call on that "
        f"group's ranks only, or pass rank {rank} a group that it is in."
    )


# What the ranks of a call have in common, from arrival to outcome.


class Role(StrEnum):
    """A rank's role in one call."""

    LEADER = "leader"
    """Take part, and lead: commit, and call `session.finish(...)`."""
    MEMBER = "member"
    """Take part."""
    LATE = "late"
    """The others began without it: call `session.finish()`, which awaits and returns the outcome of their call."""
    DECLINED = "declined"
    """Do nothing."""


class Session:
    """The ranks of one call, from arrival to outcome. This one has no others: every method is local and immediate.

    `GroupSession` is that of several ranks. Args, returns and raises are described there.
    """

    tag = ""
    """The prefix of all keys."""
    death_seconds = math.inf
    """A rank without a beat for longer counts as dead."""

    def __init__(self, ranks: Iterable[int] = (0,), rank: int = 0) -> None:
        self.ranks, self.rank = sorted(ranks), rank
        self._orders = 0
        self._told: dict[str, bytes] = {}

    @property
    def is_alone(self) -> bool:
        """True if the call has no other ranks."""
        return True

    @property
    def leader(self) -> int:
        """The lowest of the ranks."""
        return self.ranks[0]

    @property
    def is_leader(self) -> bool:
        """True on the leader, which commits."""
        return self.rank in self.ranks[:1]

    @property
    def role(self) -> Role:
        """This rank's role in the call."""
        if not self.ranks:
            return Role.DECLINED
        if self.rank not in self.ranks:
            return Role.LATE
        return Role.LEADER if self.is_leader else Role.MEMBER

    @property
    def position(self) -> int:
        """The position of this rank among the ranks, from 0."""
        return self.ranks.index(self.rank)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def meet(self, name: str, value: bytes = b"") -> dict[int, bytes]:
        """Wait for all ranks, and exchange a value: rank -> value, in the order of the ranks."""
        return {self.rank: value}

    def all_of(self, value: _Value) -> list[_Value]:
        """Return the values of all ranks in order, on every rank."""
        return [value]

    def first(self, work: Callable[[], _Value]) -> _Value:
        """Run work on the leader, and return its result on every rank."""
        return work()

    def each(self, work: Callable[[], _Value]) -> _Value:
        """Run work on every rank, and return each rank's own result if none failed."""
        return work()

    def agree(self, error: BaseException | None) -> None:
        """Continue only if no rank has an error."""
        if error is not None:
            raise error

    def tell(self, name: str, value: bytes = b"") -> None:
        """Publish a value, once, for which any rank may `wait_for`."""
        self.put_key(f"told/{self.rank}/{name}", value)

    def wait_for(self, name: str, from_rank: int) -> bytes:
        """Wait for the value that a rank publishes by this name, and return it."""
        return self.await_key(f"told/{from_rank}/{name}", from_rank)

    def gather(self, name: str, value: bytes) -> dict[int, bytes]:
        """Send a value to the leader, once; return those of all ranks there, in order, and nothing on the others.

        Raises:
            RankFailedError: A rank failed or died; only the leader waits.
        """
        if not self.is_leader:
            self.tell(name, value)
            return {}
        return {self.rank: value, **{rank: self.wait_for(name, rank) for rank in self.ranks[1:]}}

    def order(self, value: bytes) -> None:
        """Publish the leader's next order, which each other rank gets by `next_order`, and may `answer`."""
        self._orders += 1
        self.tell(f"order/{self._orders}", value)

    def next_order(self) -> bytes:
        """Wait for the leader's next order.

        Raises:
            RankFailedError: A rank failed; or the leader died.
        """
        self._orders += 1
        return self.wait_for(f"order/{self._orders}", self.leader)

    def answer(self, value: bytes = b"") -> None:
        """Answer the last order, on another rank than the leader."""
        self.tell(f"done/{self._orders}", value)

    def answers(self, ranks: Iterable[int]) -> dict[int, bytes]:
        """Wait for these ranks' answers to the last order, on the leader; return them in ascending order of rank.

        Raises:
            RankFailedError: A rank failed or died.
        """
        return {rank: self.wait_for(f"done/{self._orders}", rank) for rank in sorted(ranks)}

    def put_key(self, name: str, value: bytes) -> None:
        """Set a key of the session, to be deleted at its end."""
        self._told[name] = value

    def await_key(self, name: str, from_rank: int) -> bytes:
        """Wait for a key of the session that a rank sets, and return its value; only that rank is watched."""
        return self._told[name]

    def check(self, ranks: Collection[int] | None = None) -> None:
        """Raise if a rank has failed, or one of these sends no heartbeats."""

    def look(self, ranks: Collection[int] | None = None) -> None:
        """Do what `check` does, but only if the last check was a while ago."""

    def await_work(self, work: Any) -> None:
        """Wait for a collective, and check repeatedly whether a rank failed."""
        work.wait()

    def find_failed_rank(self, error: RuntimeError) -> RankFailedError:
        """Find the rank that made a collective fail."""
        return RankFailedError(str(error), rank=self.rank)

    def fail(self, error: BaseException) -> None:
        """Report to the others that this rank failed, so that they raise."""

    def begin_step(self) -> None:
        """Note that from here on the leader's step for all ranks may be done."""

    def end_step(self) -> None:
        """Note that the step was not the last one."""

    def finish(self, value: bytes = b"", *, timeout_seconds: float | None = None) -> bytes:
        """Publish the outcome, on the leader; wait for it, on the others."""
        return value


@contextmanager
def together_if(is_wanted: bool, meet: Callable[[], AbstractContextManager[Session]]) -> Iterator[Session]:
    """Meet the other ranks of this call, where there are any and each has a part; else, yield a session of one."""
    if not is_wanted or not has_other_ranks():
        yield Session()
        return
    with meet() as ranks:
        yield ranks
