"""A bucket in another region than the one that is asked is followed there, once; or the error names its region."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import hfshard
from hfshard.errors import StoreError
from hfshard.stores import s3
from hfshard.stores.open_store import open_store
from tests.servers.asking import ask, pass_on
from tests.servers.origin import serving
from tests.servers.stores.buckets import Bucket
from tests.servers.wire import Exchange

REGION = "eu-west-1"
SIGNED_FOR = re.compile(r"Credential=[^/]+/\d+/([a-z0-9-]+)/s3/")
REDIRECT = 301, "<Error><Code>PermanentRedirect</Code><Message>Use another endpoint.</Message></Error>"
MALFORMED = (
    400,
    "<Error><Code>AuthorizationHeaderMalformed</Code><Message>the region 'us-east-1' is wrong; expecting 'eu-west-1'"
    f"</Message><Region>{REGION}</Region></Error>",
)

pytestmark = pytest.mark.parametrize("scheme", ["s3"])


class Gate:
    """Stands before S3, and lets requests pass that are signed for the bucket's region; others hear where that is."""

    def __init__(self, upstream: str) -> None:
        self.refusal = REDIRECT
        self.names_region = True
        """Whether a HEAD is told in which region the bucket is."""
        self.refused: Counter[str] = Counter()
        self._upstream = upstream

    def answer(self, exchange: Exchange) -> None:
        """Answer a request."""
        method, target = exchange.record.method, exchange.record.path
        signed_for = SIGNED_FOR.search(exchange.headers.get("Authorization", ""))
        if signed_for is not None and signed_for[1] == REGION:
            body = b"".join(exchange.body.pieces())
            pass_on(exchange, ask(self._upstream, method, target, body, dict(exchange.headers.items())))
            return
        self.refused[method] += 1
        status, words = self.refusal
        said = {"x-amz-bucket-region": REGION} if self.names_region and method == "HEAD" else {}
        exchange.reply(status, b"" if method == "HEAD" else words.encode(), said)


@pytest.fixture
def gate(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(bucket.url)
    with serving(gate.answer) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
        yield gate


@pytest.mark.parametrize("refusal", [REDIRECT, MALFORMED], ids=["redirect", "malformed"])
def test_a_bucket_is_followed_to_its_region_once(gate: Gate, store_address: str, refusal: tuple[int, str]) -> None:
    gate.refusal = refusal
    tensors = {"a": torch.arange(3_000_000.0)}
    hfshard.save_state_dict(tensors, store_address)
    assert torch.equal(hfshard.load_state_dict(store_address, verify="full")["a"], tensors["a"])
    hfshard.reshard_checkpoint(store_address, store_address, "4MB")
    assert torch.equal(hfshard.load_state_dict(store_address, verify="full")["a"], tensors["a"])
    # The first request, and the HEAD where that did not name the region.
    assert gate.refused == ({"GET": 1, "HEAD": 1} if refusal is REDIRECT else {"GET": 1})


@pytest.mark.parametrize("refusal", [REDIRECT, MALFORMED], ids=["redirect", "malformed"])
@pytest.mark.parametrize("first", ["find", "put", "put a large one", "upload", "delete", "folders"])
def test_any_request_may_be_the_first_one(gate: Gate, store_address: str, first: str, refusal: tuple[int, str]) -> None:
    gate.refusal = refusal
    store = open_store(store_address)
    if first == "find":
        assert store.find("a") is None
    elif first == "put":
        store.put("a", b"1")
    elif first == "put a large one":
        store.put("a", bytes(2 << 20))
    elif first == "upload":
        writer = store.open_writer("a", 20 << 20)
        writer.write(memoryview(bytes(20 << 20)))
        assert writer.finish().size == 20 << 20
    elif first == "delete":
        store.delete(["a", "b"])
    else:
        assert store.folders() == []
    assert store.list_objects().keys() == ({"a"} if "put" in first or first == "upload" else set())


def test_threads_follow_together(gate: Gate, store_address: str) -> None:
    stores = [open_store(store_address) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda store: store.list_objects(), stores)) == [{}] * 8
    assert gate.refused["HEAD"] == 1


def test_a_read_that_was_begun_in_the_wrong_region_goes_on(gate: Gate, bucket: Bucket, store_address: str) -> None:
    put = open_store(store_address).put("a", b"some bytes")
    gate.refused.clear()
    fresh = s3.connect(store_address.split("/")[2])
    store: Any = open_store(store_address)
    store._connection = fresh
    assert store.read(put) == b"some bytes"
    assert gate.refused == {"GET": 1, "HEAD": 1}


def test_a_region_that_nobody_names_is_an_error_that_says_what_to_do(gate: Gate, store_address: str) -> None:
    gate.names_region = False
    for _ in range(2):
        with pytest.raises(StoreError, match=r"is in another region\. Set AWS_REGION to its own \('aws s3api head-"):
            open_store(store_address).list_objects()
    assert gate.refused["HEAD"] == 1


def test_a_region_that_is_named_and_wrong_is_in_the_error(gate: Gate, store_address: str) -> None:
    gate.refusal = 400, MALFORMED[1].replace(REGION, "eu-north-1")
    with pytest.raises(StoreError, match=r"is in another region\. Set AWS_REGION to eu-north-1\."):
        open_store(store_address).list_objects()


def test_the_endpoint_is_that_of_the_region(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    monkeypatch.setenv("AWS_REGION", "us-east-2")
    connection = s3.connect("models")
    assert dict(connection.quick.config)["endpoint_url_s3"] == "https://s3.us-east-2.amazonaws.com"
    assert connection.elsewhere is not None
    moved = connection.elsewhere(REGION)
    assert moved is not None
    assert dict(moved.quick.config)["endpoint_url_s3"] == "https://s3.eu-west-1.amazonaws.com"
    assert dict(moved.uploads.config)["region"] == REGION
