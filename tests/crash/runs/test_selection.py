"""A selection of the crash sweep of training checkpoints: `scripts/crash_sweep runs` runs all of it."""

from __future__ import annotations

import os
import re

import pytest

from tests import REPOSITORY
from tests.crash.main import main
from tests.crash.runs.transitions import all_transitions
from tests.crash.tracer import has_strace
from tests.helpers import forkserver

SELECTION = (
    "first",
    "rotated",
    "replaced",
    "linked-rotated",
    "async-second",
    "wreck-70",
    "wreck-replaced-90",
)

POINTS = 40
"""Of the selection's 1,200 or so: five seconds."""

needs_strace = pytest.mark.skipif(not has_strace(), reason="NO STRACE: NO SAVE IS STOPPED HERE. Install strace.")


def _sweep(*arguments: str) -> tuple[int, str, int]:
    """Exit status, output, and the number of points of a run of the script."""
    done = forkserver.run(
        ["scripts/crash_sweep", "runs", *arguments],
        cwd=REPOSITORY,
        env=os.environ,
        timeout=300,
    )
    points = re.search(r"transitions, (\d+) points", done.stdout)
    return done.returncode, done.stdout + done.stderr[-2000:], int(points[1]) if points else 0


def _chosen(*names: str) -> list[str]:
    return [word for name in names for word in ("--transition", name)]


@needs_strace
def test_a_stopped_save_leaves_the_old_or_the_new_state_to_the_bit() -> None:
    kinds = "kill,int,enospc,eio,full"
    status, output, points = _sweep(*_chosen(*SELECTION), "--kinds", kinds, "--sample", str(POINTS), "--jobs", "2")
    assert status == 0, output
    assert points == POINTS


@needs_strace
def test_a_power_cut_leaves_the_old_or_the_new_state_to_the_bit() -> None:
    status, output, points = _sweep(*_chosen("replaced"), "--kinds", "power")
    assert status == 0, output
    assert points > 20


def test_the_table_names_each_transition_once_and_the_selection_is_of_it() -> None:
    names = [transition.name for transition in all_transitions()]
    assert len(names) == len(set(names)) >= 30
    assert set(SELECTION) <= set(names)


def test_bad_usage_is_exit_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--kinds", "kill,flood"]) == 2
    assert re.search(r"knows .*power.*, not flood", capsys.readouterr().err)
