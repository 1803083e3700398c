#!/usr/bin/env python3
"""Measure and write RESULTS.md: `run.py save load --params 1b --rounds 7`; without names, all questions but gpu."""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # `bench` is a package of scripts/
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.harness.arguments import directory_for_data, file_to_write
from bench.harness.models import SIZES
from bench.harness.question import QUESTIONS, Context, question_of
from bench.harness.results import raw_path, read_results, readme_table, render, unmet, write_results
from bench.harness.runner import run_question, say
from bench.machine.description import MEMORY_FILE_SYSTEMS, describe, mount_of

HERE = Path(__file__).resolve().parent
RESUME = "resume"
"""A question with rounds and a page of its own: resume.py."""
DEFAULT_QUESTIONS = tuple(name for name in QUESTIONS if name != "gpu")


def main(arguments: list[str]) -> int:
    """Run the questions that are asked, and rewrite their sections; 0 also where a target is not met."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    results = read_results(raw_path(options.out))
    if options.readme or options.render:
        print(readme_table(results) if options.readme else render(results), end="\n" if options.readme else "")
        return 0
    asked = options.questions or [*DEFAULT_QUESTIONS, *(["gpu"] if options.device == "cuda" else [])]
    if unknown := set(asked) - {*QUESTIONS, RESUME}:
        parser.error(f"no such question: {', '.join(sorted(unknown))}")
    directory = Path(tempfile.mkdtemp(prefix="hfshard-bench-", dir=options.directory or disk_directory()))
    try:
        context = Context(directory, options.params, options.device)
        for name in asked:
            if name == RESUME:
                from bench import resume  # brings torch

                resume.measure(directory, options.out.with_name(resume.PAGE.name))
            else:
                measure_question(name, context, options, results)
    finally:
        shutil.rmtree(directory)
    for target in unmet({name: results[name] for name in asked if name in results}):
        say(f"not met: {target.text}: {target.measured}")
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help=f"any of {', '.join([*QUESTIONS, RESUME])}")
    parser.add_argument("--params", choices=SIZES, default="1b", help="size of the model (default: 1b)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of all peers (default: 7)")
    parser.add_argument("--main-peers", action="store_true", help="without the peers that run in every third round")
    parser.add_argument(
        "--out", type=file_to_write, default=HERE / "RESULTS.md", help="what to write (default: RESULTS.md here)"
    )
    parser.add_argument(
        "--directory", type=directory_for_data, help="where the data lie, on a disk; what is made there is removed"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: the question gpu, too")
    parser.add_argument("--readme", action="store_true", help="only print the README's table of the last results")
    parser.add_argument("--render", action="store_true", help="only print RESULTS.md of the last results.json")
    return parser


def measure_question(name: str, context: Context, options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Run one question, and write its section: what was measured stays if a later question fails."""
    data = run_question(question_of(name), context, options.rounds, with_side=not options.main_peers)
    if name in results and not any(peer["runs"] for peer in data["peers"].values()):
        say(f"{name}: nothing ran, so the section stays as it was")
        return
    command = f"python scripts/bench/run.py {name} --params {options.params} --rounds {options.rounds}"
    device = f" --device {options.device}" if options.device != "cpu" else ""
    data["command"] = command + device + (" --main-peers" if options.main_peers else "")
    data["date"] = datetime.date.today().isoformat()
    data["machine"] = describe(context.directory, options.device)
    results[name] = data
    write_results(results, options.out)


def disk_directory() -> Path:
    """A directory on a disk: a temporary one unless that is in memory, else the working directory."""
    for place in (Path(tempfile.gettempdir()), Path("/var/tmp"), Path.cwd()):
        if os.access(place, os.W_OK) and mount_of(place)[0] not in MEMORY_FILE_SYSTEMS:
            return place
    say("warning: the working directory is in memory or on an overlay: name a --directory on a disk")
    return Path.cwd()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
