"""Ranks of a call: those of the process group that it was given, or else of the default one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch.distributed as dist

from hfshard._util.threads import bound
from hfshard.errors import InvalidArgumentError

_GIVEN: Final[ContextVar[dist.ProcessGroup | None]] = ContextVar("hfshard_process_group", default=None)
"""The process group of this thread's call; None: it has the ranks of the default one."""


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
