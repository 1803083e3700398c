"""A selection of the sweep of stores; `scripts/store_sweep` does all of it."""

from __future__ import annotations

import random

import pytest

from tests.stores.services.kinds import SERVICES
from tests.stores.sweep.sweep import KINDS, Sweep

CASES = {
    "s3": "sharded->sharded+config",
    "gs": "upstream-single->sharded+config",
    "az": "variant-over-variant",
    "hf": "single->sharded",
}
"""A transition for each service; they do the same in all."""
POINTS = {"s3": 3, "gs": 2, "az": 2, "hf": 2}


@pytest.mark.parametrize(
    "scheme", [pytest.param(each, marks=[pytest.mark.compat] if each == "s3" else []) for each in CASES]
)
def test_a_save_that_is_broken_at_a_request_leaves_the_old_or_the_new_checkpoint(scheme: str) -> None:
    if lacks := SERVICES[scheme].lacks():
        pytest.skip(lacks)
    sweep = Sweep(scheme, CASES[scheme])
    assert sweep.problems == []

    slow = ("503", "429", "down", "lost-down") if scheme == "hf" else ("503", "429")
    kinds = [kind for kind in KINDS if kind not in slow and scheme not in KINDS[kind].not_in]
    points = [(kind, at) for kind in kinds for at in range(len(sweep.requests))]
    results = [sweep.break_at(kind, at) for kind, at in random.Random(7).sample(points, POINTS[scheme])]
    assert [str(result) for result in results if result.is_failure] == []
