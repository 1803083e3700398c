"""A selection of the sweeps of saves, runs and directory hubs, half a minute: `scripts/crash_sweep` runs all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.sweeps.command import suite_of
from tests.sweeps.parts import needs_strace, run_part

SELECTIONS = {
    "saves": (
        "fresh->single",
        "fresh->sharded",
        "single->single+config",
        "single->sharded",
        "single->sharded+config",
        "sharded->single",
        "sharded->single+config",
        "sharded->sharded",
        "sharded->sharded+config",
        "sharded->fewer+config",
        "bin->sharded+config",
        "sharded-bin->sharded",
        "upstream-sharded->single+config",
        "mess->sharded+config",
        "identical-sharded",
        "variant-half-beside-sharded",
        "wreck-sharded-80",
        "strays-beside-sharded->single+config",
        "strays-beside-single->sharded",
        "bare-sharded->single",
        "net-single->single+config",
        "net-single->sharded+config",
        "net-upstream-single->single+config",
        "net-single->single-config",
        "net-wreck-single-60",
        "reshard-single->sharded",
        "reshard-sharded->many",
        "reshard-over-sharded",
        "regroup-two->many",
        "regroup-upstream-many->two",
        "convert-sharded-bin->sharded",
        "convert-dcp-over-sharded",
        "convert-deepspeed-into-fresh",
        "pull-into-fresh->single",
        "pull-sharded->sharded",
        "wreck-pull-80",
    ),
    "runs": (
        "first",
        "rotated",
        "replaced",
        "linked-rotated",
        "async-second",
        "wreck-70",
        "wreck-replaced-90",
    ),
    "directory-hub": ("*",),
}

POINTS = {"saves": 48, "runs": 20, "directory-hub": 45}
"""Of the selections' 5,300, 1,200 and 2,017 or so."""

KINDS = {
    "saves": "kill,int,enospc,eio,full",
    "runs": "kill,int,enospc,eio,full",
    "directory-hub": "kill,enospc,eio,int,unsupported",
}

FINE = {
    "saves": {"ok-old", "ok-new", "ok-split", "clear-error"},
    "runs": {"old", "new"},
    "directory-hub": {"old", "new"},
}

TRANSITIONS = {"saves": 14, "runs": 30, "directory-hub": 15}
"""At least."""


@needs_strace
@pytest.mark.parametrize("suite", SELECTIONS)
def test_what_is_stopped_leaves_the_old_or_the_new(suite: str, tmp_path: Path) -> None:
    jobs = ("--jobs", "2") if suite == "runs" else ()
    sample = ("--kinds", KINDS[suite], "--sample", str(POINTS[suite]))

    part = run_part(tmp_path, suite, *sample, *jobs, transitions=SELECTIONS[suite])

    assert part.status == 0, part.output
    assert f"{POINTS[suite]} points, 0 failed" in part.output
    assert len(part.points) == POINTS[suite]
    assert part.each("category") <= FINE[suite]
    assert part.each("kind") == set(KINDS[suite].split(","))


@needs_strace
@pytest.mark.parametrize(
    ("suite", "transition", "least"), [("saves", "sharded->sharded+config", 51), ("runs", "replaced", 21)]
)
def test_a_power_cut_leaves_the_old_or_the_new(suite: str, transition: str, least: int, tmp_path: Path) -> None:
    part = run_part(tmp_path, suite, "--kinds", "power", transitions=[transition])

    assert part.status == 0, part.output
    assert len(part.points) >= least
    assert part.each("category") <= FINE[suite]


@needs_strace
@pytest.mark.slow
def test_every_change_of_a_hub_stopped_at_every_call_leaves_the_old_or_the_new_commit(tmp_path: Path) -> None:
    part = run_part(tmp_path, "directory-hub")

    assert part.status == 0, part.output


@needs_strace
def test_the_sweep_finds_failures_in_upstreams_own_save(tmp_path: Path) -> None:
    chosen = ("single->sharded", "sharded->sharded+config")

    part = run_part(
        tmp_path, "saves", "--target", "transformers", "--kinds", "kill", "--sample", "24", transitions=chosen
    )

    assert part.status == 1, part.output
    assert {"wrong", "unloadable"} <= part.each("category")


@needs_strace
def test_the_sweep_finds_pushes_that_commit_too_early(tmp_path: Path) -> None:
    part = run_part(tmp_path, "directory-hub", "--kinds", "kill", "--target", "hasty", transitions=["second"])

    assert part.status == 1, part.output


@pytest.mark.parametrize("suite", SELECTIONS)
def test_the_table_names_each_transition_once_and_the_selection_is_of_it(suite: str) -> None:
    names = [transition.name for transition in suite_of(suite, "hfshard").transitions()]

    assert len(names) == len(set(names)) >= TRANSITIONS[suite]
    assert set(SELECTIONS[suite]) - {"*"} <= set(names)


@pytest.mark.parametrize("suite", ["saves", "runs"])
def test_bad_usage_is_exit_status_2(suite: str, tmp_path: Path) -> None:
    part = run_part(tmp_path, suite, "--kinds", "kill,flood")

    assert part.status == 2
    assert re.search(r"knows .*power.*, not flood", part.output)
    assert "flood" not in suite_of(suite, "hfshard").kinds
