"""Applies a restoration on all ranks, or on none: whatever refuses, every part gets its old state back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from hfshard.training.parts.pending_loads import PendingLoad, StatefulLoad
from hfshard.training.ranks import Ranks

logger = logging.getLogger(__name__)

Undo = Callable[[], None]


def load_all(
    objects: Sequence[StatefulLoad], pending_loads: Sequence[PendingLoad], directory: str, ranks: Ranks
) -> None:
    """Load everything on every rank, or nothing on any. Every rank must call.

    Args:
        objects: The user's own objects.
        pending_loads: The checked loads; those of weights have no undo.
        directory: The checkpoint's, for messages.
        ranks: This process among those that restore.

    Raises:
        StateDictMismatchError: One refused.
        RankFailedError: One refused on another rank.
    """
    undo: list[Undo] = []
    weights = [one for one in pending_loads if one.undo is None]
    is_kept = any(ranks.all_of(any(one.may_refuse for one in weights)))
    with all_or_nothing(ranks, undo):
        _load_parts(objects, pending_loads, directory, undo, is_last=ranks.world_size == 1 and not is_kept)
    with all_or_nothing(ranks, undo):
        if is_kept:  # a copy in host memory, which weights that nothing can refuse do not need
            undo += [one.keep() for one in weights if one.keep is not None]
        for one in weights:
            one.run(directory, "Nothing was restored" if is_kept else "It may be half restored")


@contextmanager
def all_or_nothing(ranks: Ranks, undo: Sequence[Undo] = ()) -> Iterator[None]:
    """Raise what the block raises on one rank on every rank, after what was done is undone. Every rank must call.

    Args:
        ranks: This process among those that restore.
        undo: Called in reverse if a rank fails, all of them, whatever one raises; the block may add to it.

    Raises:
        RankFailedError: Another rank failed. A rank that failed raises its own error.
    """
    error: BaseException | None = None
    try:
        yield
    except BaseException as caught:  # noqa: BLE001 - raised by `agree`, when all ranks know
        error = caught
    try:
        ranks.agree(error)
    except BaseException:
        for put_back in reversed(undo):
            try:
                put_back()
            except Exception as failure:  # noqa: BLE001 - the first refusal is being raised, and the others are left
                logger.error("A part of the state can't be put back as it was, and is mixed: %s", failure)
        raise


def _load_parts(
    objects: Sequence[StatefulLoad],
    pending_loads: Sequence[PendingLoad],
    directory: str,
    undo: list[Undo],
    *,
    is_last: bool,
) -> None:
    """Load all that may be refused, and note how it is put back.

    The largest object comes last: where nothing may refuse after it (`is_last`), no copy of what it has is needed.
    """
    in_order = sorted(objects, key=lambda one: one.nbytes)
    last = in_order[-1:] if is_last else []
    for one in in_order[: len(in_order) - len(last)]:
        undo.append(partial(one.put_back, one.now()))
        one.load()
    for pending_load in pending_loads:
        if pending_load.undo is not None:
            undo.append(pending_load.undo)
            pending_load.run(directory)
    for one in last:
        one.load()
