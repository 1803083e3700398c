"""The comparison of resumes: RESUME.md is what was measured, and nothing of hfshard's was inexact."""

from __future__ import annotations

import json

from tests import REPOSITORY
from tests.helpers import forkserver

BENCH = REPOSITORY / "scripts" / "bench"
README = REPOSITORY / "hfshard" / "training" / "GUIDE.md"


def test_the_table_is_rendered_from_what_was_measured(child_environment: dict[str, str]) -> None:
    done = forkserver.run([BENCH / "resume.py", "--render"], env=child_environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (BENCH / "RESUME.md").read_text(encoding="utf-8")


def test_no_resume_of_ours_was_inexact() -> None:
    cells = json.loads((BENCH / "resume.json").read_text(encoding="utf-8"))["cells"]
    ours = [cell for row in cells.values() for way, (cell, _) in row.items() if way.startswith("hfshard")]
    assert len(cells) == 14
    assert len(ours) == 42
    assert set(ours) == {"exact", "exact, from the one before", "resumes, × 1.00"}


def test_the_table_of_the_readme_is_that_of_the_results(child_environment: dict[str, str]) -> None:
    done = forkserver.run([BENCH / "resume.py", "--readme"], env=child_environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() and done.stdout.strip() in README.read_text(encoding="utf-8")
