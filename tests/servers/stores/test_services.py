"""The services that tests of stores talk to do what their names promise, asked without hfshard."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.helpers import processes
from tests.servers.stores.buckets import Bucket, S3Bucket
from tests.servers.stores.moto_server import serve_moto


def test_what_is_put_is_listed_read_and_deleted(bucket: Bucket, store_prefix: str, tmp_path: Path) -> None:
    bucket.put(f"{store_prefix}/a b/ü.json", b"{}")
    bucket.put(f"{store_prefix}/weights", b"\0" * 5000)
    bucket.put(f"{store_prefix}-beside", b"")

    assert bucket.sizes(f"{store_prefix}/") == {f"{store_prefix}/a b/ü.json": 2, f"{store_prefix}/weights": 5000}
    assert bucket.objects(store_prefix) == {"a b/ü.json": b"{}", "weights": b"\0" * 5000}
    assert bucket.unfinished(store_prefix) == []
    copied = bucket.copy_to(store_prefix, tmp_path / "copy")
    assert (copied / "a b" / "ü.json").read_bytes() == b"{}"

    bucket.delete(f"{store_prefix}/weights")
    assert bucket.sizes(f"{store_prefix}/") == {f"{store_prefix}/a b/ü.json": 2}


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_an_unfinished_upload_is_seen_by_its_name(bucket: Bucket, scheme: str, store_prefix: str) -> None:
    key = f"{store_prefix}/part"
    if scheme == "az":
        bucket.ask("PUT", key, {"comp": "block", "blockid": "MDAwMQ=="}, b"12345")
    else:
        bucket.ask("POST", key, {"uploads": ""})
    assert bucket.unfinished(store_prefix) == [key]
    assert bucket.sizes(f"{store_prefix}/") == {}


def test_each_process_of_a_run_has_the_same_service(bucket: Bucket, scheme: str) -> None:
    code = "import sys; from tests.servers.stores.running import url_of; print(url_of(sys.argv[1]))"
    done = processes.run(["-c", code, scheme], env=os.environ)
    assert (done.stdout, done.stderr) == (f"{bucket.url}\n", "")


@pytest.fixture
def often_switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_threads_that_write_leave_each_other_and_readers_in_peace(often_switching: None) -> None:
    bucket = S3Bucket(serve_moto())
    bucket.create()
    bucket.put("same", b"")

    def write(name: str) -> None:
        for number in range(40):
            bucket.put(name, b"12345")
            bucket.put("same", b"12345" * number)
            bucket.delete(name)

    def look(name: str) -> None:
        for _ in range(40):
            assert set(bucket.sizes()) in ({"same"}, {"a", "same"}, {"b", "same"}, {"a", "b", "same"})
            assert bucket.read("same") in [b"12345" * number for number in range(40)]

    with ThreadPoolExecutor(4) as threads:
        acts = [threads.submit(act, name) for act in (write, look) for name in "ab"]
    assert [act.exception() for act in acts] == [None] * 4
