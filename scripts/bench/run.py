#!/usr/bin/env python3
"""Run benchmarks and write RESULTS.md: `run.py save load --params 1b --rounds 7`; no names: all questions."""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":  # `bench` is a package of scripts/
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.machine import MEMORY_FILE_SYSTEMS, describe, mount_of
from bench.models import SIZES
from bench.question import Context
from bench.results import raw_path, read_results, readme_table, render, unmet, write_results
from bench.runner import QUESTIONS, question_of, run_question, say

HERE = Path(__file__).resolve().parent
DEFAULT_QUESTIONS = tuple(name for name in QUESTIONS if name != "gpu")


def main(arguments: list[str]) -> int:
    """Run the questions that are asked, and write their sections anew; 0 also where a target is not met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help=f"any of {', '.join(QUESTIONS)}")
    parser.add_argument("--params", choices=SIZES, default="1b", help="size of the model (default: 1b)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of all peers (default: 7)")
    parser.add_argument("--main-peers", action="store_true", help="without the peers that run in every third round")
    parser.add_argument(
        "--out", type=Path, default=HERE / "RESULTS.md", help="what to write (default: RESULTS.md here)"
    )
    parser.add_argument("--directory", type=Path, help="where the data lie, on a disk; what is made there is removed")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: the question gpu, too")
    parser.add_argument("--readme", action="store_true", help="only print the README's table of the last results")
    parser.add_argument("--render", action="store_true", help="only print RESULTS.md of the last results.json")
    options = parser.parse_args(arguments)
    results = read_results(raw_path(options.out))
    if options.readme or options.render:
        print(readme_table(results) if options.readme else render(results), end="\n" if options.readme else "")
        return 0
    asked = options.questions or [*DEFAULT_QUESTIONS, *(["gpu"] if options.device == "cuda" else [])]
    if unknown := set(asked) - set(QUESTIONS):
        parser.error(f"no such question: {', '.join(sorted(unknown))}")
    directory = Path(tempfile.mkdtemp(prefix="hfshard-bench-", dir=options.directory or disk_directory()))
    try:
        context = Context(directory, options.params, options.device)
        for name in asked:
            data = run_question(question_of(name), context, options.rounds, with_side=not options.main_peers)
            if name in results and not any(peer["runs"] for peer in data["peers"].values()):
                say(f"{name}: nothing ran, so the section stays as it was")
                continue
            command = f"python scripts/bench/run.py {name} --params {options.params} --rounds {options.rounds}"
            data["command"] = (
                command
                + (f" --device {options.device}" if options.device != "cpu" else "")
                + (" --main-peers" if options.main_peers else "")
            )
            data["date"] = datetime.date.today().isoformat()
            data["machine"] = describe(directory, options.device)
            results[name] = data
            write_results(results, options.out)  # after each question: what was measured stays
    finally:
        shutil.rmtree(directory)
    for target in unmet({name: results[name] for name in asked if name in results}):
        say(f"not met: {target.text}: {target.measured}")
    return 0


def disk_directory() -> Path:
    """A directory on a disk: a temporary one where that is no memory, else the working directory."""
    for place in (Path(tempfile.gettempdir()), Path("/var/tmp"), Path.cwd()):
        if os.access(place, os.W_OK) and mount_of(place)[0] not in MEMORY_FILE_SYSTEMS:
            return place
    say("warning: the working directory is in memory or on an overlay: name a --directory on a disk")
    return Path.cwd()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
