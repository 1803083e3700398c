"""A store whose service fails for a while, loses answers or is silent: what is promised is done once, or an error."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hfshard.errors import StoreAccessError, StoreConnectionError, StoreError
from hfshard.stores.open_store import open_store
from hfshard.stores.store import Store
from tests.helpers import processes
from tests.servers.stores.buckets import Bucket
from tests.servers.stores.fault_proxy import FaultProxy
from tests.stores.test_store_contract import MIB, write

FAULTS: dict[str, dict[str, Any]] = {
    "500": {"kind": "status", "status": 500},
    "503": {"kind": "status", "status": 503, "retry_after": 1},
    "429": {"kind": "status", "status": 429, "retry_after": 1},
    "closed": {"kind": "drop"},
    "reset": {"kind": "drop", "how": "rst"},
    "lost": {"kind": "lost_answer"},
    "cut-answer": {"kind": "truncate", "after_bytes": 1},
}
SLOW = ("503", "429")
"""Faults after which a client waits for a second: on one service only."""


@pytest.fixture(params=["s3", "gs", "az"])
def scheme(request: pytest.FixtureRequest) -> str:
    """Object stores; what a bucket of the Hub makes of faults stands in tests/servers/bucket."""
    given: str = request.param
    return given


@pytest.fixture
def store(proxy: FaultProxy, store_address: str) -> Store:
    return open_store(store_address)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_request_of_a_store_is_tried_again(
    store: Store, scheme: str, proxy: FaultProxy, bucket: Bucket, store_prefix: str, fault: str
) -> None:
    if fault in SLOW and scheme != "s3":
        pytest.skip("its waits are told on S3")
    store.put("index", b"old")
    proxy.fail(match="^PUT", **FAULTS[fault])
    new = store.put("index", b"new")
    proxy.fail(match="^(GET|HEAD)", **FAULTS[fault])
    assert store.find("index") == new
    proxy.fail(match="GET get", **FAULTS[fault])
    assert store.read(new) == b"new"
    proxy.fail(match="GET list", **FAULTS[fault])
    assert store.list_objects() == {"index": new}
    proxy.fail(match="PUT copy", **FAULTS[fault])
    store.copy(new, "copied")
    assert bucket.objects(store_prefix) == {"index": b"new", "copied": b"new"}
    proxy.fail(match="delete", **FAULTS[fault])
    store.delete(["index", "copied"])
    assert bucket.objects(store_prefix) == {}


def test_a_put_whose_answer_is_lost_is_done_once_more(
    store: Store, proxy: FaultProxy, bucket: Bucket, store_prefix: str
) -> None:
    proxy.fail("lost_answer", "PUT put", times=2)
    first = store.put("index", b"1")
    assert store.read(first) == b"1"

    # The client tries larger bodies again by itself.
    large = os.urandom(2 * MIB)
    proxy.fail("lost_answer", "PUT put")
    second = store.put("index", large)
    assert store.read(second) == large
    assert bucket.objects(store_prefix) == {"index": large}


@pytest.mark.parametrize("size", [1, 2 * MIB])
def test_a_put_that_failed_says_whether_it_may_be_done_yet(
    store: Store,
    proxy: FaultProxy,
    bucket: Bucket,
    store_prefix: str,
    size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proxy.fail("status", "PUT put", status=403, times=100)
    with pytest.raises(StoreAccessError) as refused:
        store.put("index", bytes(size))
    assert refused.value.may_be_done is (size > MIB)  # of a larger body, the client does not say why it tried again
    proxy.clear()

    monkeypatch.setenv("HFSHARD_STORE_RETRY_SECONDS", "0.5")
    again = open_store(str(store.address))
    proxy.fail("late", "PUT put", status=504)
    proxy.fail("status", "PUT put", status=503, times=100)
    with pytest.raises(StoreError) as late:
        again.put("index", bytes(size))
    assert late.value.may_be_done is True
    assert bucket.objects(store_prefix) == {}
    assert [answer.status < 300 for answer in proxy.release()] == [True]
    assert bucket.objects(store_prefix) == {"index": bytes(size)}


@pytest.mark.parametrize(
    ("scheme", "kind", "fault"),
    [
        pytest.param(scheme, kind, fault, marks=[] if scheme == "s3" or own == other else pytest.mark.slow)
        for scheme in ("s3", "gs", "az")
        for own, kind in enumerate(("begin", "part", "finish"))
        for other, fault in enumerate(("500", "reset", "lost"))
    ],
)
def test_each_request_of_a_writer_is_tried_again(
    store: Store, proxy: FaultProxy, bucket: Bucket, store_prefix: str, kind: str, fault: str
) -> None:
    raw = bytes(range(256)) * (9 * MIB // 256)
    proxy.fail(match=f" {kind} ", **FAULTS[fault])
    written = write(store, "weights", raw)
    assert store.find("weights") == written
    assert bucket.read(f"{store_prefix}/weights") == raw


def test_a_part_that_breaks_in_its_middle_is_sent_again(
    store: Store, proxy: FaultProxy, bucket: Bucket, store_prefix: str
) -> None:
    raw = bytes(range(256)) * (9 * MIB // 256)
    proxy.fail("drop", "PUT part", after_bytes=3 * MIB, how="rst")
    write(store, "weights", raw)
    assert bucket.read(f"{store_prefix}/weights") == raw
    assert bucket.unfinished(store_prefix) == []


def test_a_read_that_breaks_asks_for_the_rest_only(store: Store, proxy: FaultProxy) -> None:
    raw = bytes(range(256)) * (4 * MIB // 256)
    found = store.put("weights", raw)
    proxy.clear()
    proxy.fail("drop", "GET get", after_bytes=3 * MIB)
    assert store.read(found) == raw

    first, rest = proxy.requests("get")
    assert first.range == "bytes=0-4194303"
    begin = int((rest.range or "").removeprefix("bytes=").partition("-")[0])
    assert 2 * MIB <= begin <= 3 * MIB
    assert rest.range == f"bytes={begin}-4194303"


@pytest.mark.parametrize("scheme", ["s3"])
def test_a_service_that_goes_on_failing_is_an_error_that_names_the_address(
    store: Store, proxy: FaultProxy, store_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HFSHARD_STORE_RETRY_SECONDS", "0.5")
    proxy.fail("status", status=500, times=100)
    with pytest.raises(StoreError, match=f"{store_address}.*500"):
        store.list_objects()
    proxy.clear()
    proxy.fail("drop", times=100)
    with pytest.raises(StoreConnectionError, match=store_address):
        store.list_objects()


@pytest.mark.parametrize("scheme", ["s3"])
def test_an_answer_that_never_comes_is_not_waited_for(
    proxy: FaultProxy, store_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HFSHARD_STORE_TIMEOUT", "0.5")
    store = open_store(store_address)
    proxy.fail("drop", "PUT put", how="silence")
    proxy.fail("lost_answer", "PUT put", how="silence")
    begin = time.monotonic()
    put = store.put("index", b"1")
    assert time.monotonic() - begin < 60  # of silence for each, where nothing is said
    assert store.find("index") == put


def test_threads_share_a_store(store: Store) -> None:
    raw = bytes(range(256)) * (MIB // 256)

    def work(number: int) -> bool:
        found = write(store, f"{number}", raw + bytes([number]))
        return store.read(found) == raw + bytes([number])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(24)))
    assert len(store.list_objects()) == 24


@pytest.mark.parametrize("scheme", ["s3"])
def test_a_fork_is_told_to_open_a_store_of_its_own(store: Store) -> None:
    store.put("index", b"1")

    def list_objects() -> None:
        with pytest.raises(StoreError):
            store.list_objects()

    assert processes.exit_of_fork(list_objects, 120) == 0
