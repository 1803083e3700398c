"""One committing save at a time where a store has no conditional put: each puts a mark, and looks for others."""

from __future__ import annotations

import time
from typing import Final

from hfshard.storage.format.names import WeightNames
from hfshard.stores.protocols import Store

_PATIENCE_SECONDS: Final = 5.0
"""How long another save may do nothing before it is taken for dead: a commit is a few requests of under a second."""
_LOOK_SECONDS: Final = 0.1
"""Between two looks."""


def take_turn(store: Store, names: WeightNames, digits: str) -> set[str]:
    """Put a mark, and wait until no other save that is alive has one.

    Each save puts its mark before it looks, so that of two at least one sees the other. Who sees a mark whose name
    comes before its own takes its own back, and tries again when the other one is gone; the other one waits until
    then. So nobody goes on beside another mark, but for that of a save which was killed.

    Args:
        store: The place.
        names: The checkpoint's file names.
        digits: 16 hex digits of this save's own.

    Returns:
        The marks to be removed at the end: this save's, and those of dead ones.
    """
    own = names.turn_mark(digits)
    dead: set[str] = set()
    is_put = False
    while True:
        if not is_put:
            store.put(own, digits.encode())
            is_put = True
        others = _other_marks(store, names, own) - dead
        if not others:
            return {own} | dead
        if min(others) < own:
            store.delete([own])
            is_put = False
        dead |= _await_others(store, names, own, dead)


def _await_others(store: Store, names: WeightNames, own: str, dead: set[str]) -> set[str]:
    """Wait until there are no marks of others; returns those of saves that do nothing any more."""
    seen = None
    deadline = 0.0
    while True:
        now = store.list_objects()
        now.pop(own, None)
        others = {name for name in now if names.is_turn_mark(name)} - dead
        if not others:
            return set()
        if now != seen:
            seen = now
            deadline = time.monotonic() + _PATIENCE_SECONDS
        elif time.monotonic() > deadline:
            return others
        time.sleep(_LOOK_SECONDS)


def _other_marks(store: Store, names: WeightNames, own: str) -> set[str]:
    return {name for name in store.list_objects() if names.is_turn_mark(name)} - {own}
