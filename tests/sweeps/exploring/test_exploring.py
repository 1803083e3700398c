"""A part of what `scripts/explore_stores` explores: small spaces whole, others at random, and each rule left out."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator

import pytest

from tests.sweeps.exploring.explorer import BrokenError, explore, walk
from tests.sweeps.exploring.mutants import mutants
from tests.sweeps.exploring.programs import one_thread
from tests.sweeps.exploring.spaces import check_stores, spaces

WHOLE = [
    "two writers, 1 fault",
    "two writers from nothing, 1 fault",
    "two writers over an upload, 1 fault",
]
WALKS = 12


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread, and no words about each fault."""
    logger = logging.getLogger("hfshard")
    monkeypatch.setattr(logger, "disabled", True)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    with one_thread():
        yield
    logger.setLevel(level)


@pytest.mark.parametrize("name", WHOLE)
def test_no_order_of_requests_breaks_a_small_space(name: str) -> None:
    space = spaces()[name]

    explored = explore(space.begin(), space.check())

    assert explored.is_whole
    assert explored.states > 5000
    check_stores(space, sorted(explored.stores, key=lambda one: one.number))


@pytest.mark.parametrize("name", list(spaces()))
def test_random_orders_break_nothing(name: str) -> None:
    space = spaces()[name]
    first, check, draw = space.begin(), space.check(), random.Random(7)

    ends = {walk(first, check, draw).store for _ in range(WALKS if not space.is_run else WALKS // 6)}

    check_stores(space, sorted(ends, key=lambda one: one.number)[:10])


@pytest.mark.parametrize("rule", list(mutants()))
def test_each_rule_that_is_left_out_is_found(rule: str) -> None:
    mutant = mutants()[rule]
    with mutant.change(), pytest.raises(BrokenError) as found:
        explore(mutant.space.begin(), mutant.space.check())

    assert str(found.value).startswith(mutant.broken)
