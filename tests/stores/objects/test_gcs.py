"""What is Google's own: conditions are generations, which no listing tells, and many objects go by one call."""

from __future__ import annotations

import pytest

from hfshard.errors import StaleObjectError
from hfshard.stores.opening import open_store
from hfshard.stores.protocols import StoredObject
from tests.stores.services.buckets import Bucket
from tests.stores.services.fault_proxy import FaultProxy

pytestmark = pytest.mark.parametrize("scheme", ["gs"])


def test_what_this_process_has_put_needs_no_look_at_its_generation(
    proxy: FaultProxy, bucket: Bucket, store_address: str, store_prefix: str
) -> None:
    old = open_store(store_address).put("small", b"old", None)
    proxy.clear()
    new = open_store(store_address).put("small", b"new", old)
    assert [request.kind for request in proxy.requests()] == ["put"]

    bucket.put(f"{store_prefix}/small", b"other")
    bucket.put(f"{store_prefix}/small", b"new")  # another generation with the same ETag
    proxy.clear()
    store = open_store(store_address)
    store.put("small", b"newest", new)
    assert store.read(store.list_objects()["small"]) == b"newest"
    assert [request.kind for request in proxy.requests()][:3] == ["put", "head", "put"]

    with pytest.raises(StaleObjectError, match="somebody else was faster"):
        store.put("small", b"late", new)
    with pytest.raises(StaleObjectError, match="somebody else was faster"):
        store.put("small", b"late", StoredObject("small", 3, "unheard of"))


@pytest.mark.parametrize("status", [None, 400, 503])
def test_many_objects_go_by_one_call_or_one_by_one(status: int | None, proxy: FaultProxy, store_address: str) -> None:
    store = open_store(store_address)
    names = ["a b", "a&<b>", "änderung/ü", "+%25"]
    for name in [*names, "stays"]:
        store.put(name, b"x")
    proxy.clear()
    if status is not None:
        proxy.fail("status", match="delete_many", status=status, times=1)

    store.delete([*names, "never there"])

    assert list(store.list_objects()) == ["stays"]
    kinds = [request.kind for request in proxy.requests()][:-1]
    assert kinds.count("delete_many") == (2 if status == 503 else 1)
    assert ("delete" in kinds) == (status == 400)
