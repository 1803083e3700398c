"""The comparison of resumes: RESUME.md is what was measured, and nothing of hfshard's was inexact."""

from __future__ import annotations

import json

from tests import REPOSITORY
from tests.helpers import processes

BENCH = REPOSITORY / "scripts" / "bench"


def test_the_table_is_rendered_from_what_was_measured(child_environment: dict[str, str]) -> None:
    done = processes.run([BENCH / "resume.py", "--render"], env=child_environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (BENCH / "RESUME.md").read_text(encoding="utf-8")


def test_no_resume_of_ours_was_inexact() -> None:
    cells = json.loads((BENCH / "resume.json").read_text(encoding="utf-8"))["cells"]
    ours = [cell for row in cells.values() for way, (cell, _) in row.items() if way.startswith("hfshard")]
    assert len(cells) == 14
    assert len(ours) == 42
    assert set(ours) == {"exact", "exact, from the one before", "resumes, × 1.00"}
