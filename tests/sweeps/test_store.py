"""A selection of the sweep of stores; `scripts/store_sweep` does all of it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.servers.stores.kinds import SERVICES
from tests.sweeps.engine import Point, sweep
from tests.sweeps.store import KINDS, StorePoint, StoreSuite, transitions

CASES = {
    "s3": "sharded->sharded+config",
    "gs": "upstream-single->sharded+config",
    "az": "variant-over-variant",
    "hf": "single->sharded",
}
"""A transition for each service; they do the same in all."""
POINTS = {"s3": 3, "gs": 2, "az": 2, "hf": 2}


@pytest.mark.parametrize("scheme", CASES)
def test_a_save_that_is_broken_at_a_request_leaves_the_old_or_the_new_checkpoint(scheme: str) -> None:
    if lacks := SERVICES[scheme].lacks():
        pytest.skip(lacks)
    suite = StoreSuite(scheme)
    slow = ("503", "429", "down", "lost-down") if scheme == "hf" else ("503", "429")
    kinds = [kind for kind in KINDS if kind not in slow and scheme not in KINDS[kind].not_in]

    def choose(points: Sequence[StorePoint]) -> list[StorePoint]:
        every = [Point(points[0].recorded, at, kind) for kind in kinds for at in range(len(points[0].recorded.calls))]
        return random.Random(7).sample(every, POINTS[scheme])

    [recorded], outcomes = sweep(suite, [transitions()[CASES[scheme]]], kinds, choose=choose)

    assert recorded.problems == ()
    assert len(outcomes) == POINTS[scheme]
    assert [str(outcome) for outcome in suite.failed(outcomes)] == []
