"""Trainings in processes of their own, one role after another, and what they report."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.training import processes


def run_roles(
    run_role: Callable[[str, str, Path], None], name: str, roles: tuple[str, ...], directory: Path
) -> dict[str, Any]:
    """Run some roles of a case, one after the other.

    Args:
        run_role: What a process calls with the case, the role and the directory.
        name: The case.
        roles: "killed" is to end by SIGKILL and reports nothing; every other one writes `<role>.json`.
        directory: Where they save and report.

    Returns:
        Role -> report.
    """
    reports = {}
    for role in roles:
        end = processes.run(directory / f"{role}.txt", run_role, name, role, directory, modules=(run_role.__module__,))
        assert end.status == (-signal.SIGKILL if role == "killed" else 0), end.words
        if role != "killed":
            reports[role] = json.loads((directory / f"{role}.json").read_text())
    return reports
