"""hfshard/stores/GUIDE.md: its tables say what a save does and what readers find, its rules are explored."""

from __future__ import annotations

import re
from typing import Any

import pytest

from hfshard.checkpoint.open_checkpoint import open_checkpoint
from hfshard.checkpoint.ranged_folder import StoreFolder
from hfshard.commit import store_plan
from hfshard.format.stored_save import split_object_name
from hfshard.saving.save_request import SaveRequest
from tests import REPOSITORY
from tests.stores.saving.checkpoints import config, found_in, request, save_into, single
from tests.stores.saving.memory_store import MemoryStore
from tests.sweeps.exploring.mutants import mutants

README = REPOSITORY / "hfshard" / "stores" / "GUIDE.md"
SECTIONS: dict[str, tuple[SaveRequest | dict[str, bytes] | None, SaveRequest]] = {
    "Into an empty place": (None, request(2, 2)),
    "Over an earlier save, config unchanged": (request(1, 1), request(2, 1)),
    "Over an earlier save, config changed": (request(1, 1), request(2, 2)),
    "Over a file that another tool uploaded": (single(1) | {"config.json": config(1)}, request(2, 2)),
}


def rows_of(before: SaveRequest | dict[str, bytes] | None, new: SaveRequest) -> list[list[str]]:
    """What is done, and what hfshard, transformers and huggingface_hub load afterwards."""
    store = MemoryStore(before if isinstance(before, dict) else None)
    if isinstance(before, SaveRequest):
        save_into(store, before)
    steps = [""]
    found = [_found(store)]

    def after(kind: str, name: str) -> None:
        done = "send the shards"
        if kind != "finish":
            done = "<br>".join(f"`{kind} {_usual(one)}`" for one in name.split())
        if steps[-1] == done:
            found.pop()
        else:
            steps.append(done)
        found.append(_found(store))

    store.after = after
    save_into(store, new)
    states = [
        [_word(one, first, last) for one, first, last in zip(now, found[0], found[-1], strict=True)] for now in found
    ]
    return [[step, *words] for step, words in zip(steps, states, strict=True)]


def _usual(name: str) -> str:
    split = split_object_name(name)
    return name if split is None else f"{split[1].number}: {split[0]}"


def _found(store: MemoryStore) -> tuple[Any, Any, Any]:
    """The config and weights that hfshard, transformers and huggingface_hub load."""
    copy = MemoryStore(store.objects.copy())
    own_puts_before = dict(store_plan._OBJECTS)
    folder = StoreFolder(copy, str(copy.address))
    try:
        with open_checkpoint(folder) as checkpoint:
            weights = {float(tensor[0]) for tensor in checkpoint.read(checkpoint.keys).values()}
            ours = folder.read_small("config.json", 1000), weights
    except FileNotFoundError:
        ours = None
    assert own_puts_before == dict(store_plan._OBJECTS)
    stock, hub = found_in(store.objects)
    return ours, stock, hub


def _word(found: Any, old: Any, new: Any) -> str:
    return "error" if found is None else {str(old): "old", str(new): "new"}.get(str(found), "new config, old weights")


@pytest.mark.parametrize("title", SECTIONS)
def test_a_table_says_what_is_done(title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HFSHARD_WRITERS", "1")
    section = README.read_text(encoding="utf-8").split(f"### {title}\n")[1].split("\n##")[0]
    written = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")][2:]

    assert [[cell.strip().replace("**", "") for cell in row[:4]] for row in written] == rows_of(*SECTIONS[title])


def test_each_rule_is_left_out_by_a_mutant() -> None:
    section = README.read_text(encoding="utf-8").split("## The rules\n")[1].split("\n##")[0]
    written = [int(number) for number in re.findall(r"^\| (\d) \|", section, flags=re.M)]

    explored = {int(name[0]) for name in mutants() if name[0].isdigit()}

    assert written == [1, 2, 3, 4, 5, 6, 7, 8]
    assert explored == set(written) - {2}  # rule 2 is rule 1 and names: ids that are equal share them
