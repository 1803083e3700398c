"""Many writers of one small object: each change is built on the one before."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from hfshard.errors import CheckpointChangedError, StaleObjectError
from hfshard.stores.opening import open_store

WRITERS = 4
CHANGES = 4


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_no_change_is_lost_among_writers_that_race(store_address: str) -> None:
    def count_up(writer: int) -> None:
        store = open_store(store_address)
        done = 0
        while done < CHANGES:
            found = store.find("count")
            try:
                count = int(store.read(found)) if found else 0
                store.put("count", b"%d" % (count + 1), found)
                done += 1
            except (StaleObjectError, CheckpointChangedError):
                continue

    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(count_up, range(WRITERS)))

    store = open_store(store_address)
    found = store.find("count")
    assert found is not None
    assert store.read(found) == b"16"
