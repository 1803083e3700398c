"""A selection of the crash sweep, half a minute: `scripts/crash_sweep` runs all of it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests import REPOSITORY
from tests.crash.saves.suite import SavesSuite
from tests.crash.saves.transitions import all_transitions
from tests.crash.tracer import has_strace
from tests.helpers import forkserver

SELECTION = (
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
)

POINTS = 100
"""Of the selection's 4,400 or so: three of each transition, twenty of each kind."""

needs_strace = pytest.mark.skipif(not has_strace(), reason="NO STRACE: NO SAVE IS STOPPED HERE. Install strace.")


def _sweep(place: Path, *arguments: str) -> tuple[int, str, list[dict[str, Any]]]:
    """Exit status, output, and the points of a run of the script."""
    outcomes = place / "outcomes.json"
    done = forkserver.run(
        ["scripts/crash_sweep", "--json", str(outcomes), *arguments],
        cwd=REPOSITORY,
        env=os.environ,
        timeout=300,
    )
    points = json.loads(outcomes.read_text())["points"] if outcomes.exists() else []
    return done.returncode, done.stdout + done.stderr[-2000:], points


def _chosen(names: tuple[str, ...]) -> list[str]:
    return [word for name in names for word in ("--transition", name)]


@needs_strace
def test_a_stopped_save_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    kinds = "kill,int,enospc,eio,full"
    status, output, points = _sweep(tmp_path, *_chosen(SELECTION), "--kinds", kinds, "--sample", str(POINTS))
    assert status == 0, output
    assert len(points) == POINTS
    assert {point["category"] for point in points} <= {"ok-old", "ok-new", "ok-split", "clear-error"}
    assert {point["kind"] for point in points} == set(kinds.split(","))


@needs_strace
def test_a_power_cut_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    chosen = _chosen(("sharded->sharded+config",))
    status, output, points = _sweep(tmp_path, *chosen, "--kinds", "power")
    assert status == 0, output
    assert len(points) > 50


@needs_strace
def test_the_sweep_finds_failures_in_upstreams_own_save(tmp_path: Path) -> None:
    chosen = _chosen(("single->sharded", "sharded->sharded+config"))
    status, output, points = _sweep(tmp_path, "--target", "transformers", *chosen, "--kinds", "kill", "--sample", "24")
    assert status == 1, output
    assert {"wrong", "unloadable"} <= {point["category"] for point in points}


def test_the_table_names_each_transition_once_and_the_selection_is_of_it() -> None:
    names = [transition.name for transition in all_transitions()]
    assert len(names) == len(set(names)) >= 14
    assert set(SELECTION) <= set(names)


def test_bad_usage_is_exit_status_2(tmp_path: Path) -> None:
    status, output, _ = _sweep(tmp_path, "--kinds", "kill,flood")
    assert status == 2
    assert re.search(r"knows .*power.*, not flood", output)
    assert "flood" not in SavesSuite.kinds
