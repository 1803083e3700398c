"""What is printed and kept of the comparisons: a table, a file of results, the README's sentences."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from upstream.comparison import Comparison
from upstream.sources import pins
from upstream.suites import SUITES, Suite

RESULTS: Final = Path(__file__).with_name("results.json")
INTENDED: Final = Path(__file__).with_name("intended.json")
README_BEGIN: Final = "<!-- counted: scripts/upstream_tests --readme -->"
README_END: Final = "<!-- /counted -->"

Results = dict[str, dict[str, Any]]


def record_of(suite: Suite, comparison: Comparison) -> dict[str, Any]:
    """What the file of results keeps of one suite."""
    return {
        "package": None if suite.package is None else f"{suite.package}=={pins()[suite.package][0]}",
        "passed_stock": comparison.stock_passed,
        "passed_under_hfshard": comparison.ours_passed,
        "passed_by_neither": comparison.not_counted,
        "intended": sorted(comparison.intended),
        "broken": sorted(comparison.broken),
        "gained": list(comparison.gained),
    }


def read_results(path: Path = RESULTS) -> Results:
    """Read the file of results; empty where there is none."""
    found: Results = json.loads(path.read_text()) if path.exists() else {}
    return found


def write_results(results: Results, path: Path = RESULTS) -> None:
    """Write the file of results, in the order of the suites."""
    ordered = {name: results[name] for name in SUITES if name in results}
    path.write_text(json.dumps(ordered, indent=1) + "\n")


def describe(suite: Suite, comparison: Comparison) -> str:
    """A suite's lines for people."""
    lines = [
        f"{suite.name}: {comparison.stock_passed} pass stock, {comparison.ours_passed} under hfshard.install(); "
        f"{len(comparison.intended)} are meant to differ; {comparison.not_counted} pass in neither"
    ]
    lines += [f"  DIFFERS  {test}: {found.outcome} {found.message}" for test, found in comparison.broken.items()]
    lines += [f"  intended {test}: {reason}" for test, reason in comparison.intended.items()]
    lines += [f"  STALE    {test}: intended.json says that it differs, and it does not" for test in comparison.stale]
    lines += [f"  gained   {test}" for test in comparison.gained]
    return "\n".join(lines)


def readme_block(results: Results, intended: Mapping[str, str]) -> str:
    """The README's block: the counts, between comments."""
    lines = ["| tests | pass stock | pass under `hfshard.install()` | meant to differ |", "|---|---|---|---|"]
    for name, record in results.items():
        source = "" if record["package"] is None else f" ({record['package'].replace('==', ' ')})"
        counts = (record["passed_stock"], record["passed_under_hfshard"], len(record["intended"]))
        lines.append(f"| {SUITES[name].title}{source} | {' | '.join(f'{count:,}' for count in counts)} |")
    total = [sum(int(record[key]) for record in results.values()) for key in ("passed_stock", "passed_under_hfshard")]
    lines.append(f"| all | {total[0]:,} | {total[1]:,} | {len(intended)} |")
    return "\n".join([README_BEGIN, *lines, README_END])
