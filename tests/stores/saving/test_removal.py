"""Removals from stores: what goes, what stays, and what every reader finds when one is killed at a request."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import hfshard
from hfshard.checkpoint.load_options import read_tensors
from hfshard.checkpoint.open_checkpoint import open_checkpoint
from hfshard.checkpoint.ranged_folder import StoreFolder
from hfshard.commit.removal import remove_from_store, remove_leftovers_from_store
from hfshard.errors import CheckpointChangedError, CheckpointNotFoundError, HfshardError
from hfshard.format.file_names import WeightNames
from hfshard.remove import plan_removal
from hfshard.saving.save_request import SaveRequest
from tests.stores.saving.checkpoints import INDEX, pickles, request, save_into, single, stock_shards, weights
from tests.stores.saving.memory_store import MemoryStore
from tests.stores.suite.conftest import Place, place  # noqa: F401

NAMES = WeightNames()
STRAY = "model-00001-of-00003-{number:08d}-00112233445566ff.safetensors"


class Killed(BaseException):
    """What ends a process at a request."""


def save(store: MemoryStore, *requests: SaveRequest) -> None:
    for one in requests:
        save_into(store, one)


def value_in(store: MemoryStore) -> float | None:
    """The number that all weights are, as hfshard reads them; None where nothing loads."""
    try:
        with open_checkpoint(StoreFolder(store, "s3://models/x"), use_safetensors=None) as found:
            values = {float(tensor.flatten()[0]) for tensor in read_tensors(found, None, "cpu", "auto").values()}
    except HfshardError:
        return None
    assert len(values) == 1, "a mixture"
    return values.pop()


def lower_index_left(store: MemoryStore) -> None:
    """A checkpoint over one whose objects could not be deleted."""
    save(store, request(1, 1))
    before = dict(store.objects)
    save(store, request(2, 2))
    store.objects |= {name: raw for name, raw in before.items() if name not in store.objects}


def uploaded_next_to_it(store: MemoryStore) -> None:
    save(store, request(2, 2))
    store.objects |= single(1) | pickles(1)


def uploaded_alone(store: MemoryStore) -> None:
    store.objects |= stock_shards(2)


def uploaded_shards_and_pickles(store: MemoryStore) -> None:
    store.objects |= stock_shards(2) | pickles(1)


def alone(store: MemoryStore) -> None:
    save(store, request(2, 2, with_files=True))


@pytest.mark.parametrize(
    "make", [alone, lower_index_left, uploaded_next_to_it, uploaded_alone, uploaded_shards_and_pickles]
)
def test_a_removal_that_is_killed_leaves_the_checkpoint_or_none(make: Callable[[MemoryStore], None]) -> None:
    for number in range(30):
        store = MemoryStore()
        make(store)
        assert value_in(store) == 2
        left = [number]

        def kill(kind: str, name: str, left: list[int] = left, store: MemoryStore = store) -> None:
            if kind == "delete":
                left[0] -= 1
                if left[0] < 0:  # of several objects that are deleted by one request, some are
                    for one in name.split()[::2]:
                        store.objects.pop(one, None)
                    raise Killed

        store.before = kill
        try:
            remove_from_store(store, NAMES, unfinished=False).carry_out()
        except Killed:
            store.before = lambda kind, name: None
            assert value_in(store) in (2, None)
            continue
        break
    assert number >= 2
    assert store.objects == {}


def test_a_tokenizer_and_what_others_put_there_stays() -> None:
    store = MemoryStore()
    save(store, request(1, 1, with_files=True))
    others = {"tokenizer.json": b"{}", "train.py": b"", "notes/a.txt": b"1"}
    store.objects |= others

    report = remove_from_store(store, NAMES, unfinished=False).report
    assert list(report.kept) == ["notes/", "tokenizer.json", "train.py"]
    assert {"config.json", "generation_config.json", INDEX} < report.removed.keys()
    assert report.removed["config.json"] == 17 + 65  # and the line that tells the save
    assert store.objects.keys() == report.removed.keys() | others.keys()

    remove_from_store(store, NAMES, unfinished=False).carry_out()
    assert store.objects == others


def test_variants_next_to_it_stay_with_the_config_that_they_share() -> None:
    store = MemoryStore()
    save(store, request(1, 1), request(2, None, variant="fp16"))

    report = remove_from_store(store, WeightNames("fp16"), unfinished=False).report
    remove_from_store(store, WeightNames("fp16"), unfinished=False).carry_out()

    assert report.kept["config.json"] == "other weights stay, and may need it"
    assert value_in(store) == 1
    remove_from_store(store, NAMES, unfinished=False).carry_out()
    assert store.objects == {}


@pytest.mark.parametrize("unfinished", [False, True])
def test_a_save_that_is_under_way_stays_unless_nothing_saves_there(unfinished: bool) -> None:
    store = MemoryStore()
    save(store, request(1, 1))
    stray = STRAY.format(number=7)
    store.objects[stray] = b"123"
    store.uploads = {STRAY.format(number=6), "theirs.bin"}

    removal = remove_from_store(store, NAMES, unfinished=unfinished)
    removal.carry_out()

    assert store.objects == ({} if unfinished else {stray: b"123"})
    assert store.uploads == ({"theirs.bin"} if unfinished else {STRAY.format(number=6), "theirs.bin"})
    if not unfinished:
        assert "--unfinished removes it, if no save is running" in removal.report.kept[stray]
        with pytest.raises(CheckpointNotFoundError, match="--leftovers --unfinished"):
            remove_from_store(store, NAMES, unfinished=False)


@pytest.mark.parametrize("unfinished", [False, True])
def test_leftovers_are_what_is_lower_than_the_newest_index(unfinished: bool) -> None:
    store = MemoryStore()
    lower_index_left(store)
    newest = {name for name in store.objects if "-00000002-" in name}
    lower = {name for name in store.objects if "-00000001-" in name}
    higher = STRAY.format(number=3)
    store.objects[higher] = b"123"
    store.uploads = {STRAY.format(number=1), STRAY.format(number=4), "theirs.bin"}
    others = store.objects.keys() - newest - lower - {higher}

    removal = remove_leftovers_from_store(store, NAMES, unfinished=unfinished)
    assert removal.report.removed.keys() == lower | ({higher} if unfinished else set())
    removal.carry_out()

    assert len(newest) == len(lower) == 4
    assert store.objects.keys() == newest | others | (set() if unfinished else {higher})
    assert store.uploads == {"theirs.bin"} | (set() if unfinished else {STRAY.format(number=4)})
    assert value_in(store) == 2


def test_leftovers_of_a_first_save_may_be_under_way() -> None:
    store = MemoryStore({STRAY.format(number=1): b"123"})

    assert remove_leftovers_from_store(store, NAMES, unfinished=False).report.is_empty
    remove_leftovers_from_store(store, NAMES, unfinished=True).carry_out()

    assert store.objects == {}


def test_what_another_process_saved_since_it_was_shown_is_not_removed() -> None:
    store = MemoryStore()
    save(store, request(1, 1))
    removal = remove_from_store(store, NAMES, unfinished=False)
    save(store, request(2, 1))
    before = dict(store.objects)

    with pytest.raises(CheckpointChangedError, match="changed after its files were listed"):
        removal.carry_out()

    assert store.objects == before


def test_checkpoints_of_each_service_are_removed(place: Place) -> None:  # noqa: F811
    hfshard.save_state_dict(weights(1), place.path, max_shard_size=1)
    hfshard.save_state_dict(weights(2), place.path, max_shard_size=1)
    place.put("tokenizer.json", b"{}")
    dry = hfshard.remove_checkpoint(place.path, dry_run=True)
    assert dry.removed.keys() | {"tokenizer.json"} == place.files().keys()
    assert sum(map(len, place.files().values())) == dry.size + 2

    hfshard.remove_checkpoint(place.path)

    assert place.files() == {"tokenizer.json": b"{}"}
    with pytest.raises(CheckpointNotFoundError):
        hfshard.load_state_dict(place.path)
    with pytest.raises(CheckpointNotFoundError):
        plan_removal(place.path)
