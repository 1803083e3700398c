"""Who reads from our S3 beside who writes is answered, wherever Python goes from one thread to the next."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.stores.services.buckets import S3Bucket
from tests.stores.services.moto_server import serve_moto


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
