"""Trainings in processes of their own, one role after another, and what they report."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.training import processes


def run_roles(
    run_role: Callable[[str, str, Path], None], name: str, roles: tuple[tuple[str, ...], ...], directory: Path
) -> dict[str, Any]:
    """Run some roles of a case, one after the other.

    Args:
        run_role: What a process calls with the case, the role and the directory.
        name: The case.
        roles: Those of each process: what imports and first steps take, the others that share it need not. "killed" is
            to end by SIGKILL and reports nothing; every other one writes `<role>.json`.
        directory: Where they save and report.

    Returns:
        Role -> report.
    """
    reports = {}
    for together in roles:
        words, modules = directory / f"{together[-1]}.txt", (run_role.__module__, __name__)
        end = processes.run(words, _run, run_role, name, together, directory, modules=modules)
        assert end.status == (-signal.SIGKILL if together[-1] == "killed" else 0), end.words
        for role in together:
            if role != "killed":
                reports[role] = json.loads((directory / f"{role}.json").read_text())
    return reports


def _run(run_role: Callable[[str, str, Path], None], name: str, roles: tuple[str, ...], directory: Path) -> None:
    for role in roles:
        run_role(name, role, directory)
