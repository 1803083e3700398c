"""What counts as a difference between the run of a test on stock packages and its run under hfshard."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

PASSED = "passed"
FAILED = "failed"
SKIPPED = "skipped"
DIED = "died"
"""The process ended in the middle of the test."""
MISSING = "missing"
"""The other run has the test, and this one does not."""

# A test has several reports (setup, call, teardown, parts of it); the first of these that one of them has is its own.
# A test of which a part was skipped does not count as passed.
_ORDER = (FAILED, SKIPPED, PASSED)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one test."""

    outcome: str
    message: str = ""
    """The first line of the error."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One suite's two runs, test by test."""

    stock_passed: int
    ours_passed: int
    broken: Mapping[str, Outcome]
    """Passed stock and not under hfshard, and not intended: what each became."""
    intended: Mapping[str, str]
    """Passed stock and not under hfshard, each with the reason why that is meant."""
    gained: tuple[str, ...]
    """Passed under hfshard alone."""
    stale: tuple[str, ...]
    """Said to differ, and does not."""
    not_counted: int
    """Passed by neither: skipped here, or failed in both."""

    @property
    def is_as_expected(self) -> bool:
        """Whether every difference is intended, and everything that is intended differs."""
        return not self.broken and not self.stale


def read_outcomes(path: Path) -> dict[str, Outcome]:
    """Read what the plugin wrote: test -> its worst report.

    A test that was started last and has no report was running when the process died.
    """
    found: dict[str, list[Outcome]] = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        reports = found.setdefault(record["id"], [])
        if record["outcome"] != "started":
            reports.append(Outcome(record["outcome"], record["message"]))
    return {test: _worst(reports) for test, reports in found.items()}


def _worst(reports: list[Outcome]) -> Outcome:
    if not reports:
        return Outcome(DIED)
    return min(reports, key=lambda report: _ORDER.index(report.outcome))


def compare(stock: Mapping[str, Outcome], ours: Mapping[str, Outcome], intended: Mapping[str, str]) -> Comparison:
    """Compare two runs of the same tests.

    Args:
        stock: Test -> outcome on stock packages.
        ours: The same under hfshard.
        intended: Test -> why it is meant to differ; only of these runs.
    """
    differs = {test: ours.get(test, Outcome(MISSING)) for test in _passed(stock) - _passed(ours)}
    return Comparison(
        stock_passed=len(_passed(stock)),
        ours_passed=len(_passed(ours)),
        broken={test: differs[test] for test in sorted(differs) if test not in intended},
        intended={test: intended[test] for test in sorted(differs) if test in intended},
        gained=tuple(sorted(_passed(ours) - _passed(stock))),
        stale=tuple(sorted(set(intended) - set(differs))),
        not_counted=len((set(stock) | set(ours)) - _passed(stock) - _passed(ours)),
    )


def _passed(outcomes: Mapping[str, Outcome]) -> set[str]:
    return {test for test, outcome in outcomes.items() if outcome.outcome == PASSED}


def of_suite(suite: str, intended: Mapping[str, str], tests: Iterable[str] | None = None) -> dict[str, str]:
    """The intended differences of one suite, by the test's id alone; in the file they are "suite/test".

    Args:
        suite: Its name.
        intended: All of them.
        tests: Only these, where a part of the suite was run; None: all.
    """
    prefix = f"{suite}/"
    named = {name.removeprefix(prefix): reason for name, reason in intended.items() if name.startswith(prefix)}
    chosen = set(named) if tests is None else set(tests)
    return {name: reason for name, reason in named.items() if name in chosen}
