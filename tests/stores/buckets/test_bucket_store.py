"""What a bucket does as a store, by the real clients of the Hub and of Xet."""

from __future__ import annotations

import random

import pytest

from hfshard.errors import CheckpointChangedError, StaleObjectError
from hfshard.stores.buckets.bucket_store import BucketStore
from hfshard.stores.protocols import StoredObject
from tests.hubserver.faults import Fault
from tests.hubserver.hub_server import HubServer
from tests.stores.buckets.conftest import BUCKET

pytestmark = pytest.mark.compat

RAW = random.Random(3).randbytes(3_000_000)


def test_objects_are_put_listed_read_copied_and_deleted(store: BucketStore, hub: HubServer) -> None:
    put = store.put("config.json", b"hello")
    empty = store.put("deep/er/ü #1.txt", b"")
    store.put("deeper/1", b"1")

    assert (put.name, put.size, empty.size) == ("config.json", 5, 0)
    listed = store.list_objects()
    assert sorted(listed) == ["config.json", "deep/er/ü #1.txt", "deeper/1"]
    assert listed["config.json"] == put == store.find("config.json")
    assert store.list_objects("deep") == {"deep/er/ü #1.txt": empty}
    assert store.list_objects("dee") == {}
    assert store.folders() == ["deep", "deeper"]
    assert (store.read(put), store.read(empty)) == (b"hello", b"")

    store.copy(put, "copy.json")
    store.delete(["config.json", "missing", "deep/er/ü #1.txt"])
    assert sorted(store.list_objects()) == ["copy.json", "deeper/1"]
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


def test_a_conditional_put_loses_to_whoever_was_faster(store: BucketStore) -> None:
    first = store.put("index", b"1", None)
    with pytest.raises(StaleObjectError, match=r"/index' was changed by somebody else in the meantime\.$"):
        store.put("index", b"2", None)
    second = store.put("index", b"2", first)
    with pytest.raises(StaleObjectError):
        store.put("index", b"3", first)

    assert store.find("index") == second
    assert not store.has_conditional_put
    assert store.has_content_etags


def test_what_was_listed_is_read_though_its_name_has_other_bytes(store: BucketStore) -> None:
    old = store.put("index", b"old")
    store.put("index", b"new!")

    assert store.read(old) == b"old"
    with pytest.raises(CheckpointChangedError, match=r"/gone' is no longer what it was when it was listed"):
        store.read(StoredObject("gone", 3, "ab" * 32))


def test_an_aborted_object_gets_no_name(store: BucketStore) -> None:
    writer = store.open_writer("w", 100)
    writer.write(memoryview(b"x" * 50))
    writer.abort()
    writer.abort()

    assert store.list_objects() == {}


def test_a_writer_that_is_overtaken_between_its_put_and_its_second_look_is_told(
    store: BucketStore, hub: HubServer
) -> None:
    first = store.put("index", b"1")
    other = store.put("others", b"2")
    path = f"{store.address.prefix}/index"
    overtake = Fault(match="bucket_paths", kind="race", skip=1, action=lambda: replace(hub, "others", path, store))
    hub.fail(overtake)

    with pytest.raises(StaleObjectError, match=r"/index' was replaced by somebody else right after it was put\.$"):
        store.put("index", b"3", first)

    found = store.find("index")
    assert found is not None
    assert found.etag == other.etag


def test_a_writer_cannot_see_whom_it_overtakes(store: BucketStore, hub: HubServer) -> None:
    first = store.put("index", b"1")
    store.put("others", b"2")
    path = f"{store.address.prefix}/index"
    hub.fail(Fault(match="bucket_batch", kind="race", action=lambda: replace(hub, "others", path, store)))

    third = store.put("index", b"3", first)  # somebody's put between the first look and this one is lost

    assert store.find("index") == third


def replace(hub: HubServer, source: str, path: str, store: BucketStore) -> None:
    """Put something else, as somebody else."""
    hub.bucket(BUCKET).copy(f"{store.address.prefix}/{source}", path)
