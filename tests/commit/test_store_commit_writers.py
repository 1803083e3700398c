"""Several writers whose requests come in any order: the highest save counts, and who was overtaken is told so."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from hfshard.errors import RemoteChangedError
from hfshard.saving.save_request import SaveRequest
from tests.stores.saving.checkpoints import (
    config,
    found_in,
    loaded,
    pickles,
    request,
    save_into,
    saved,
    settled,
    single,
    stock_shards,
)
from tests.stores.saving.memory_store import MemoryStore

CASES: dict[str, tuple[Callable[[], dict[str, bytes]], list[SaveRequest]]] = {
    "into nothing": (dict, [request(2, None), request(4, None)]),
    "into nothing, with a config": (dict, [request(2, 2), request(4, 4)]),
    "beside a config": (lambda: {"config.json": config(1)}, [request(2, 2), request(4, 1)]),
    "over shards": (lambda: saved(request(1, 1)), [request(2, 1), request(4, 1)]),
    "over shards, a new config": (lambda: saved(request(1, 1)), [request(2, 2), request(4, 1)]),
    "over shards, two new configs": (lambda: saved(request(1, 1)), [request(2, 2), request(4, 4)]),
    "there and back again": (lambda: saved(request(1, 1)), [request(2, 2), request(1, 1), request(4, 1)]),
    "three": (lambda: saved(request(1, 1)), [request(2, 2), request(4, 4), request(5, 1)]),
    "over stock shards": (lambda: stock_shards(1) | {"config.json": config(1)}, [request(2, 2), request(4, 1)]),
    "over a single file": (lambda: single(1), [request(2, None), request(4, None)]),
    "over a single file, a new config": (
        lambda: single(1) | {"config.json": config(1)}, [request(2, 2), request(4, 1)],
    ),
    "over pickles": (lambda: pickles(1) | {"config.json": config(1)}, [request(2, 2), request(4, 1)]),
}  # fmt: skip
SEEDS = range(4)


class Turns:
    """Lets one save after another go on to its next request, in an order that a seed gives.

    A save can have several threads that wait: it puts its small files at once. Each goes on in a turn of its own.
    """

    def __init__(self, count: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._stays = self._random.choice((0, 0.5, 0.9))
        self._condition = threading.Condition()
        self._running = set(range(count))
        self._waiting: dict[object, int] = {}
        """Each thread that waits -> its save."""
        self._turn: object = None
        self._last: int | None = None

    def take(self, number: int) -> None:
        """Wait for the turn of a thread."""
        thread = object()
        with self._condition:
            self._waiting[thread] = number
            self._choose()
            self._condition.wait_for(lambda: self._turn is thread)
            del self._waiting[thread]
            self._turn = None
            self._choose()  # another thread of this save may be the next

    def leave(self, number: int) -> None:
        """The save makes no more requests."""
        with self._condition:
            self._running.discard(number)
            self._choose()

    def _choose(self) -> None:
        waiting = set(self._waiting.values())
        if self._turn is None and waiting and waiting == self._running:
            stays = self._last in waiting and self._random.random() < self._stays
            self._last = self._last if stays else self._random.choice(sorted(waiting))
            self._turn = next(thread for thread, number in self._waiting.items() if number == self._last)
            self._condition.notify_all()


def wanted_by(one: SaveRequest) -> tuple[Any, Any]:
    value = float(next(iter(one.tensors.values()))[0])  # type: ignore[index]
    return (None if one.config is None else json.loads(one.config)["value"], {value}), {value}


class Meeting:
    """Some saves into one store, each in a thread, with their requests in an order that a seed gives."""

    def __init__(self, before: dict[str, bytes], requests: list[SaveRequest], seed: int) -> None:
        self.objects = dict(before)
        self.uploads: set[str] = set()
        self.seen: list[tuple[Any, Any, Any]] = []
        """What hfshard, transformers and huggingface_hub find after each change."""
        self.outcomes: dict[int, Exception | None] = {}
        self._turns = Turns(len(requests), seed)
        threads = [threading.Thread(target=self._save, args=pair) for pair in enumerate(requests)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _save(self, number: int, wanted: SaveRequest) -> None:
        store = MemoryStore(self.objects)
        store.uploads = self.uploads
        store.before = lambda kind, name: self._turns.take(number)
        store.after = lambda kind, name: self._look(kind)
        self.outcomes[number] = None
        try:
            save_into(store, wanted)
        except Exception as error:
            self.outcomes[number] = error
        self._turns.leave(number)

    def _look(self, kind: str) -> None:
        if kind in ("put", "delete"):  # nobody looks at shards before they have an index
            self.seen.append((loaded(dict(self.objects)), *found_in(dict(self.objects))))


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each save sends one shard after the other."""
    monkeypatch.setenv("HFSHARD_WRITERS", "1")


@pytest.mark.parametrize("name", CASES)
def test_writers_who_meet_leave_the_highest_checkpoint_and_no_mixture(name: str) -> None:
    make, requests = CASES[name]
    before = make()
    refused = 0
    for seed in SEEDS:
        met = Meeting(before, requests, seed)

        errors = [error for error in met.outcomes.values() if error is not None]
        assert {type(error) for error in errors} <= {RemoteChangedError}, (seed, errors)
        refused += len(errors)
        winners = [wanted_by(requests[number]) for number, error in met.outcomes.items() if error is None]
        assert found_in(met.objects) in winners, seed
        assert loaded(met.objects) in [one[0] for one in winners], seed
        old = found_in(before)
        wholes = [loaded(before), *(wanted_by(one)[0] for one in requests)]
        configs = {None, *(whole[0] for whole in (old[0], *wholes) if whole is not None)}
        weights = [whole[1] for whole in (old[0], *wholes) if whole is not None]
        for by_hfshard, by_transformers, by_hub in met.seen:
            assert by_hfshard in wholes, seed
            # beside plain objects that are being replaced, an error or one's config beside the other's weights
            assert by_transformers is None or (by_transformers[0] in configs and by_transformers[1] in weights), seed
            assert by_hub in [None, "part", old[1], *(wanted_by(one)[1] for one in requests)], seed
        last = MemoryStore(met.objects)
        last.uploads = met.uploads
        save_into(last, request(9, 9))
        assert loaded(met.objects) == (9, {9.0})
        assert met.objects.keys() == settled(met.objects), seed
        assert not met.uploads, seed
    assert refused


@pytest.mark.parametrize(
    ("before", "new"),
    [
        (lambda: saved(request(1, 1)), lambda: request(2, 1)),
        (lambda: saved(request(1, 1)), lambda: request(2, 2)),
        (lambda: saved(request(1, 1, with_files=True)), lambda: request(2, 1, with_files=True)),
        (dict, lambda: request(2, 2, with_files=True)),
        (lambda: single(1) | {"config.json": config(1)}, lambda: request(2, 2)),
    ],
)
def test_writers_of_the_very_same_all_succeed(
    before: Callable[[], dict[str, bytes]], new: Callable[[], SaveRequest]
) -> None:
    for seed in range(8):
        met = Meeting(before(), [new(), new()], seed)
        assert met.outcomes == {0: None, 1: None}, seed
        assert loaded(met.objects) == wanted_by(new())[0], seed
        save_into(MemoryStore(met.objects), new())
        assert met.objects.keys() - {"generation_config.json"} == settled(met.objects), seed
