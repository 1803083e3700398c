#!/usr/bin/env python3
"""Compare this hfshard with that of another checkout, in turns: `against.py ../before save load --rounds 7`.

Each of hfshard's peers of a question runs twice a round, each time in a fresh process. It is slower, or needs more
memory, where its median is worse by more than 3 % and by more than the runs of the other checkout differ.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":  # `bench` is a package of scripts/
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.harness.arguments import directory_for_data
from bench.harness.figures import MIB, Data, markdown_table, seconds, spread
from bench.harness.models import SIZES
from bench.harness.question import QUESTIONS, Context, Question, question_of
from bench.harness.runner import prepared, run_peers, say
from bench.run import disk_directory

NOISE = 1.03
MIB_NOISE = 2.0
"""Peaks of memory are sampled, and allocators differ from run to run."""
TITLES = ("", "before, s", "now, s", "now / before", "before, MiB", "now, MiB", "")


def main(arguments: list[str]) -> int:
    """Print a table; 1 where something is worse."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("questions", nargs="+", metavar="QUESTION", choices=QUESTIONS, help=", ".join(QUESTIONS))
    parser.add_argument("--params", choices=SIZES, default="1b", help="size of the model (default: 1b)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds (default: 7)")
    parser.add_argument("--directory", type=directory_for_data, help="where the data lie, on a disk")
    options = parser.parse_args(arguments)
    before = options.before.resolve()
    if not (before / "hfshard" / "__init__.py").is_file():
        parser.error(f"{before} holds no hfshard/: name the folder of another checkout")
    rows: list[list[str]] = []
    for name in options.questions:
        with tempfile.TemporaryDirectory(prefix="hfshard-bench-", dir=options.directory or disk_directory()) as place:
            context = Context(Path(place), options.params)
            rows += [
                [f"{name}: {row[0]}", *row[1:]] for row in compare(question_of(name), context, before, options.rounds)
            ]
    print(markdown_table(TITLES, rows))
    return int(any(row[-1] for row in rows))


def compare(question: Question, context: Context, before: Path, rounds: int) -> list[list[str]]:
    """Run hfshard's peers of one question from both checkouts; return the rows of its table."""
    checkouts = (before, context.checkout)
    found: dict[tuple[str, Path], list[Data]] = defaultdict(list)
    with prepared(question, context) as (context, _, _, reserve):
        peers = [peer for peer in question.peers(context) if peer.written_by_hfshard and peer.every == 1]
        for number in range(rounds):
            for peer in peers:
                for checkout in checkouts if number % 2 else reversed(checkouts):
                    [(_, run)] = run_peers(question, [peer], replace(context, checkout=checkout), reserve)
                    found[peer.name, checkout].append(run)
                say(f"  {number + 1}/{rounds} {peer.name}")
    return [_row(peer.title, peer.state, *(found[peer.name, checkout] for checkout in checkouts)) for peer in peers]


def _row(title: str, state: str, before: list[Data], now: list[Data]) -> list[str]:
    """Compare the seconds and peaks of one peer."""
    if any("skipped" in run for run in (*before, *now)):
        return [f"{title} {state}".rstrip(), "skipped", "", "", "", "", ""]
    cells, worse = [f"{title} {state}".rstrip()], []

    def add(what: str, value: Callable[[Data], float], digits: int, noise: float) -> float:
        old, new = spread(map(value, before)), spread(map(value, now))
        assert old is not None and new is not None
        cells.extend([old.show(digits), new.show(digits)])
        if new.median > max(old.median * NOISE, old.median + max(old.highest - old.lowest, noise)):
            worse.append(what)
        return new.median / old.median if old.median else 1.0

    share = add("slower", seconds, 3, 0.0)
    cells.append(f"{share:.3f}")
    add("more memory", lambda run: run["peak"] / MIB, 1, MIB_NOISE)
    return [*cells, ", ".join(worse)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
