"""RESUME.md and the table of the README of hfshard/training, from the raw outcomes alone."""

from __future__ import annotations

from typing import Any

from bench.markdown import markdown_table, paragraphs, readme_block
from bench.resumes.cases import CASES, WAYS
from bench.resumes.task import STEPS

README_COMMAND = "python scripts/bench/resume.py --readme"
README_WAYS = WAYS[:4]

HEAD = f"""Written by `python scripts/bench/resume.py`, {{date}}. A training of {STEPS} steps (6 an epoch)
is run straight; run again, saving, until a SIGKILL; and resumed from its newest checkpoint in a new
process. *Exact* is: weights after every step, optimizer state with dtypes, learning rate and RNGs at the
end are the straight run's, bit for bit. Each way is written as its own documentation writes it:
[peers.py](resumes/peers.py). *Error* names the checkpoint or its file, *crash* does not; after
both it is for the user to find out which one is whole. The full disk is a limit of file size (EFBIG)."""


def render(results: dict[str, Any]) -> str:
    """All of RESUME.md."""
    machine = [[name, value] for name, value in results["machine"].items() if value != "not installed"]
    text = paragraphs(
        "# Resumes, measured",
        HEAD.format(date=results["date"]),
        cases_table(results, WAYS),
        "## What was raised, and sizes",
        "\n".join(_details(results)),
        "## Machine",
        markdown_table(["", ""], machine),
    )
    return text + "\n"


def _details(results: dict[str, Any]) -> list[str]:
    """A line for each outcome that has more to say than where it resumed."""
    lines = []
    for name, case in CASES.items():
        cells = results["cells"].get(name, {})
        for way in WAYS:
            cell, detail = cells.get(way, ("", ""))
            if detail and not detail.startswith("resumed after"):
                lines.append(f"- {case.title}, {way}: {cell}; {detail}")
    return lines


def cases_table(results: dict[str, Any], ways: tuple[str, ...]) -> str:
    """Cases by ways."""
    shown = [way for way in ways if any(way in cells for cells in results["cells"].values())]
    rows = [
        [case.title, *(cells.get(way, ["–"])[0] for way in shown)]
        for name, case in CASES.items()
        if (cells := results["cells"].get(name))
    ]
    return markdown_table(["killed and resumed", *shown], rows)


def readme_table(results: dict[str, Any]) -> str:
    """The README's table, between its comments; "" where nothing was measured."""
    if not results["cells"]:
        return ""
    machine = results["machine"]
    head = (
        "Trainings that a SIGKILL ended, resumed in a new process, against the same training run straight (torch"
        f" {machine['torch']}, transformers {machine['transformers']}, accelerate {machine['accelerate']}; how, and"
        " hfshard inside Trainer and Accelerate: [RESUME.md](../../scripts/bench/RESUME.md)):"
    )
    return readme_block(README_COMMAND, head, cases_table(results, README_WAYS))
