"""Saves that overlap: a plain copy of one that was overtaken comes late, and no reader takes it for a user's edit."""

from __future__ import annotations

import json
from threading import Event, Thread

from hfshard.checkpoint.open_checkpoint import open_checkpoint
from hfshard.checkpoint.ranged_folder import StoreFolder
from hfshard.errors import RemoteChangedError
from hfshard.format.stored_save import plain_copy, split_object_name
from tests.stores.saving.checkpoints import config, request, save_into
from tests.stores.saving.memory_store import MemoryStore

SECONDS = 60.0


def save(store: MemoryStore, value: int) -> None:
    save_into(store, request(value, value))


def load(store: MemoryStore) -> tuple[int, set[float]]:
    """The config and the weights that hfshard finds."""
    folder = StoreFolder(store, str(store.address))
    with open_checkpoint(folder) as checkpoint:
        weights = {float(tensor[0]) for tensor in checkpoint.read(checkpoint.keys).values()}
        return json.loads(folder.read_small("config.json", 1000))["value"], weights


def is_index(name: str) -> bool:
    return name.startswith("model.safetensors.index-")


class Overlap:
    """Save 2 puts its index when save 3 has begun, and its config when save 3 is done."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.store = MemoryStore(objects)
        self.error: Exception | None = None
        slow, fast = MemoryStore(objects), MemoryStore(objects)
        slow.address = fast.address = self.store.address
        has_sent, has_begun, has_put, is_done = (Event() for _ in range(4))

        def before_slow(kind: str, name: str) -> None:
            if kind == "put" and is_index(name):
                split = split_object_name(name)
                assert split is not None
                self.slow_id = split[1]
                has_sent.set()
                assert has_begun.wait(SECONDS)
            if kind == "put" and name == "config.json" and not is_done.is_set():
                has_put.set()
                assert is_done.wait(SECONDS)

        def before_fast(kind: str, name: str) -> None:
            if kind == "put" and is_index(name):
                has_begun.set()
                assert has_put.wait(SECONDS)

        slow.before, fast.before = before_slow, before_fast
        thread = Thread(target=self._save, args=(slow,))
        thread.start()
        assert has_sent.wait(SECONDS)
        save(fast, 3)
        self.names = set(objects)
        is_done.set()
        thread.join()

    def _save(self, store: MemoryStore) -> None:
        try:
            save(store, 2)
        except RemoteChangedError as error:
            self.error = error


def test_a_late_config_of_a_save_that_was_overtaken_is_no_edit() -> None:
    objects: dict[str, bytes] = {}
    save(MemoryStore(objects), 1)
    met = Overlap(objects)
    assert isinstance(met.error, RemoteChangedError)
    late = plain_copy("config.json", config(2), met.slow_id)

    assert load(met.store) == (3, {3.0})
    objects["config.json"] = late  # once more
    assert load(met.store) == (3, {3.0})

    save(MemoryStore(objects), 4)
    assert sum(map(is_index, objects)) == 1
    assert len(objects) == 6
    objects["config.json"] = late
    assert load(met.store) == (4, {4.0})
    objects["config.json"] = config(5)  # a user's edit
    assert load(met.store) == (5, {4.0})
