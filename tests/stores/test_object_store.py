"""Uploads in parts: requests that fail, uploads that are given up, removed by others or left open."""

from __future__ import annotations

import base64
import os
import traceback
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import hfshard
from hfshard.errors import CheckpointChangedError, CommitUnfinishedError, StoreAccessError, StoreError
from hfshard.stores import object_store, s3
from hfshard.stores.open_store import open_store
from hfshard.stores.store import Store
from tests.helpers import processes
from tests.servers.origin import Found
from tests.servers.stores.buckets import Bucket
from tests.servers.stores.fault_proxy import FaultProxy
from tests.servers.wire import Headers

MIB = 1 << 20
OBJECTS = ["s3", "gs", "az"]
PARTS = bytes(range(256)) * (17 * MIB // 256)
"""Three parts: 8, 8 and 1 MiB."""


@pytest.fixture
def store(proxy: FaultProxy, store_address: str, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("HFSHARD_STORE_RETRY_SECONDS", "0.5")
    return open_store(store_address)


@pytest.mark.parametrize("scheme", OBJECTS)
def test_an_upload_asks_once_for_each_part_and_twice_more(store: Store, proxy: FaultProxy, scheme: str) -> None:
    writer = store.open_writer("shard", len(PARTS))
    writer.write(memoryview(PARTS))
    writer.finish()
    small = store.open_writer("small", 8 * MIB)
    small.write(memoryview(PARTS)[: 8 * MIB])
    small.finish()

    begin = [] if scheme == "az" else ["begin"]
    assert sorted(request.kind for request in proxy.requests()) == sorted([*begin, *["part"] * 3, "finish", "put"])


@pytest.mark.parametrize("scheme", OBJECTS)
def test_an_upload_whose_parts_fail_for_good_leaves_nothing(
    store: Store, proxy: FaultProxy, bucket: Bucket, store_prefix: str, scheme: str
) -> None:
    proxy.fail(match=" part ", kind="status", status=500, times=100)
    writer = store.open_writer("shard", len(PARTS))
    with pytest.raises(StoreError, match="500"):
        writer.write(memoryview(PARTS))
        writer.finish()
    writer.abort()
    assert bucket.sizes(store_prefix) == {}
    assert scheme == "az" or bucket.unfinished(store_prefix) == []


@pytest.mark.parametrize("scheme", ["gs"])  # moto's S3 fails when a part is sent to an upload that was removed
def test_an_upload_that_somebody_removed_came_too_late(store: Store) -> None:
    writer = store.open_writer("shard", len(PARTS))
    writer.write(memoryview(PARTS)[: 9 * MIB])
    while not store.sweep_uploads(lambda name: name == "shard"):
        pass
    with pytest.raises(StoreError, match="was removed"):
        writer.write(memoryview(PARTS)[9 * MIB :])
        writer.finish()
    writer.abort()


@pytest.mark.parametrize("scheme", OBJECTS)
def test_what_an_upload_was_to_replace_does_not_pass_for_it(
    store: Store, proxy: FaultProxy, bucket: Bucket, store_prefix: str, tmp_path: Path
) -> None:
    directory = tmp_path / "directory"
    hfshard.save_state_dict({"a": torch.zeros(4)}, directory)
    (directory / "tokenizer.json").write_bytes(b"a" * 9 * MIB)
    hfshard.push_checkpoint(directory, str(store.address))
    (directory / "tokenizer.json").write_bytes(b"b" * 9 * MIB)

    proxy.fail("status", " finish ", status=503, times=100)
    with pytest.raises(CommitUnfinishedError, match="503"):
        hfshard.push_checkpoint(directory, str(store.address))
    assert bucket.read(f"{store_prefix}/tokenizer.json") == b"a" * 9 * MIB

    proxy.clear()
    proxy.fail("lost_answer", " finish ")
    hfshard.push_checkpoint(directory, str(store.address))
    assert bucket.read(f"{store_prefix}/tokenizer.json") == b"b" * 9 * MIB


@pytest.mark.parametrize("scheme", OBJECTS)
def test_a_wrong_size_is_no_object(store: Store) -> None:
    for size in (4, 6):
        writer = store.open_writer("shard", size)
        with pytest.raises(StoreError, match=f"was declared with {size} bytes, got"):
            writer.write(memoryview(b"12345"))
            writer.finish()
    assert store.list_objects() == {}


def leave_open(address: str) -> None:
    """Begin an upload and end."""
    vars(object_store)["_ABORT_SECONDS"] = 100.0  # for which the end waits
    writer = open_store(address).open_writer("shard", len(PARTS))
    writer.write(memoryview(PARTS)[: 16 * MIB])


@pytest.mark.parametrize("scheme", ["s3"])
def test_an_upload_that_is_open_when_the_interpreter_ends_is_removed(
    bucket: Bucket, store_address: str, store_prefix: str
) -> None:
    assert processes.call(leave_open, store_address, env=os.environ).wait() == 0
    assert bucket.unfinished(store_prefix) == []
    assert bucket.sizes(store_prefix) == {}


CUSTOMER_KEY = base64.b64encode(bytes(32)).decode()
ENCRYPTIONS = {
    "kms": (
        {
            "AWS_SERVER_SIDE_ENCRYPTION": "aws:kms",
            "AWS_SSE_KMS_KEY_ID": "arn:aws:kms:us-east-1:1:key/2",
            "AWS_SSE_BUCKET_KEY_ENABLED": "true",
        },
        {
            "x-amz-server-side-encryption": "aws:kms",
            "x-amz-server-side-encryption-aws-kms-key-id": "arn:aws:kms:us-east-1:1:key/2",
            "x-amz-server-side-encryption-bucket-key-enabled": "true",
        },
    ),
    "customer": (
        {"AWS_SERVER_SIDE_ENCRYPTION": "sse-c", "AWS_SSE_CUSTOMER_KEY_BASE64": CUSTOMER_KEY},
        {
            "x-amz-server-side-encryption-customer-algorithm": "AES256",
            "x-amz-server-side-encryption-customer-key": CUSTOMER_KEY,
            "x-amz-server-side-encryption-customer-key-md5": "cLyPS3KoaSFGi/joRB3OUQ==",
        },
    ),
}
"""Variables of users -> the headers of what they put."""


@pytest.mark.parametrize("scheme", ["s3"])
@pytest.mark.parametrize("kind", ENCRYPTIONS)
@pytest.mark.parametrize("size", [10, len(PARTS)])
def test_a_copy_is_encrypted_as_what_is_put(
    bucket: Bucket, proxy: FaultProxy, store_address: str, kind: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: dict[str, list[dict[str, str]]] = defaultdict(list)
    (origin,) = proxy._origins
    find = origin.find

    def note(method: str, target: str, headers: Headers) -> Found:
        found = find(method, target, headers)
        given = {name.lower(): text for name, text in headers.items()}
        sent[found.kind].append({name: text for name, text in given.items() if "encryption" in name})
        return found

    monkeypatch.setattr(origin, "find", note)
    monkeypatch.setattr(s3, "LARGEST_COPY", 6 * MIB)
    monkeypatch.setattr(s3, "COPIED_PART", 6 * MIB)
    variables, expected = ENCRYPTIONS[kind]
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    store = open_store(store_address)
    writer = store.open_writer("shard", size)
    writer.write(memoryview(PARTS)[:size])
    put = writer.finish()

    store.copy(put, "copy")

    of_source = {name.replace("x-amz", "x-amz-copy-source"): text for name, text in expected.items()}
    of_source = of_source if kind == "customer" else {}
    if size == 10:
        assert (sent["put"], sent["copy"]) == ([expected], [{**expected, **of_source}])
    else:
        assert sent["begin"] == [expected, expected]
        of_part = {**expected, **of_source} if kind == "customer" else {}
        assert sent["part"][-3:] == [of_part] * 3


@pytest.mark.parametrize("scheme", ["s3"])
def test_a_key_that_is_not_in_base64_is_refused_without_the_key(
    store_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SERVER_SIDE_ENCRYPTION", "sse-c")
    monkeypatch.setenv("AWS_SSE_CUSTOMER_KEY_BASE64", "my=secret")
    with pytest.raises(StoreAccessError, match="AWS_SSE_CUSTOMER_KEY_BASE64 is not in base64") as refused:
        open_store(store_address)
    assert "secret" not in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize("scheme", ["s3"])
def test_a_large_object_is_copied_in_parts_if_it_is_the_one(
    store: Store, bucket: Bucket, store_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "LARGEST_COPY", 6 * MIB)
    monkeypatch.setattr(s3, "COPIED_PART", 6 * MIB)
    writer = store.open_writer("shard", len(PARTS))
    writer.write(memoryview(PARTS))
    put = writer.finish()

    store.copy(put, "copy")
    assert bucket.objects(store_prefix) == {"shard": PARTS, "copy": PARTS}
    for source in (replace(put, etag="other"), replace(put, name="gone")):
        with pytest.raises(CheckpointChangedError):
            store.copy(source, "copy")
    assert bucket.unfinished(store_prefix) == []


@pytest.mark.parametrize("scheme", ["s3"])
def test_a_copy_that_can_not_be_given_up_still_says_why_it_failed(
    proxy: FaultProxy, store_address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(s3, "LARGEST_COPY", 6 * MIB)
    monkeypatch.setattr(s3, "COPIED_PART", 6 * MIB)
    store = open_store(store_address)
    put = store.put("shard", bytes(7 * MIB))
    proxy.fail("status", match=" part ", status=412, times=9)  # moto does not look at the condition
    proxy.fail("status", match=" abort ", status=403, times=9)
    with pytest.raises(CheckpointChangedError, match="was replaced or deleted"):
        store.copy(put, "copy")
    assert "could not be deleted: An error occurred (403)" in caplog.text
