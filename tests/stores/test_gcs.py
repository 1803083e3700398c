"""What is Google's own: many objects go by one call."""

from __future__ import annotations

import pytest

from hfshard.stores.open_store import open_store
from tests.servers.stores.fault_proxy import FaultProxy

pytestmark = pytest.mark.parametrize("scheme", ["gs"])


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
