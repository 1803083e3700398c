"""A selection of the crash sweep of directory hubs: `scripts/crash_sweep directory-hub` runs all of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import REPOSITORY
from tests.crash.tracer import has_strace

SAMPLE = 60
"""Of the sweep's 2,017 points: about four seconds."""

needs_strace = pytest.mark.skipif(not has_strace(), reason="NO STRACE: NO PUSH IS STOPPED HERE. Install strace.")


def _sweep(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A new interpreter, without torch: it forks and is traced in half the time of one that has imported it."""
    return subprocess.run(
        [sys.executable, "scripts/crash_sweep", "directory-hub", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=600,
    )


@needs_strace
def test_a_push_that_is_killed_or_fails_leaves_the_old_or_the_new_commit() -> None:
    done = _sweep("--sample", str(SAMPLE))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{SAMPLE} points, 0 failed" in done.stdout


@needs_strace
@pytest.mark.slow
def test_every_change_stopped_at_every_call_leaves_the_old_or_the_new_commit() -> None:
    done = _sweep()
    assert done.returncode == 0, done.stdout + done.stderr


@needs_strace
def test_the_sweep_finds_pushes_that_commit_too_early() -> None:
    done = _sweep("--kinds", "kill", "--transition", "second", "--target", "hasty")
    assert done.returncode == 1, done.stdout + done.stderr
