"""What a store over obstore does, against a real S3 server."""

from __future__ import annotations

from typing import Any

import pytest

from hfshard.errors import CheckpointChangedError, StaleObjectError, StoreNotFoundError
from hfshard.stores.opening import open_store
from hfshard.stores.protocols import Store, StoredObject


def test_objects_are_put_listed_read_copied_and_deleted(store: Store) -> None:
    put = store.put("config.json", b"hello")
    store.put("deep/er/ü #1.txt", b"")

    listed = store.list_objects()
    assert put == StoredObject("config.json", 5, "5d41402abc4b2a76b9719d911017c592")
    assert sorted(listed) == ["config.json", "deep/er/ü #1.txt"]
    assert listed["config.json"] == put == store.find("config.json")
    assert store.list_objects("deep") == {"deep/er/ü #1.txt": listed["deep/er/ü #1.txt"]}
    assert store.list_objects("dee") == {}
    assert store.folders() == ["deep"]
    assert store.read(put) == b"hello"
    assert store.read(listed["deep/er/ü #1.txt"]) == b""
    target = bytearray(3)
    store.read_into(put, 1, memoryview(target))
    assert target == b"ell"

    store.copy(put, "copy.json")
    store.delete(["config.json", "missing", "deep/er/ü #1.txt"])
    assert sorted(store.list_objects()) == ["copy.json"]
    assert store.find("config.json") is None


def test_a_conditional_put_loses_to_whoever_was_faster(store: Store) -> None:
    first = store.put("index", b"1", None)
    with pytest.raises(StaleObjectError, match=r"index' is not what it was"):
        store.put("index", b"2", None)
    second = store.put("index", b"2", first)
    with pytest.raises(StaleObjectError, match="somebody else was faster"):
        store.put("index", b"3", first)
    with pytest.raises(StaleObjectError):
        store.put("gone", b"3", first)
    assert store.read(second) == b"2"


def test_a_read_of_an_object_that_was_replaced_or_deleted_is_refused(store: Store) -> None:
    old = store.put("shard", b"old bytes")
    store.put("shard", b"new bytes")
    for _ in range(2):
        with pytest.raises(CheckpointChangedError, match="was replaced or deleted while it was read"):
            store.read(old)
        with pytest.raises(CheckpointChangedError):
            store.copy(old, "other")
        store.delete(["shard"])
    assert store.list_objects() == {}


@pytest.mark.parametrize("size", [0, 5, 8 << 20, (20 << 20) + 1])
def test_a_writer_sends_what_it_was_given_in_blocks_of_any_size(store: Store, s3: Any, bucket: str, size: int) -> None:
    raw = (bytes(range(256)) * (size // 256 + 1))[:size]
    writer = store.open_writer("shard", size)
    block = bytearray(3 << 20)
    for begin in range(0, size, len(block)):
        part = raw[begin : begin + len(block)]
        block[: len(part)] = part
        writer.write(memoryview(block)[: len(part)])
        assert store.find("shard") is None
    put = writer.finish()

    assert put == store.find("shard")
    assert store.read(put) == raw
    assert "Uploads" not in s3.list_multipart_uploads(Bucket=bucket)


def test_a_writer_that_is_aborted_leaves_nothing(store: Store, s3: Any, bucket: str) -> None:
    writer = store.open_writer("shard", 40 << 20)
    writer.write(memoryview(bytes(20 << 20)))
    writer.abort()
    writer.abort()

    assert store.list_objects() == {}
    assert "Uploads" not in s3.list_multipart_uploads(Bucket=bucket)


def test_unfinished_uploads_of_ours_are_swept(store: Store, s3: Any, bucket: str) -> None:
    for key in ("runs/bert/model-1", "runs/bert/video.mp4", "runs/bert/deep/model-1", "runs/bertha/model-1"):
        s3.create_multipart_upload(Bucket=bucket, Key=key)

    assert store.sweep_uploads(lambda name: name.startswith("model-")) == 1
    left = [upload["Key"] for upload in s3.list_multipart_uploads(Bucket=bucket)["Uploads"]]
    assert sorted(left) == ["runs/bert/deep/model-1", "runs/bert/video.mp4", "runs/bertha/model-1"]
    assert store.sweep_uploads(lambda name: name.startswith("model-")) == 0


def test_a_bucket_that_is_not_there_is_told(store: Store) -> None:
    nowhere = open_store("s3://no-such-bucket-here/x")
    writer = nowhere.open_writer("shard", 20 << 20)
    with pytest.raises(StoreNotFoundError, match="aws s3 mb s3://no-such-bucket-here"):
        nowhere.list_objects()
    with pytest.raises(StoreNotFoundError):
        nowhere.put("a", b"1", None)
    with pytest.raises(StoreNotFoundError):
        open_store("s3://no-such-bucket-here/x").find("a")
    with pytest.raises(StoreNotFoundError):
        writer.write(memoryview(bytes(20 << 20)))
        writer.finish()
    writer.abort()
