"""A save that sleeps at one of its requests while others save: the highest one counts, and nothing is mixed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from hfshard.errors import RemoteChangedError
from hfshard.saving.save_request import SaveRequest
from tests.stores.saving.checkpoints import config, found_in, loaded, pickles, request, save_into, saved, settled
from tests.stores.saving.memory_store import MemoryStore

Values = tuple[int, int, int]
"""Of the weights, the config, and the generation config."""
GENERATION = "generation_config.json"

BEFORE: dict[str, Callable[[], dict[str, bytes]]] = {
    "nothing": dict,
    "shards": lambda: saved(request(1, 1)),
    "shards and small files": lambda: saved(wanted(1, 1, 1)),
    "pickles": lambda: pickles(1) | {"config.json": config(1)},
}
MEETINGS: dict[str, tuple[Values, list[Values]]] = {
    "a new config, beside others that keep the old one": ((2, 2, 2), [(3, 1, 2), (4, 1, 1)]),
    "a new config, beside others that change it twice": ((2, 2, 2), [(3, 3, 1), (4, 1, 1)]),
    "a new generation config, beside one that keeps the old one": ((2, 1, 2), [(3, 1, 1)]),
    "the same small files": ((2, 2, 2), [(3, 2, 2)]),
}


def wanted(weights: int, of_config: int, of_files: int) -> SaveRequest:
    return replace(request(weights, of_config), model_files={GENERATION: config(of_files)})


def seen_in(objects: dict[str, bytes]) -> tuple[Any, ...]:
    """What hfshard finds in the store, and stock readers in a copy."""
    return loaded(objects), found_in(objects), json.loads(objects.get(GENERATION, b"null"))


def seen_after(values: Values) -> tuple[Any, ...]:
    weights, of_config, of_files = values
    return (of_config, {weights}), ((of_config, {weights}), {weights}), {"value": of_files}


def meet(objects: dict[str, bytes], own: Values, others: Sequence[Values], at: int) -> tuple[Exception | None, str]:
    """Save, and let others save right before request number `at`; gives the save's error, and that request."""
    store = MemoryStore(objects)
    asked: list[str] = []

    def before(kind: str, name: str) -> None:
        asked.append(f"{kind} {name}")
        if len(asked) == at + 1:
            for values in others:
                other = MemoryStore(objects)
                other.address = store.address
                save_into(other, wanted(*values))

    store.before = before
    error = None
    try:
        save_into(store, wanted(*own))
    except RemoteChangedError as raised:
        error = raised
    return error, asked[at] if at < len(asked) else ""


@pytest.mark.parametrize("meeting", MEETINGS)
@pytest.mark.parametrize("before", BEFORE)
def test_who_sleeps_at_any_request_mixes_nothing(before: str, meeting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HFSHARD_WRITERS", "1")
    own, others = MEETINGS[meeting]
    start = BEFORE[before]()
    at = refused = 0
    while True:
        objects = dict(start)
        error, asked = meet(objects, own, others, at)
        if not asked:
            break
        refused += error is not None
        seen = seen_in(objects)
        assert seen in ([seen_after(own)] if at == 0 else [seen_after(own), seen_after(others[-1])]), (at, asked)
        assert error is None or seen == seen_after(others[-1]), (at, asked)

        save_into(MemoryStore(objects), wanted(9, 9, 9))
        assert seen_in(objects) == seen_after((9, 9, 9)), (at, asked)
        assert objects.keys() == {*settled(objects), GENERATION}, (at, asked)
        at += 1
    assert refused
