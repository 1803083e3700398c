"""Parts of `scripts/crash_sweep`, as tests run them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import REPOSITORY
from tests.helpers import processes
from tests.sweeps.child import has_strace

needs_strace = pytest.mark.skipif(not has_strace(), reason="NO STRACE: NOTHING IS STOPPED HERE. Install strace.")

_SECONDS = 300.0


class Part(NamedTuple):
    """What came of a part of a sweep."""

    status: int
    output: str
    outcomes: dict[str, Any]
    """What it wrote by `--json`."""

    @property
    def points(self) -> list[dict[str, Any]]:
        """Every point's outcome."""
        points: list[dict[str, Any]] = self.outcomes.get("points", [])
        return points

    def each(self, key: str) -> set[str]:
        """What there is of a key in the outcomes of points."""
        return {point[key] for point in self.points}


def run_part(place: Path, suite: str, *arguments: str, transitions: Iterable[str] = ()) -> Part:
    """Run the script; that of hubs in an interpreter without torch: it forks and is traced in half the time."""
    path = place / "outcomes.json"
    words = [word for name in transitions for word in ("--transition", name)]
    command = ["scripts/crash_sweep", suite, *words, *arguments, "--json", str(path)]
    if suite == "directory-hub":
        done = subprocess.run(
            [sys.executable, *command], cwd=REPOSITORY, capture_output=True, text=True, timeout=2 * _SECONDS
        )
    else:
        done = processes.run(command, cwd=REPOSITORY, env=os.environ, timeout=_SECONDS)
    outcomes = json.loads(path.read_text()) if path.exists() else {}
    return Part(done.returncode, done.stdout + done.stderr[-2000:], outcomes)
