"""Readers beside saves: what is replaced between a listing and a read is listed again."""

from __future__ import annotations

from hfshard.checkpoint.open_checkpoint import open_checkpoint
from hfshard.checkpoint.ranged_folder import StoreFolder
from tests.stores.saving.checkpoints import request, save_into
from tests.stores.saving.memory_store import MemoryStore


def test_what_is_replaced_whenever_it_was_listed_is_listed_again() -> None:
    objects: dict[str, bytes] = {}
    save_into(MemoryStore(objects), request(1, 1))
    store, other = MemoryStore(objects), MemoryStore(objects)
    left = [2, 3, 4]

    def before(kind: str, name: str) -> None:
        if kind == "read" and left:
            value = left.pop(0)
            save_into(other, request(value, value))

    store.before = before
    with open_checkpoint(StoreFolder(store, str(store.address))) as checkpoint:
        assert {float(tensor[0]) for tensor in checkpoint.read(checkpoint.keys).values()} == {4.0}
