"""A short stress of each service; `scripts/stress_stores` goes on for minutes."""

from __future__ import annotations

import pytest

from tests.servers.stores.kinds import SERVICES
from tests.sweeps.stress import Odds, Stress

SECONDS = 6.0
MOST_SAVES = 24
"""Whose objects are there at one time: of four writers, and of late requests."""


@pytest.mark.parametrize("scheme", ["s3", "hf"])
def test_four_writers_beside_faults_lose_no_save_and_fail_no_load(scheme: str) -> None:
    if lacks := SERVICES[scheme].lacks():
        pytest.skip(lacks)
    findings = Stress(scheme, 4, SECONDS, Odds(late_seconds=SECONDS / 4), seed=3, most=40).run()

    assert findings.problems == []
    assert findings.saves["saved"] > 0
    assert findings.loads["whole"] > 0
    assert findings.most_saves <= MOST_SAVES
