"""What `hfshard.stores.store.Store` promises, held by every service."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from hfshard.errors import CheckpointChangedError, StoreError, StoreNotFoundError
from hfshard.stores.open_store import open_store
from hfshard.stores.store import Store, StoredObject
from tests.servers.stores.buckets import Bucket

MIB = 1 << 20


@pytest.fixture
def store(store_address: str) -> Store:
    return open_store(store_address)


def write(store: Store, name: str, raw: bytes) -> StoredObject:
    """Write an object by a writer, in blocks that share one memory."""
    writer = store.open_writer(name, len(raw))
    block = bytearray(3 * MIB)
    for begin in range(0, len(raw), len(block)):
        piece = raw[begin : begin + len(block)]
        block[: len(piece)] = piece
        writer.write(memoryview(block)[: len(piece)])
    return writer.finish()


def test_an_empty_place_has_nothing(store: Store, store_address: str) -> None:
    assert store.list_objects() == {}
    assert store.folders() == []
    assert store.find("config.json") is None
    assert str(store.address) == store_address
    store.delete(["config.json"])
    assert store.sweep_uploads(lambda name: True) == 0


def test_a_listing_says_when_an_object_was_put(store: Store) -> None:
    put = store.put("config.json", b"{}")
    listed = store.list_objects()["config.json"]
    assert listed == put
    assert listed.put_at is not None
    assert abs(datetime.now(UTC) - listed.put_at) < timedelta(minutes=10)


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_a_folder_that_was_made_by_hand_is_no_file_of_its_own(store: Store, bucket: Bucket, store_prefix: str) -> None:
    bucket.put(f"{store_prefix}/", b"")
    bucket.put(f"{store_prefix}/config.json", b"{}")
    assert list(store.list_objects()) == ["config.json"]

    bucket.put(f"{store_prefix}//odd", b"")
    with pytest.raises(StoreError, match=r"/place//.*Rename or remove it\.$"):
        store.list_objects()


def test_what_is_put_is_listed_found_and_read(store: Store, bucket: Bucket, store_prefix: str) -> None:
    config = store.put("config.json", b'{"a": 1}')
    store.put("checkpoint-1/a b.json", b"{}")
    store.put("checkpoint-2/deep/ü+%.json", b"{ }")
    bucket.put(f"{store_prefix}-beside/config.json", b"other")

    assert (config.name, config.size) == ("config.json", 8)
    assert store.list_objects() == {"config.json": config}
    assert config == store.find("config.json")
    assert list(store.list_objects("checkpoint-1")) == ["checkpoint-1/a b.json"]
    assert store.list_objects("checkpoint-2") == {}
    listed = store.list_objects(recursive=True)
    assert {name: found.size for name, found in listed.items()} == {
        "config.json": 8,
        "checkpoint-1/a b.json": 2,
        "checkpoint-2/deep/ü+%.json": 3,
    }
    below = store.list_objects("checkpoint-2", recursive=True)
    assert below == {"checkpoint-2/deep/ü+%.json": listed["checkpoint-2/deep/ü+%.json"]}
    assert store.folders() == ["checkpoint-1", "checkpoint-2"]
    assert store.folders("checkpoint-2") == ["deep"]
    assert store.find("checkpoint-1") is None

    assert store.read(listed["checkpoint-2/deep/ü+%.json"]) == b"{ }"
    assert bucket.objects(store_prefix) == {
        "config.json": b'{"a": 1}',
        "checkpoint-1/a b.json": b"{}",
        "checkpoint-2/deep/ü+%.json": b"{ }",
    }

    store.delete(["config.json", "missing", "checkpoint-1/a b.json"])
    assert list(store.list_objects(recursive=True)) == ["checkpoint-2/deep/ü+%.json"]


def test_a_listing_is_of_one_folder_however_much_is_below(store: Store, bucket: Bucket, store_prefix: str) -> None:
    for number in range(3):
        bucket.put(f"{store_prefix}/run/checkpoint-{number}/weights", b"0")
    bucket.put(f"{store_prefix}/run/notes", b"1")
    assert store.list_objects() == {}
    assert store.folders() == ["run"]
    assert list(store.list_objects("run")) == ["run/notes"]
    assert store.folders("run") == ["checkpoint-0", "checkpoint-1", "checkpoint-2"]
    assert len(store.list_objects("run", recursive=True)) == 4


@pytest.mark.slow  # a thousand objects in each service
def test_a_listing_goes_on_where_a_page_ends(store: Store, bucket: Bucket, store_prefix: str) -> None:
    for number in range(1003):
        bucket.put(f"{store_prefix}/{number:04}", b"")
    assert list(store.list_objects()) == [f"{number:04}" for number in range(1003)]
    store.delete([f"{number:04}" for number in range(1003)])
    assert store.list_objects() == {}


def test_a_read_is_of_the_bytes_that_were_listed(store: Store, scheme: str) -> None:
    raw = bytes(range(256)) * 4096
    old = store.put("weights", raw)
    part = bytearray(5)
    store.read_into(old, 254, memoryview(part))
    assert bytes(part) == b"\xfe\xff\x00\x01\x02"
    store.read_into(old, len(raw) - 5, memoryview(part))
    assert bytes(part) == b"\xfb\xfc\xfd\xfe\xff"

    new = store.put("weights", raw[::-1])
    assert old.etag != new.etag
    if scheme == "hf":  # where bytes are kept by their hash, whatever has their name
        assert store.read(old) == raw
        return
    with pytest.raises(CheckpointChangedError):
        store.read_into(old, 0, memoryview(part))
    store.delete(["weights"])
    with pytest.raises(CheckpointChangedError):
        store.read(new)


def test_a_put_replaces_what_has_its_name(store: Store, bucket: Bucket, store_prefix: str) -> None:
    first = store.put("index", b"1")
    second = store.put("index", b"2")
    assert first.etag != second.etag
    assert store.list_objects() == {"index": second}
    assert bucket.objects(store_prefix) == {"index": b"2"}
    store.delete(["index"])
    assert store.put("index", b"3").size == 1
    assert bucket.objects(store_prefix) == {"index": b"3"}


@pytest.mark.parametrize("size", [0, 5, 17 * MIB + 7], ids=["empty", "small", "large"])
def test_a_writer_makes_an_object_at_its_end(store: Store, bucket: Bucket, store_prefix: str, size: int) -> None:
    raw = (bytes(range(251)) * (size // 251 + 1))[:size]
    store.put("weights", b"old")
    written = write(store, "weights", raw)
    assert written.size == size
    assert written == store.find("weights") == store.list_objects()["weights"]
    assert bucket.read(f"{store_prefix}/weights") == raw
    assert bucket.unfinished(store_prefix) == []


def test_a_writer_that_gives_up_leaves_nothing(store: Store, scheme: str, bucket: Bucket, store_prefix: str) -> None:
    writer = store.open_writer("weights", 20 * MIB)
    for _ in range(4):
        writer.write(memoryview(bytes(3 * MIB)))
    writer.abort()
    writer.abort()
    assert store.list_objects() == {}
    if scheme != "az":  # there, what is never committed stays for a week, and the next of its name goes over it
        assert bucket.unfinished(store_prefix) == []


def test_what_others_have_left_unfinished_is_swept(
    store: Store, scheme: str, bucket: Bucket, store_prefix: str
) -> None:
    if scheme in ("az", "hf"):
        pytest.skip("Azure and the Hub remove them themselves; there, they belong to a name, and here to none")
    for name in ("model-1.safetensors", "other"):
        bucket.ask("POST", f"{store_prefix}/{name}", {"uploads": ""})
    bucket.ask("POST", f"{store_prefix}-beside/model-1.safetensors", {"uploads": ""})
    assert store.sweep_uploads(lambda name: name == "model-1.safetensors") == 1
    assert bucket.unfinished(f"{store_prefix}/") == [f"{store_prefix}/other"]
    assert bucket.unfinished(f"{store_prefix}-beside") == [f"{store_prefix}-beside/model-1.safetensors"]


def test_a_copy_has_the_bytes_and_is_refused_for_what_changed(
    store: Store, scheme: str, bucket: Bucket, store_prefix: str
) -> None:
    old = store.put("a", b"1")
    copied = store.copy(old, "folder/b")
    assert copied == store.find("folder/b")  # its ETag is that by which it is known from now on
    assert bucket.objects(store_prefix) == {"a": b"1", "folder/b": b"1"}
    if scheme == "hf":  # folder/b still has these bytes, and copies are of bytes
        return
    store.put("a", b"2")
    with pytest.raises(CheckpointChangedError):
        store.copy(old, "c")
    store.delete(["a"])
    with pytest.raises(CheckpointChangedError):
        store.copy(old, "c")
    assert bucket.read(f"{store_prefix}/folder/b") == b"1"


@pytest.mark.parametrize("scheme", ["s3"])
def test_a_copy_of_an_object_in_parts_is_refused_for_what_changed(store: Store) -> None:
    raw = bytes(range(256)) * (9 * MIB // 256)
    old = write(store, "a", raw)
    copied = store.copy(old, "b")
    assert copied == store.find("b")
    assert copied.etag != old.etag
    write(store, "a", raw[::-1])
    with pytest.raises(CheckpointChangedError):
        store.copy(old, "c")


def test_a_bucket_that_is_not_there_is_named(scheme: str, bucket: Bucket) -> None:
    store = open_store(f"{'hf://buckets/org' if scheme == 'hf' else f'{scheme}:/'}/no-such-bucket/place")
    for action in (store.list_objects, store.folders, lambda: store.find("a"), lambda: store.put("a", b"")):
        with pytest.raises(StoreNotFoundError, match="no-such-bucket"):
            action()
    with pytest.raises(StoreNotFoundError, match="no-such-bucket"):
        write(store, "weights", bytes(9 * MIB))
