"""The command line of `scripts/store_sweep`."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence

from tests.crash.saves.judge import FAILURES
from tests.stores.services.kinds import SERVICES
from tests.stores.sweep.sweep import FINE, KINDS, USUAL, Sweep
from tests.stores.sweep.table import transitions


def main(arguments: Sequence[str] | None = None) -> int:
    """Sweep, and print a table; 1 if something was found."""
    asked = _parser().parse_args(arguments)
    lacking = {scheme: lacks for scheme in asked.service if (lacks := SERVICES[scheme].lacks())}
    for scheme, lacks in lacking.items():
        print(f"{scheme}: {lacks}", file=sys.stderr)
    begin = time.monotonic()
    draw = random.Random(asked.seed)
    names = [name for name in transitions() if any(part in name for part in asked.transition)]
    cases = [(scheme, name) for scheme in asked.service if scheme not in lacking for name in names]
    share, shares = map(int, asked.share.split("/"))
    cases = cases[share - 1 :: shares]
    if asked.sample:
        draw.shuffle(cases)
    print(f"| service | transition | requests | {' | '.join((*FINE, *FAILURES))} |")
    print(f"|---|---|---{'|---' * len((*FINE, *FAILURES))}|")
    total: Counter[str] = Counter()
    for scheme, name in cases:
        if time.monotonic() - begin > asked.seconds:
            print(f"out of time: {scheme} {name} and what follows was not swept", file=sys.stderr)
            break
        counts = _sweep(scheme, name, asked, draw)
        total += counts
    print(f"| all | | | {' | '.join(str(total[category]) for category in (*FINE, *FAILURES))} |")
    return int(any(total[category] for category in FAILURES))


def _sweep(scheme: str, name: str, asked: argparse.Namespace, draw: random.Random) -> Counter[str]:
    """Sweep one transition; prints its row, and each finding to stderr."""
    sweep = Sweep(scheme, name)
    counts: Counter[str] = Counter()
    for problem in sweep.problems:
        counts["wrong"] += 1
        print(f"{scheme} {name}: {problem}", file=sys.stderr, flush=True)
    points = sweep.points(asked.kind)
    if asked.sample:
        points = draw.sample(points, min(asked.sample, len(points)))
    for kind, at in points:
        result = sweep.break_at(kind, at)
        counts[result.judgement.category] += 1
        if result.is_failure:
            print(result, file=sys.stderr, flush=True)
    row = " | ".join(str(counts[category]) for category in (*FINE, *FAILURES))
    print(f"| {scheme} | {name} | {len(sweep.requests)} | {row} |", flush=True)
    return counts


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/store_sweep", description=__doc__)
    parser.add_argument("--service", nargs="+", default=list(SERVICES), choices=list(SERVICES))
    parser.add_argument("--transition", nargs="+", default=[""], metavar="PART", help="those with this in their names")
    parser.add_argument("--kind", nargs="+", default=list(USUAL), choices=list(KINDS))
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="so many points of each transition")
    parser.add_argument("--share", default="1/1", metavar="K/N", help="every N-th transition, from the K-th")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no transition after so long")
    return parser
