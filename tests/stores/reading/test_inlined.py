"""What the index of a save inlines counts, whatever its plain copies are; but a user's edit of one counts more."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

import hfshard
from hfshard.errors import HfshardError
from hfshard.places import store_files, store_mirror
from hfshard.training.run import run_store
from tests.stores.reading.test_consistency import ADDRESS, generation_of, load_whole, save, save_loudly
from tests.stores.saving.memory_store import MemoryStore

INDEX = "model.safetensors.index.json"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    place = MemoryStore()
    for room in (store_mirror, run_store, store_files):
        monkeypatch.setattr(room, "open_store", lambda address: place)
    return place


def entry_of(store: MemoryStore) -> str:
    """The name of the one index of a save."""
    (name,) = (name for name in store.objects if name.startswith("model.safetensors.index-"))
    return name


@pytest.mark.parametrize("has_new_config", [False, True])
def test_plain_copies_of_earlier_saves_do_not_count_and_edits_do(store: MemoryStore, *, has_new_config: bool) -> None:
    save(store, 1, generation={}, has_new_config=has_new_config)
    save(store, 2, generation=generation_of(2), has_new_config=has_new_config)
    earlier = dict(store.objects)
    save(store, 3, generation=generation_of(3), has_new_config=has_new_config)
    assert hfshard.verify_checkpoint(ADDRESS).warnings == ()

    for name in ("config.json", "generation_config.json", "custom_generate/generate.py", INDEX):
        store.objects[name] = earlier[name]
    assert load_whole("full") == {3.0}
    warnings = hfshard.verify_checkpoint(ADDRESS).warnings
    stale = ["config.json", "generation_config.json", INDEX] if has_new_config else ["generation_config.json", INDEX]
    assert sorted(words.split("'")[1] for words in warnings) == stale
    assert all("is the plain copy of an earlier save, which only other tools read" in words for words in warnings)

    for name in ("config.json", "generation_config.json", "custom_generate/generate.py", INDEX):
        del store.objects[name]
    assert load_whole("full") == {3.0}

    store.objects["generation_config.json"] = b'{"max_new_tokens": 100}'
    assert load_whole() == {3.0, 99.0}
    save(store, 4, generation=generation_of(4), has_new_config=has_new_config)
    assert load_whole("full") == {4.0}
    assert hfshard.verify_checkpoint(ADDRESS).warnings == ()


def test_a_config_that_a_user_has_edited_counts_with_a_warning(
    store: MemoryStore, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    save(store, 1, generation=generation_of(1), has_new_config=True)
    store.objects["config.json"] = b'{"number": 77}'

    assert load_whole() == {1.0, 77.0}
    assert f"'{ADDRESS}/config.json' is not the file that was saved: its sha256 is" in caplog.text
    assert "If you edited it on purpose, load with verify='structure', or save again." in caplog.text
    with pytest.raises(HfshardError, match=r"config\.json' is not the file that was saved"):
        load_whole("full")
    pulled = Path(hfshard.pull_checkpoint(ADDRESS, tmp_path / "pulled"))
    assert (pulled / "config.json").read_bytes() == b'{"number": 77}'

    store.objects["config.json"] = b'{"number": 78}'  # once more
    assert load_whole() == {1.0, 78.0}
    save(store, 2, generation=generation_of(2), has_new_config=True)
    store.objects["config.json"] = b'{"number": 78}'  # which that save has replaced: an old copy
    assert load_whole("full") == {2.0}


def kill_behind_index(store: MemoryStore) -> None:
    """Kill a save of 2 over 1 after its index, before its plain copies."""

    class KilledError(Exception):
        pass

    def fail(kind: str, name: str) -> None:
        raise KilledError

    def kill(kind: str, name: str) -> None:
        if name.startswith("model.safetensors.index-"):
            store.before = fail

    save(store, 1, generation=generation_of(1))
    store.after = kill
    with pytest.raises(KilledError):
        save_loudly(store, 2, generation=generation_of(2))
    store.before = store.after = lambda kind, name: None


def test_a_save_of_the_same_finishes_what_a_killed_one_has_left(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    kill_behind_index(store)
    assert load_whole("full") == {2.0}
    assert json.loads(store.objects["generation_config.json"]) == {"max_new_tokens": 2}
    entries = [name for name in store.objects if name.startswith("model.safetensors.index-")]
    assert [name[24:33] for name in entries] == ["00000001-", "00000002-"]

    save(store, 2, generation=generation_of(2))
    assert {name: store.objects[name].rstrip() for name in generation_of(2)} == {
        name: raw.rstrip() for name, raw in generation_of(2).items()
    }
    assert load_whole("full") == {2.0}
    assert hfshard.verify_checkpoint(ADDRESS).warnings == ()
    own = entry_of(store).removeprefix("model.safetensors.index").removesuffix(".json")
    plain = {"config.json", INDEX, *generation_of(2)}
    assert {name for name in store.objects if own not in name} == plain

    store.requests.clear()
    caplog.set_level(logging.INFO)
    save(store, 2, generation=generation_of(2))
    assert "Nothing has changed" in caplog.text
    assert [asked for asked in store.requests if not asked.startswith(("list", "read"))] == []


def test_a_pull_of_what_a_killed_save_has_left_is_of_one_save(store: MemoryStore, tmp_path: Path) -> None:
    kill_behind_index(store)
    pulled = Path(hfshard.pull_checkpoint(ADDRESS, tmp_path / "pulled", verify="full"))
    assert {name: (pulled / name).read_bytes() for name in generation_of(2)} == generation_of(2)
    assert hfshard.load_state_dict(pulled)["layer.0.weight"][0, 0] == 2.0


@pytest.mark.parametrize("name", ["../../evil.py", "a\\b", "/evil.py", "model.safetensors"])
@pytest.mark.parametrize("part", ["small_files", "replaced", "objects"])
def test_an_index_that_names_what_no_save_puts_is_refused(
    store: MemoryStore, tmp_path: Path, name: str, part: str
) -> None:
    save(store, 1)
    entry = entry_of(store)
    index = json.loads(store.objects[entry])
    value = {"small_files": {"text": "x"}, "replaced": ["a"], "objects": {"size": 1, "etag": "a"}}[part]
    index["hfshard_save"][part][name] = value
    store.objects[entry] = json.dumps(index).encode()
    for act in (
        lambda: hfshard.pull_checkpoint(ADDRESS, tmp_path / "pulled"),
        lambda: hfshard.load_state_dict(ADDRESS),
    ):
        if (name, part) == ("model.safetensors", "objects"):
            continue  # a shard may be called so
        with pytest.raises(HfshardError, match=r"is damaged: it is not what hfshard writes|names the file"):
            act()
    assert list(tmp_path.iterdir()) == []
    assert not hfshard.verify_checkpoint(ADDRESS).ok or (name, part) == ("model.safetensors", "objects")
    save(store, 2)
    assert hfshard.load_state_dict(ADDRESS, verify="full")["layer.0.weight"][0, 0] == 2.0
    assert entry not in store.objects
