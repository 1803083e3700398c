"""The command line of scripts/upstream_tests."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

from upstream.comparison import Comparison, Outcome, compare, of_suite
from upstream.hub_models import serving
from upstream.report import INTENDED, RESULTS, describe, read_results, readme_block, record_of, write_results
from upstream.runs import run_suite
from upstream.sources import SourceError, check_installed, fetch, unpack
from upstream.suites import SUITES, Suite


def main(arguments: list[str]) -> int:
    """Run the suites that are asked for; 1 where a test differs that is not meant to, or one that is does not."""
    options = _parser().parse_args(arguments)
    intended: dict[str, str] = json.loads(INTENDED.read_text())
    if options.readme:
        print(readme_block(read_results(options.results), intended))
        return 0
    suites = [SUITES[name] for name in options.suites or SUITES]
    try:
        check_installed(suites)
        comparisons = {suite.name: _judge(suite, intended, options) for suite in suites}
    except SourceError as error:
        print(error, file=sys.stderr)
        return 2
    if not options.select:
        results = read_results(options.results)
        for suite in suites:
            results[suite.name] = record_of(suite, comparisons[suite.name])
        write_results(results, options.results)
    return 0 if all(comparison.is_as_expected for comparison in comparisons.values()) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="upstream_tests",
        description="Run tests of other packages stock and under hfshard.install(), and compare them test by test.",
    )
    parser.add_argument("suites", nargs="*", choices=[*SUITES, []], metavar="SUITE", help=f"of {', '.join(SUITES)}")
    parser.add_argument("--select", default="", help="only tests whose id matches this; results are not kept then")
    parser.add_argument(
        "--cache",
        type=Path,
        default=os.environ.get("HFSHARD_UPSTREAM_CACHE"),
        help="folder that keeps the source archives (default: HFSHARD_UPSTREAM_CACHE, or none is kept)",
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of results (default: the committed one)")
    parser.add_argument("--details", type=Path, help="folder for a file of each suite with the outcome of every test")
    parser.add_argument("--readme", action="store_true", help="only print the README's table of the last results")
    return parser


def _judge(suite: Suite, intended: Mapping[str, str], options: argparse.Namespace) -> Comparison:
    """Run one suite twice, and print what differs."""
    with tempfile.TemporaryDirectory(prefix="hfshard-upstream-") as scratch:
        root = Path(scratch)
        if suite.package is not None:
            root = unpack(suite.package, fetch(suite.package, options.cache or root / "archives"), root)
        stock, ours = _run_twice(suite, root, options.select, Path(scratch))
    ran = None if not options.select else {*stock, *ours}
    comparison = compare(stock, ours, of_suite(suite.name, intended, ran))
    print(describe(suite, comparison), flush=True)
    if options.details is not None:
        _keep(options.details / f"{suite.name}.json", stock, ours)
    return comparison


def _run_twice(suite: Suite, root: Path, select: str, scratch: Path) -> tuple[dict[str, Outcome], dict[str, Outcome]]:
    """Run a suite stock and under hfshard, each beside a Hub of its own where it asks for one."""
    runs = []
    for is_under in (False, True):
        with serving(scratch / f"hub-{is_under}") if suite.has_hub else nullcontext(None) as hub:
            runs.append(run_suite(suite, root, is_under_hfshard=is_under, select=select, hub=hub))
    return runs[0], runs[1]


def _keep(path: Path, stock: Mapping[str, Outcome], ours: Mapping[str, Outcome]) -> None:
    """Write down what became of every test."""
    path.parent.mkdir(parents=True, exist_ok=True)
    runs = {"stock": stock, "hfshard": ours}
    found = {name: {test: asdict(outcome) for test, outcome in run.items()} for name, run in runs.items()}
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
