"""A selection of the faults of ranks, ten seconds: `scripts/crash_sweep distributed` and `rank-faults` run all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests import REPOSITORY
from tests.crash.ranks.cases import all_cases
from tests.crash.tracer import has_strace
from tests.helpers import forkserver

pytestmark = pytest.mark.skipif(not has_strace(), reason="NO STRACE: NO RANK IS STOPPED HERE. Install strace.")

CASES = ("2/1/planning/raise", "2/0/exchange/kill", "2/1/writing/enospc", "2/0/commit/int", "2/1/after/kill")
POINTS = 5


def _run(place: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """What a run of the script says, and what it writes."""
    outcomes = place / "outcomes.json"
    done = forkserver.run(
        ["scripts/crash_sweep", *arguments, "--json", str(outcomes)], cwd=REPOSITORY, env=os.environ, timeout=120
    )
    said = done.stdout + done.stderr[-2000:]
    assert done.returncode == 0, said
    return said, json.loads(outcomes.read_text())


def test_a_rank_that_is_stopped_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    said, told = _run(
        tmp_path,
        "distributed",
        "--transition",
        "sharded->sharded",
        "--kinds",
        "kill,int,enospc",
        "--sample",
        str(POINTS),
    )

    assert "1 transitions, 5 points, 0 failed, 0 failures of transitions" in said
    assert {point["category"] for point in told["points"]} == {"ok-old", "ok-new"}


def test_a_rank_that_fails_is_named_by_the_others_which_save_again(tmp_path: Path) -> None:
    said, told = _run(
        tmp_path, "rank-faults", "--jobs", "2", *(word for case in CASES for word in ("--transition", case))
    )

    assert "rank-faults: 5 cases, 0 failed" in said
    assert {name: case["found"] for name, case in told.items()} == {
        "2/1/planning/raise": 1,
        "2/0/exchange/kill": 1,
        "2/1/writing/enospc": 1,
        "2/0/commit/int": 1,
        "2/1/after/kill": 2,
    }


def test_each_rank_and_each_phase_is_in_the_table() -> None:
    cases = all_cases()

    assert len({case.name for case in cases}) == len(cases) == 138
    assert {(case.world_size, case.victim) for case in cases} == {(2, rank) for rank in range(-1, 2)} | {
        (4, rank) for rank in range(-1, 4)
    }
    assert {case.phase for case in cases} == {"planning", "exchange", "writing", "commit", "cleanup", "after"}
