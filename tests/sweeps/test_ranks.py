"""A selection of the faults of ranks, some seconds: `scripts/crash_sweep distributed` and `rank-faults` run all."""

from __future__ import annotations

from itertools import product
from pathlib import Path

from tests.sweeps.parts import needs_strace, run_part
from tests.sweeps.rank_cases import CALLS, all_cases

pytestmark = needs_strace

CASES = {
    "2/0/exchange/kill": 1,
    "2/1/writing/enospc": 1,
    "2/0/written/int": 1,
    "2/0/commit/enospc": 1,
    "2/1/after/kill": 2,
    "2/1/writing/int/async": 2,
    "2/1/assigning/int/restore": 1,
    "2/1/opening/raise/ddp_restore": 1,
}
"""Case -> the save that it leaves: the one before, or the one with the fault."""
POINTS = 5


def test_a_rank_that_is_stopped_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    sample = ("--kinds", "kill,int,enospc", "--sample", str(POINTS))

    part = run_part(tmp_path, "distributed", *sample, transitions=["sharded->sharded"])

    assert part.status == 0, part.output
    assert "1 transitions, 5 points, 0 failed, 0 failures of transitions" in part.output
    assert part.each("category") == {"ok-old", "ok-new"}


def test_a_rank_that_fails_is_named_by_the_others_which_save_again(tmp_path: Path) -> None:
    part = run_part(tmp_path, "rank-faults", "--jobs", "2", transitions=CASES)

    assert part.status == 0, part.output
    assert "rank-faults: 8 cases, 0 failed" in part.output
    assert {name: case["found"] for name, case in part.outcomes.items()} == CASES


def test_each_rank_each_phase_and_each_call_is_in_the_table() -> None:
    cases = all_cases()
    usual = [case for case in cases if case.call == "state_dict"]

    assert len({case.name for case in cases}) == len(cases) == 359
    assert {(case.world_size, case.victim) for case in usual} == {(2, rank) for rank in range(-1, 2)} | {
        (4, rank) for rank in range(-1, 4)
    }
    for world_size, victim, phase in product(
        (2, 4), range(4), ("planning", "exchange", "writing", "written", "commit")
    ):
        faults = {case.fault for case in usual if case[:3] == (world_size, victim, phase)}
        assert faults >= ({"kill", "stop", "int"} if victim < world_size else set())
    assert {case.call for case in cases} == set(CALLS)
    assert {case.store for case in cases} == {"rank0", "launcher", "file"}
