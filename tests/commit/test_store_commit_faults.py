"""Errors, lost answers, outages and kills at every request of every transition: old or new loads, and nothing stays."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import load_torch_model
from torch import nn

import hfshard
from hfshard.errors import CommitUnfinishedError, HfshardError, RemoteChangedError, StoreConnectionError, StoreError
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

INDEX = "model.safetensors.index.json"
PICKLES = "pytorch_model.bin"


class _KilledError(BaseException):
    """The process is dead: no request is made any more."""


@dataclass(frozen=True)
class Transition:
    before: Callable[[], dict[str, bytes]]
    new: SaveRequest


TRANSITIONS = {
    "into nothing": Transition(dict, request(2, None)),
    "into nothing, with a config": Transition(dict, request(2, 2, with_files=True)),
    "beside a config": Transition(lambda: {"config.json": config(1)}, request(2, 2)),
    "over shards": Transition(lambda: saved(request(1, None)), request(2, None)),
    "over shards, same config": Transition(lambda: saved(request(1, 1)), request(2, 1)),
    "over shards, new config": Transition(
        lambda: saved(request(1, 1, with_files=True)), request(2, 2, with_files=True)
    ),
    "over shards, first config": Transition(lambda: saved(request(1, None)), request(2, 2)),
    "over shards, no config any more": Transition(lambda: saved(request(1, 1)), request(2, None, drops_config=True)),
    "one shard over shards": Transition(lambda: saved(request(1, 1)), request(2, 2, limit=10**6)),
    "over stock shards": Transition(lambda: stock_shards(1) | {"config.json": config(1)}, request(2, 2)),
    "over a single file": Transition(lambda: single(1), request(2, None)),
    "over a single file, new config": Transition(lambda: single(1) | {"config.json": config(1)}, request(2, 2)),
    "over pickles": Transition(lambda: pickles(1), request(2, None)),
    "over pickles, new config": Transition(lambda: pickles(1) | {"config.json": config(1)}, request(2, 2)),
}


class Faults:
    """Does something at the request of a number, counted from 0."""

    def __init__(self, store: MemoryStore, at: int, kind: str) -> None:
        self.store, self.at, self.kind = store, at, kind
        self.before_it: dict[str, bytes] = {}
        self.late: dict[str, bytes] = {}
        """What a put or a copy that got no answer puts later."""
        self.count = -1
        self.is_hit = False
        store.before, store.after = self.before, self.after

    def before(self, kind: str, name: str) -> None:
        if self.is_hit and self.kind == "killed":
            raise _KilledError
        if self.is_hit and self.kind == "down":
            raise _unanswered("The store is down.")
        self.count += 1
        if self.count == self.at and self.kind not in ("lost", "late"):
            self.is_hit = True
            raise _KilledError if self.kind == "killed" else _unanswered(f"{kind} {name} failed.")
        if self.count == self.at:
            self.before_it = dict(self.store.objects)

    def after(self, kind: str, name: str) -> None:
        """After a change was made: its answer is lost; if it is late, it was not made yet."""
        if self.count == self.at and self.kind in ("lost", "late"):
            self.is_hit = True
            if self.kind == "late":
                self.late = {one: raw for one, raw in self.store.objects.items() if self.before_it.get(one) != raw}
                self.store.objects.clear()
                self.store.objects.update(self.before_it)
            raise _unanswered(f"Nobody can tell whether {kind} {name} was done.")


def _unanswered(words: str) -> StoreError:
    error = StoreConnectionError(words)
    error.may_be_done = True
    return error


def outcome(folder: Path) -> tuple[Any, Any]:
    """What `found_in` says, found by real readers."""
    found: list[Any] = [None, None]
    with suppress(HfshardError):
        values = {float(tensor[0]) for tensor in hfshard.load_state_dict(folder).values()}
        path = folder / "config.json"
        stored = json.loads(path.read_bytes()).get("value") if path.exists() else None
        found[0] = (stored, values)
    model = nn.Module()
    model.layer = nn.ParameterList(torch.zeros(4) for _ in range(3))
    with suppress(Exception):
        load_torch_model(model, folder)
        found[1] = {float(tensor[0]) for tensor in model.state_dict().values()}
    return found[0], found[1]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Requests come in one order."""
    monkeypatch.setenv("HFSHARD_WRITERS", "1")
    yield


CASES: list[Any] = [(name, kind) for name in TRANSITIONS for kind in ("killed", "failed")]
CASES += [
    pytest.param(name, kind, marks=pytest.mark.slow if (number + turn) % 3 else [])
    for number, name in enumerate(TRANSITIONS)
    for turn, kind in enumerate(("lost", "down", "late"))
]  # by turns without --slow


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_at_every_request_the_old_or_the_new_checkpoint_loads(name: str, kind: str, tmp_path: Path) -> None:
    transition = TRANSITIONS[name]
    before = transition.before()
    old, old_loaded = found_in(before), loaded(before)
    stops: list[tuple[str, BaseException | None, dict[str, bytes]]] = []
    while True:
        store = MemoryStore(dict(before))
        faults = Faults(store, len(stops), kind)
        raised: BaseException | None = None
        try:
            save_into(store, transition.new)
        except (HfshardError, _KilledError) as error:
            raised = error
        if len(stops) > faults.count:
            break
        stops.append((store.requests[len(stops)], raised, dict(store.objects)))
        if not faults.is_hit:
            continue

        store.before = store.after = lambda kind, name: None
        if faults.late and len(stops) % 2:
            store.objects |= faults.late
            assert loaded(store.objects) in (old_loaded, loaded_after(transition)), stops[-1][0]
            faults.late = {}
        save_into(store, request(3, 3))
        assert loaded(store.objects) == (3, {3.0}), stops[-1][0]
        if faults.late:  # after the next save: litter of a lower number, or a plain copy
            store.objects |= faults.late
            assert loaded(store.objects) == (3, {3.0}), stops[-1][0]
            save_into(store, request(3, 3))
        assert store.objects.keys() - {"generation_config.json"} == settled(store.objects), stops[-1][0]
        assert not store.uploads
        assert found_in(store.objects) == ((3, {3.0}), {3.0}), stops[-1][0]

    new, new_loaded = found_in(store.objects), loaded(store.objects)
    for asked, raised, objects in stops:
        assert loaded(objects) in (old_loaded, new_loaded), asked
        found = found_in(objects)
        assert_stock_readers_find(found, old, new, objects, asked)
        if raised is None:  # where only a delete failed, what another tool had uploaded outranks the plain index
            assert loaded(objects) == new_loaded, asked
            assert found == new or asked.startswith(("delete", "sweep")), asked
        assert not isinstance(raised, RemoteChangedError), asked
        if kind != "killed" and loaded(objects) == old_loaded != new_loaded:  # nothing of the old one has gone
            assert before.items() <= objects.items(), asked
    assert len(stops) > 5
    if kind == "killed":  # real readers find what the quick ones of this file do
        for number, (asked, _, objects) in enumerate(stops[1::4]):
            folder = MemoryStore(objects).into(tmp_path / str(number))
            if found_in(objects)[1] != "part":
                assert outcome(folder) == found_in(objects), asked


def loaded_after(transition: Transition) -> Any:
    objects = transition.before()
    save_into(MemoryStore(objects), transition.new)
    return loaded(objects)


def assert_stock_readers_find(found: Any, old: Any, new: Any, objects: dict[str, bytes], asked: str) -> None:
    """Old or new; a config beside other weights only while plain objects are replaced."""
    transformers, hub = found
    configs = {one[0] for one in (old[0], new[0]) if one is not None}
    weights = [one[1] for one in (old[0], new[0]) if one is not None]
    is_mixed = transformers is not None and transformers[0] in configs and transformers[1] in weights
    assert transformers in (old[0], new[0]) or is_mixed, asked
    has_one_file = INDEX not in objects and sum(name.endswith(".safetensors") for name in objects) == 1
    is_refused = hub is None and INDEX not in objects  # several files and no index
    assert hub in (old[1], new[1]) or is_refused or (hub == "part" and has_one_file), asked


def test_an_error_after_the_index_says_that_hfshard_loads_the_new_checkpoint() -> None:
    errors = []
    for at in range(30):
        store = MemoryStore({**single(1), "config.json": config(1)})
        Faults(store, at, "failed")
        with suppress(StoreError):
            try:
                save_into(store, request(2, 2))
            except CommitUnfinishedError as error:
                errors.append((str(error).partition("', ")[0].partition("': ")[2] or str(error), loaded(store.objects)))
    assert [found for _, found in errors] == [(1, {1.0}), (2, {2.0}), (2, {2.0}), (2, {2.0})]
    assert errors[0][0].startswith("It is unknown whether 's3://models/bert-")
    for words, _ in errors[1:]:
        assert (
            "was saved and hfshard loads it, but the plain copies that other tools read could not be written" in words
        )


def test_a_put_of_the_index_that_comes_after_the_save_gave_up_finds_its_shards() -> None:
    """The index hangs at the service, each retry is refused, and the put is carried out later."""
    for transition in TRANSITIONS.values():
        objects = transition.before()
        store = MemoryStore(objects)
        at = next(number for number, one in enumerate(requests_of(transition)) if one.startswith(f"put {INDEX[:-5]}-"))
        faults = Faults(store, at, "late")
        with pytest.raises(CommitUnfinishedError, match="It is unknown whether"):
            save_into(store, transition.new)
        store.before = store.after = lambda kind, name: None
        assert loaded(objects) == loaded(transition.before())
        objects |= faults.late
        assert loaded(objects) == loaded_after(transition)


def requests_of(transition: Transition) -> list[str]:
    store = MemoryStore(transition.before())
    save_into(store, transition.new)
    return store.requests
