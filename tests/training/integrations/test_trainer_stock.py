"""transformers' Trainer through `CheckpointCallback`: killed and resumed it ends as if it had run straight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.training.integrations.roles import run_roles
from tests.training.integrations.trainer_child import CASES, run_role

OLDEST = {"amid an epoch, with dropout", "gradient accumulation", "evaluated, best kept, on plateau"}
"""Run on the oldest versions too: together they call all that Trainer keeps to itself."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.compat if name in OLDEST else ()) for name in CASES]
)
def test_a_killed_training_is_resumed_exactly(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    whole = ("straight", "upstream") if case.as_upstream else ("straight",)
    reports = run_roles(run_role, name, ((*whole, "killed"), ("resumed",)), tmp_path)
    newest = [str(tmp_path / "run" / f"checkpoint-{step:08d}") for step in case.resumed_after]
    assert reports["resumed"]["from"] in newest
    for role in reports:
        assert differences(reports["straight"], reports[role]) == [], role


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Every value in which two trainings differ."""
    mine, theirs = one["everything"], other["everything"]
    return [
        f"{path}: {mine.get(path)} | {theirs.get(path)}" for path in mine | theirs if mine.get(path) != theirs.get(path)
    ]
