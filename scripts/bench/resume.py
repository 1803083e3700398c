#!/usr/bin/env python3
"""Compare how trainings resume after a SIGKILL: torch.save, Trainer, Accelerate, hfshard; writes RESUME.md."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parent.parent
if __name__ == "__main__":  # `bench` is a package of scripts/, hfshard is beside it
    sys.path[0] = str(SCRIPTS)
    sys.path.insert(1, str(SCRIPTS.parent))

from bench.harness.arguments import directory_for_data, file_to_write
from bench.harness.figures import markdown_table, paragraphs
from bench.machine.description import describe
from bench.resumes.cases import CASES, WAYS
from bench.resumes.runner import Runner

PAGE = Path(__file__).resolve().with_name("RESUME.md")
QUIET = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

HEAD = """Written by `python scripts/bench/resume.py`, {date}. A training of 27 steps (6 an epoch)
is run straight; run again, saving, until a SIGKILL; and resumed from its newest checkpoint in a new
process. *Exact* is: weights after every step, optimizer state with dtypes, learning rate and RNGs at the
end are the straight run's, bit for bit. Each way is written as its own documentation writes it:
[peers.py](resumes/peers.py). *Error* names the checkpoint or its file, *crash* does not; after
both it is for the user to find out which one is whole. The full disk is a limit of file size (EFBIG)."""


def main(arguments: list[str]) -> int:
    """Run the cases that are asked for, and rewrite RESUME.md and resume.json."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.render:
        print(render(read_outcomes(options.out)), end="")
        return 0
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    measure(options.directory, options.out, options.ways, options.cases)
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"any of {', '.join(CASES)} (default: all)")
    parser.add_argument("--ways", nargs="*", default=WAYS, choices=WAYS, metavar="WAY", help=f"any of {WAYS}")
    parser.add_argument("--out", type=file_to_write, default=PAGE, help="what to write (default: RESUME.md here)")
    parser.add_argument(
        "--directory", type=directory_for_data, help="where the runs lie; what is made there is removed"
    )
    parser.add_argument("--render", action="store_true", help="only print RESUME.md of the last resume.json")
    return parser


def raw_path(page: Path) -> Path:
    """The raw outcomes of a RESUME.md."""
    return page.with_name(f"{page.stem.lower()}.json")


def read_outcomes(page: Path) -> dict[str, Any]:
    """The raw outcomes; none where nothing was measured."""
    raw = raw_path(page)
    found: dict[str, Any] = json.loads(raw.read_text(encoding="utf-8")) if raw.exists() else {"cells": {}}
    return found


def measure(directory: Path | None, page: Path, ways: tuple[str, ...] = WAYS, cases: tuple[str, ...] = ()) -> None:
    """Run the cases of each way; the outcome of one is in the raw results before the next begins."""
    os.environ |= QUIET  # for the trainings' processes, which find `bench` and hfshard by this path:
    os.environ["PYTHONPATH"] = os.pathsep.join([str(SCRIPTS), str(SCRIPTS.parent), os.environ.get("PYTHONPATH", "")])
    results = read_outcomes(page)
    with tempfile.TemporaryDirectory(prefix="hfshard-resume-", dir=directory) as place:
        results["machine"] = describe(Path(place)) | {"accelerate": version("accelerate")}
        results["date"] = datetime.date.today().isoformat()
        for way in ways:
            runner = Runner(way, Path(place) / way.replace(" ", "-"))
            for name in cases or CASES:
                outcome = runner.outcome(CASES[name])
                print(f"{way}: {CASES[name].title}: {outcome.cell}  [{outcome.detail}]", file=sys.stderr, flush=True)
                results["cells"].setdefault(name, {})[way] = [outcome.cell, outcome.detail]
                raw = json.dumps(results, indent=1, ensure_ascii=False) + "\n"
                raw_path(page).write_text(raw, encoding="utf-8")
    page.write_text(render(results), encoding="utf-8")


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
    """Each case with its outcomes that have more to say than where they resumed."""
    lines = []
    for name, case in CASES.items():
        cells = results["cells"].get(name, {})
        details = [f"  - {way}: {cells[way][1]}" for way in WAYS if _says_more(cells.get(way, ("", ""))[1])]
        lines += [f"- {case.title}", *details] if details else []
    return lines


def _says_more(detail: str) -> bool:
    return bool(detail) and not detail.startswith("resumed after")


def cases_table(results: dict[str, Any], ways: tuple[str, ...]) -> str:
    """Cases by ways."""
    shown = [way for way in ways if any(way in cells for cells in results["cells"].values())]
    rows = [
        [case.title, *(cells.get(way, ["–"])[0] for way in shown)]
        for name, case in CASES.items()
        if (cells := results["cells"].get(name))
    ]
    return markdown_table(["killed and resumed", *shown], rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
