"""What an index brings along counts until the save has put it, and only then; and leads nowhere else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hfshard
from hfshard.errors import HfshardError
from hfshard.loading import far
from hfshard.transfer import store_files
from tests.stores.reading.test_consistency import ADDRESS, generation_of, load_whole, save, save_loudly
from tests.stores.saving.memory_store import MemoryStore

INDEX = "model.safetensors.index.json"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    place = MemoryStore()
    monkeypatch.setattr(far, "open_store", lambda address: place)
    monkeypatch.setattr(store_files, "open_store", lambda address: place)
    return place


@pytest.mark.parametrize("has_new_config", [False, True])
def test_what_is_put_back_or_deleted_by_hand_counts(store: MemoryStore, *, has_new_config: bool) -> None:
    save(store, 1, generation={}, has_new_config=has_new_config)
    save(store, 2, generation=generation_of(2), has_new_config=has_new_config)
    save(store, 3, generation=generation_of(3), has_new_config=has_new_config)
    assert b"hfshard_brings" not in store.objects[INDEX]
    store.objects.update(generation_of(2))
    assert load_whole() == {2.0, 3.0}

    del store.objects["custom_generate/generate.py"], store.objects["generation_config.json"]
    with pytest.raises(FileNotFoundError):
        load_whole()


def kill_behind_index(store: MemoryStore) -> None:
    """Kill a save of 2 over 1 after its index, before its small files."""

    class KilledError(Exception):
        pass

    def fail(kind: str, name: str) -> None:
        raise KilledError

    def kill(kind: str, name: str) -> None:
        if name == INDEX:
            store.before = fail

    save(store, 1, generation=generation_of(1))
    store.after = kill
    with pytest.raises(KilledError):
        save_loudly(store, 2, generation=generation_of(2))
    store.before = store.after = lambda kind, name: None


def test_a_save_of_the_same_finishes_what_a_killed_one_has_left(store: MemoryStore) -> None:
    kill_behind_index(store)
    store.objects.update(generation_of(2))  # as if it had been killed a little later
    assert b"hfshard_brings" in store.objects[INDEX]
    save(store, 2, generation=generation_of(2))
    assert b"hfshard_brings" not in store.objects[INDEX]
    assert load_whole("full") == {2.0}
    store.requests.clear()
    save(store, 2, generation=generation_of(2))
    assert not [asked for asked in store.requests if asked.startswith("put")]


def test_a_pull_of_what_a_killed_save_has_left_is_of_one_save(store: MemoryStore, tmp_path: Path) -> None:
    kill_behind_index(store)
    pulled = Path(hfshard.pull_checkpoint(ADDRESS, tmp_path / "pulled", verify="full"))
    assert {name: (pulled / name).read_bytes() for name in generation_of(2)} == generation_of(2)
    assert hfshard.load_state_dict(pulled)["layer.0.weight"][0, 0] == 2.0


@pytest.mark.parametrize("name", ["../../evil.py", "a\\b", "/evil.py", "config.json", "model.safetensors"])
def test_an_index_that_brings_what_no_save_puts_is_refused(store: MemoryStore, tmp_path: Path, name: str) -> None:
    save(store, 1)
    index = json.loads(store.objects[INDEX])
    store.objects[INDEX] = json.dumps({**index, "hfshard_brings": {name: {"text": "x", "replaces": None}}}).encode()
    with pytest.raises(HfshardError, match="'hfshard_brings' is not what hfshard writes"):
        hfshard.pull_checkpoint(ADDRESS, tmp_path / "pulled")
    save(store, 2)
    assert hfshard.load_state_dict(ADDRESS)["layer.0.weight"][0, 0] == 2.0
