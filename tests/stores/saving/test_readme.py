"""The tables of hfshard/saving/stores/README.md say what a save does, and what readers find after each request."""

from __future__ import annotations

import re
from typing import Any

import pytest

from hfshard.saving.to_store import save_into
from hfshard.saving.writing import OwnShardWriter
from tests import REPOSITORY
from tests.stores.saving.checkpoints import found_in, request
from tests.stores.saving.memory_store import MemoryStore
from tests.stores.saving.test_faults import TRANSITIONS, Transition

README = REPOSITORY / "hfshard" / "saving" / "stores" / "README.md"
TITLES = {
    "Into an empty place": "into nothing, with a config",
    "Over shards, config unchanged": "over shards, same config",
    "Over shards, config changed": "over shards, new config",
    "Over a single file, config unchanged": "over a single file",
    "Over a single file, config changed": "over a single file, new config",
}


def rows_of(transition: Transition) -> list[list[str]]:
    """What is done, and what transformers and huggingface_hub load afterwards."""
    store = MemoryStore(transition.before())
    steps = [""]
    found: list[tuple[Any, Any]] = [found_in(store.objects)]

    def after(kind: str, name: str) -> None:
        done = "send the shards"
        if kind != "finish":
            names = [re.sub("[0-9a-f]{16}", "0123456789abcdef", one) for one in name.split()]
            done = "<br>".join(f"`{kind} {one}`" for one in names)
        if steps[-1] == done:
            found.pop()
        else:
            steps.append(done)
        found.append(found_in(store.objects))

    store.after = after
    save_into(store, transition.new, lambda: None, OwnShardWriter())
    return [[step, *map(_words, pair, found[0], found[-1])] for step, pair in zip(steps, found, strict=True)]


def _words(found: Any, old: Any, new: Any) -> str:
    return "error" if found is None else {str(old): "old", str(new): "new"}[str(found)]


@pytest.mark.parametrize("title", TITLES)
def test_a_table_says_what_is_done(title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HFSHARD_WRITERS", "1")
    section = README.read_text(encoding="utf-8").split(f"### {title}\n")[1].split("\n##")[0]
    written = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")][2:]

    assert [[cell.strip().replace("**", "") for cell in row[:3]] for row in written] == rows_of(
        TRANSITIONS[TITLES[title]]
    )


@pytest.mark.parametrize(
    ("name", "requests"),
    [
        ("into nothing", "list put put delete"),
        ("over shards", "list sweep put delete"),
        ("over shards, same config", "list sweep put delete"),
        ("over shards, new config", "list sweep put put put put put put delete"),  # with a generation config
    ],
)
def test_what_it_costs_beside_the_shards(name: str, requests: str) -> None:
    transition = TRANSITIONS[name]
    store = MemoryStore()
    before = transition.before()
    if before:  # by this process
        save_into(store, request(1, 1 if "config.json" in before else None), lambda: None, OwnShardWriter())
    store.requests.clear()
    save_into(store, transition.new, lambda: None, OwnShardWriter())

    kinds = [one.split()[0] for one in store.requests]
    assert [kind for kind in kinds if kind not in ("open", "finish")] == requests.split()

    store.requests.clear()
    save_into(store, transition.new, lambda: None, OwnShardWriter())
    assert store.requests == ["list"]
