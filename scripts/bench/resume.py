#!/usr/bin/env python3
"""Compare how trainings resume after a SIGKILL: torch.save, Trainer, Accelerate, hfshard; writes RESUME.md."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # `bench` is a package of scripts/, hfshard is beside it
    SCRIPTS = Path(__file__).resolve().parent.parent
    sys.path[0] = str(SCRIPTS)
    sys.path.insert(1, str(SCRIPTS.parent))
    os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")])
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

from bench.arguments import directory_for_data, file_to_write
from bench.machine.description import describe
from bench.resumes.cases import CASES, WAYS
from bench.resumes.report import readme_table, render
from bench.resumes.runner import Runner

HERE = Path(__file__).resolve().parent


def main(arguments: list[str]) -> int:
    """Run the cases that are asked for, and rewrite RESUME.md and resume.json."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    raw = options.out.with_suffix(".json").with_stem(options.out.stem.lower())
    results: dict[str, Any] = json.loads(raw.read_text(encoding="utf-8")) if raw.exists() else {"cells": {}}
    if options.readme or options.render:
        print(readme_table(results) if options.readme else render(results), end="\n" if options.readme else "")
        return 0
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    directory = Path(tempfile.mkdtemp(prefix="hfshard-resume-", dir=options.directory))
    try:
        results["machine"] = describe(directory) | {"accelerate": version("accelerate")}
        results["date"] = datetime.date.today().isoformat()
        run_ways(options.ways, options.cases or list(CASES), directory, results, raw)
        options.out.write_text(render(results), encoding="utf-8")
    finally:
        shutil.rmtree(directory)
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"any of {', '.join(CASES)} (default: all)")
    parser.add_argument("--ways", nargs="*", default=WAYS, choices=WAYS, metavar="WAY", help=f"any of {WAYS}")
    parser.add_argument(
        "--out", type=file_to_write, default=HERE / "RESUME.md", help="what to write (default: RESUME.md here)"
    )
    parser.add_argument(
        "--directory", type=directory_for_data, help="where the runs lie; what is made there is removed"
    )
    parser.add_argument("--readme", action="store_true", help="only print the table for hfshard/training/GUIDE.md")
    parser.add_argument("--render", action="store_true", help="only print RESUME.md of the last resume.json")
    return parser


def run_ways(ways: list[str], cases: list[str], directory: Path, results: dict[str, Any], raw: Path) -> None:
    """Run the cases of each way; what came of one is in the raw results before the next begins."""
    for way in ways:
        runner = Runner(way, directory / way.replace(" ", "-"))
        for name in cases:
            outcome = runner.outcome(CASES[name])
            print(f"{way}: {CASES[name].title}: {outcome.cell}  [{outcome.detail}]", file=sys.stderr, flush=True)
            results["cells"].setdefault(name, {})[way] = [outcome.cell, outcome.detail]
            raw.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
