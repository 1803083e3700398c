"""The command line of `scripts/stress_stores`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tests.stores.services.kinds import SERVICES
from tests.stores.stress.faults import Odds
from tests.stores.stress.stress import Stress

_SHOWN = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Stress each service, and print what came of it; 1 if something was wrong."""
    asked = _parser().parse_args(arguments)
    is_wrong = False
    for scheme in asked.service:
        if lacks := SERVICES[scheme].lacks():
            print(f"{scheme}: {lacks}", file=sys.stderr)
            continue
        odds = Odds(asked.lost, asked.refused, asked.late, asked.late_seconds)
        findings = Stress(scheme, asked.writers, 60 * asked.minutes, odds, asked.seed).run()
        print(f"{scheme}, {asked.writers} writers, {asked.minutes:g} minutes: {findings}", flush=True)
        print(f"{scheme}: {len(findings.problems)} problems", flush=True)
        for problem in findings.problems[:_SHOWN]:
            print(f"{scheme}: {problem}", file=sys.stderr, flush=True)
        is_wrong = is_wrong or bool(findings.problems)
    return int(is_wrong)


def _parser() -> argparse.ArgumentParser:
    odds = Odds()
    parser = argparse.ArgumentParser(prog="scripts/stress_stores", description=__doc__)
    parser.add_argument("--service", nargs="+", default=["s3", "hf"], choices=list(SERVICES))
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--writers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lost", type=float, default=odds.lost, help="of 1: carried out, and not answered")
    parser.add_argument("--refused", type=float, default=odds.refused, help="of 1: answered by 503")
    parser.add_argument("--late", type=float, default=odds.late, help="of 1: carried out late")
    parser.add_argument("--late-seconds", type=float, default=odds.late_seconds, help="at most")
    return parser
