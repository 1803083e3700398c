"""Errors, lost answers, outages and kills at every request of every transition: old or new loads, and nothing stays."""

from __future__ import annotations

import json
import re
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
from hfshard.saving.request import SaveRequest
from hfshard.saving.stores import turn
from hfshard.saving.to_store import save_into
from hfshard.saving.writing import OwnShardWriter
from tests.stores.saving.checkpoints import config, found_in, pickles, request, saved, settled, single, stock_shards
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
        self.at, self.kind = at, kind
        self.count = -1
        self.is_hit = False
        store.before, store.after = self.before, self.after

    def before(self, kind: str, name: str) -> None:
        if self.is_hit and self.kind == "killed":
            raise _KilledError
        if self.is_hit and self.kind == "down":
            raise StoreConnectionError("The store is down.")
        self.count += 1
        if self.count == self.at and self.kind != "lost":
            self.is_hit = True
            raise _KilledError if self.kind == "killed" else StoreConnectionError(f"{kind} {name} failed.")

    def after(self, kind: str, name: str) -> None:
        """After a change was made: its answer is lost, and the store can't find out."""
        if self.count == self.at and self.kind == "lost":
            self.is_hit = True
            raise StoreError(f"Nobody can tell whether {kind} {name} was done.")


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
    """Requests come in one order; a mark that is there is that of a dead save."""
    monkeypatch.setenv("HFSHARD_WRITERS", "1")
    monkeypatch.setattr(turn, "_LOOK_SECONDS", 0)
    monkeypatch.setattr(turn, "_PATIENCE_SECONDS", -1)
    yield


CASES: list[Any] = [(name, kind, True) for name in TRANSITIONS for kind in ("killed", "failed")]
CASES += [
    pytest.param(name, kind, True, marks=pytest.mark.slow if (number + turn) % 2 else [])
    for number, name in enumerate(TRANSITIONS)
    for turn, kind in enumerate(("lost", "down"))
]  # by turns without --slow
CASES += [(name, "killed", False) for name in TRANSITIONS if name.endswith("new config")]


@pytest.mark.parametrize(("name", "kind", "is_conditional"), CASES)
def test_at_every_request_the_old_or_the_new_checkpoint_loads(
    name: str, kind: str, is_conditional: bool, tmp_path: Path
) -> None:
    transition = TRANSITIONS[name]
    before = transition.before()
    old = found_in(before)
    stops: list[tuple[str, BaseException | None, dict[str, bytes]]] = []
    while True:
        store = MemoryStore(dict(before), has_conditional_put=is_conditional)
        faults = Faults(store, len(stops), kind)
        raised: BaseException | None = None
        try:
            save_into(store, transition.new, lambda: None, OwnShardWriter())
        except (HfshardError, _KilledError) as error:
            raised = error
        if len(stops) > faults.count:
            break
        stops.append((store.requests[len(stops)], raised, dict(store.objects)))

        store.before = store.after = lambda kind, name: None
        save_into(store, request(3, 3), lambda: None, OwnShardWriter())
        assert store.objects.keys() - {"generation_config.json"} == settled(store.objects), stops[-1][0]
        assert not store.uploads
        assert found_in(store.objects) == ((3, {3.0}), {3.0}), stops[-1][0]

    new = found_in(store.objects)
    for asked, raised, objects in stops:
        found = found_in(objects)
        assert found[0] in (old[0], new[0]), asked
        assert found[1] in (old[1], new[1]), asked
        assert raised is not None or found == new, asked
        assert not isinstance(raised, RemoteChangedError), asked
        if kind == "failed" and found == old:  # all is as it was; an index of a single file may have come, or a config
            assert objects.keys() - {INDEX, "config.json"} == before.keys() - {INDEX, "config.json"}, asked
    assert len(stops) > 5
    if kind == "killed" and is_conditional:  # real readers find what the quick ones of this file do
        for number, (asked, _, objects) in enumerate(stops[1::4]):
            folder = MemoryStore(objects).into(tmp_path / str(number))
            assert outcome(folder) == found_in(objects), asked


def test_an_error_after_the_deciding_put_says_what_failed_and_who_loads_what() -> None:
    errors = []
    for at in range(30):
        store = MemoryStore({**single(1), "config.json": config(1)})
        Faults(store, at, "failed")
        with suppress(StoreError):
            try:
                save_into(store, request(2, 2), lambda: None, OwnShardWriter())
            except CommitUnfinishedError as error:
                errors.append(re.sub("[0-9a-f]{16}", "0", str(error)).split("is saved, and ")[1])
    assert [error.partition(": ")[0] for error in errors] == [
        "hfshard and transformers load it, other readers the old one; but 'put model.safetensors.index.json' failed",
        "every reader loads it; but 'remove model.safetensors' failed",
        "every reader loads it; but 'put config.json' failed",
        "every reader loads it; but 'remove model-hfshard-0.safetensors.index.json' failed",
    ]
