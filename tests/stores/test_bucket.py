"""What a bucket does as a store, by the real clients of the Hub and of Xet."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

import hfshard
from hfshard.errors import CheckpointChangedError
from hfshard.stores.bucket import BucketStore
from hfshard.stores.store import StoredObject
from tests.servers.faults import Fault
from tests.servers.hub.hub_server import HubServer
from tests.stores.conftest import SERVER_BUCKET as BUCKET

pytestmark = pytest.mark.compat

RAW = random.Random(3).randbytes(3_000_000)


def test_objects_are_put_listed_read_copied_and_deleted(store: BucketStore, hub: HubServer) -> None:
    put = store.put("config.json", b"hello")
    empty = store.put("deep/er/ü #1.txt", b"")
    store.put("deeper/1", b"1")

    assert (put.name, put.size, empty.size) == ("config.json", 5, 0)
    listed = store.list_objects(recursive=True)
    assert sorted(listed) == ["config.json", "deep/er/ü #1.txt", "deeper/1"]
    assert listed["config.json"] == put == store.find("config.json")
    assert store.list_objects() == {"config.json": put}
    assert store.list_objects("deep", recursive=True) == {"deep/er/ü #1.txt": empty} == store.list_objects("deep/er")
    assert store.list_objects("deep") == store.list_objects("dee") == {}
    assert store.folders() == ["deep", "deeper"]
    assert (store.read(put), store.read(empty)) == (b"hello", b"")

    store.copy(put, "copy.json")
    store.delete(["config.json", "missing", "deep/er/ü #1.txt"])
    assert sorted(store.list_objects(recursive=True)) == ["copy.json", "deeper/1"]
    assert store.find("config.json") is None
    assert store.sweep_uploads(lambda name: True) == 0
    assert hub.bucket(BUCKET).read(f"{store.address.prefix}/copy.json") == b"hello"


def test_large_objects_are_streamed_and_read_by_ranges(store: BucketStore, hub: HubServer) -> None:
    writer = store.open_writer("w.safetensors", len(RAW))
    block = bytearray(1_000_000)
    for begin in range(0, len(RAW), len(block)):
        block[:] = RAW[begin : begin + len(block)]
        writer.write(memoryview(block))
        block[:] = bytes(len(block))  # the caller's memory again
    assert store.find("w.safetensors") is None
    put = writer.finish()

    assert put == store.find("w.safetensors")
    assert put.size == 3_000_000
    for begin, size in ((0, 3_000_000), (1, 1), (2_999_990, 10), (123_456, 1_700_000), (5, 0)):
        target = bytearray(size)
        store.read_into(put, begin, memoryview(target))
        assert bytes(target) == RAW[begin : begin + size]


def test_bytes_that_the_storage_has_are_not_sent_again(store: BucketStore, hub: HubServer) -> None:
    raw = random.Random(4).randbytes(2_000_000)
    store.put("a", raw)
    hub.clear_log()

    store.put("b", raw[:1_000_000] + b"changed" + raw[1_000_000:])

    assert 0 < hub.bytes_up() < 400_000


def test_what_was_listed_is_read_though_its_name_has_other_bytes(store: BucketStore) -> None:
    old = store.put("index", b"old")
    store.put("index", b"new!")

    assert store.read(old) == b"old"
    with pytest.raises(CheckpointChangedError, match=r"/gone' was replaced or deleted after it was listed"):
        store.read(StoredObject("gone", 3, "ab" * 32))


def test_a_save_between_two_pages_of_a_listing_is_read_whole(store: BucketStore, hub: HubServer) -> None:
    def save(address: str, value: float) -> None:
        tensors = {name: torch.full((3000,), value) for name in "abc"}
        hfshard.save_state_dict(tensors, address, max_shard_size="16KB")  # five objects, on three pages

    pages, values = 0, []
    is_hit = True
    while is_hit:
        address = f"{store.address}/{pages}"
        save(address, 1.0)
        between = hub.fail(Fault(match=" bucket_tree ", kind="race", skip=pages, action=partial(save, address, 2.0)))
        loaded = hfshard.load_state_dict(address, verify="full")
        is_hit = between.times == 0
        hub.clear_faults()
        values.append({float(value) for tensor in loaded.values() for value in tensor})
        pages += 1

    assert values == [{2.0}, {2.0}, {2.0}, {1.0}]


def test_an_aborted_object_gets_no_name(store: BucketStore) -> None:
    writer = store.open_writer("w", 100)
    writer.write(memoryview(b"x" * 50))
    writer.abort()
    writer.abort()

    assert store.list_objects() == {}
