"""The objects of a store, as the files of a directory that they are pushed and copied as."""

from __future__ import annotations

import pytest
import torch

import hfshard
from hfshard.disk.byte_source import ByteSource
from hfshard.errors import CheckpointChangedError, CheckpointNotFoundError, UnsafePathError
from hfshard.places import place, store_files
from hfshard.places.store_files import StoreFiles, count_sent
from tests.stores.saving.memory_store import MemoryStore

ADDRESS = "s3://models/bert"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    """With a save of one tensor and a tokenizer."""
    store = MemoryStore()
    for module in (place, store_files):
        monkeypatch.setattr(module, "open_store", lambda address: store)
    save(1.0)
    store.put("tokenizer.json", b"{}")
    return store


def save(value: float) -> None:
    hfshard.save_state_dict({"w": torch.full((2,), value)}, ADDRESS)


def raw_of(source: ByteSource) -> bytes:
    with source.open() as reader:
        return reader.read()


def test_files_have_the_names_that_they_have_in_a_directory(store: MemoryStore) -> None:
    for name in (".git/config", "a/.Cache/x", ".git"):
        store.put(name, b"")

    contents = StoreFiles(ADDRESS).contents()

    assert sorted(contents) == ["model-00001-of-00001.safetensors", "model.safetensors.index.json", "tokenizer.json"]
    assert raw_of(contents["tokenizer.json"]) == b"{}"


def test_only_the_save_that_was_listed_is_opened(store: MemoryStore) -> None:
    files = StoreFiles(ADDRESS)
    with files.open_variant(None) as checkpoint:
        assert checkpoint.keys == ["w"]
    assert files.is_unchanged()

    save(2.0)

    assert not files.is_unchanged()
    with pytest.raises(CheckpointChangedError, match="was replaced after it was listed"), files.open_variant(None):
        pass


def test_nothing_and_names_that_lead_elsewhere_are_refused(store: MemoryStore) -> None:
    with pytest.raises(UnsafePathError, match="cannot be a file of a checkpoint"):
        StoreFiles(ADDRESS).check({"../passwd"})

    store.objects.clear()
    with pytest.raises(CheckpointNotFoundError, match=f"There is nothing at '{ADDRESS}'"):
        StoreFiles(ADDRESS)


def test_what_is_new_is_counted_as_sent(store: MemoryStore) -> None:
    count = count_sent(store, {""})

    assert count() is None

    store.put("notes.txt", b"trained twice")
    store.put("below/notes.txt", b"not listed")

    assert count() == 13
