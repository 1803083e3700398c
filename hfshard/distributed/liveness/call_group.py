"""Which ranks a call has: those of the process group that it was given, or else of the default one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch.distributed as dist

from hfshard.errors import InvalidArgumentError

_GIVEN: Final[ContextVar[dist.ProcessGroup | None]] = ContextVar("hfshard_process_group", default=None)
"""Of the call of this thread; None: it has the ranks of the default process group."""


@contextmanager
def among(process_group: dist.ProcessGroup | None) -> Iterator[None]:
    """Let what is called in the block have the ranks of a process group.

    Args:
        process_group: Of torch.distributed, with this rank; None: that of the block around this one, if there is one.

    Raises:
        InvalidArgumentError: It is no process group, or this rank is not in it.
    """
    check_process_group(process_group)
    if process_group is None:
        yield
        return
    token = _GIVEN.set(process_group)
    try:
        yield
    finally:
        _GIVEN.reset(token)


def check_process_group(process_group: Any) -> None:
    """Refuse what is no process group of this rank; None is taken for the default one.

    Raises:
        InvalidArgumentError: It is none, or this rank is not in it.
    """
    if process_group is None:
        return
    if not (dist.is_available() and dist.is_initialized()):
        raise InvalidArgumentError("process_group was given, and torch.distributed has none: init_process_group first.")
    if process_group == dist.GroupMember.NON_GROUP_MEMBER:  # what new_group gives to the others
        raise _not_in_it("")
    if not isinstance(process_group, dist.ProcessGroup):
        raise InvalidArgumentError(
            f"process_group must be a ProcessGroup of torch.distributed, got a {type(process_group).__name__}. Give "
            "what new_group returned, or of a DeviceMesh of one dimension mesh.get_group()."
        )
    try:
        ranks = dist.get_process_group_ranks(process_group)
    except (KeyError, ValueError) as error:
        raise InvalidArgumentError(
            "process_group is none of torch.distributed's: it was destroyed, or was not made by new_group."
        ) from error
    if dist.get_rank() not in ranks:
        raise _not_in_it(f" of ranks {', '.join(map(str, sorted(ranks)))}")


def call_group() -> dist.ProcessGroup | None:
    """The process group that this call was given; None: the default one."""
    return _GIVEN.get()


def call_ranks() -> tuple[int, ...]:
    """The ranks of this call, ascending, by their numbers in the default process group; empty where there is none."""
    if not (dist.is_available() and dist.is_initialized()):
        return ()
    given = call_group()
    return tuple(range(dist.get_world_size()) if given is None else sorted(dist.get_process_group_ranks(given)))


def has_other_ranks() -> bool:
    """Whether this call has several ranks."""
    return len(call_ranks()) > 1


def place_of_call(place: str) -> str:
    """What a call is about, told apart from the same call of other ranks."""
    ranks = call_ranks()
    return place if len(ranks) == dist.get_world_size() else f"{place} of ranks {', '.join(map(str, ranks))}"


def _not_in_it(which: str) -> InvalidArgumentError:
    rank = dist.get_rank()
    return InvalidArgumentError(
        f"Rank {rank} is not in the process group{which} that it was given as process_group=. Make this call on the "
        f"ranks of that group only, or give rank {rank} a group that it is in."
    )
