"""What a sweep prints: a row per transition, totals by kind, and every failure in full."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.crash.points import Outcome, Recorded
from tests.crash.suite import Suite

NAME_WIDTH = 33
WIDTH = 11

AnySuite = Suite[Any, Any]
AnyRecorded = Recorded[Any, Any]


def failed_of(suite: AnySuite, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Those that fail the sweep."""
    return [outcome for outcome in outcomes if outcome.category in suite.failures]


def table(suite: AnySuite, recorded: Sequence[AnyRecorded], outcomes: Sequence[Outcome]) -> str:
    """Counts by transition and by kind, and the totals."""
    categories = (*suite.fine, *suite.failures)
    words = " ".join(f"{word:>{WIDTH}}" for word in ("calls", "points", *categories))
    lines = [f"{'':{NAME_WIDTH}}{words}"]
    for one in recorded:
        mine = [outcome for outcome in outcomes if outcome.point.recorded.transition.name == one.transition.name]
        lines.append(_row(one.transition.name, len(one.calls), mine, categories))
    lines.append("")
    for kind in dict.fromkeys(outcome.point.kind for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.point.kind == kind]
        lines.append(_row(f"all {kind}", None, mine, categories))
    lines.append(_row("all", sum(len(one.calls) for one in recorded), outcomes, categories))
    return "\n".join(lines)


def _row(name: str, calls: int | None, outcomes: Sequence[Outcome], categories: Sequence[str]) -> str:
    counts = Counter(outcome.category for outcome in outcomes)
    numbers = ["" if calls is None else calls, len(outcomes), *(counts[category] for category in categories)]
    return f"{name:{NAME_WIDTH}}" + " ".join(f"{number:>{WIDTH}}" for number in numbers)


def details(outcome: Outcome) -> Iterator[str]:
    """One failing point: where, what every reader said, what was left."""
    point = outcome.point
    name = point.recorded.transition.name
    yield f"{outcome.category.upper()} {name} #{point.ordinal} {point.kind} at {point.call.name}, call {point.call.k}"
    yield f"    {point.call.name}({point.call.text[:200]}"
    yield f"    stopped, it {outcome.status}; {outcome.report[:400]}"
    for problem in outcome.problems:
        yield f"    {problem}"
    if outcome.listing:
        yield f"    left: {' '.join(outcome.listing)}"
    if outcome.readers:
        yield f"    readers: {outcome.readers}"


def notes_of(outcomes: Sequence[Outcome]) -> Counter[str]:
    """Remarks that are not failures, with their counts."""
    pairs = ((outcome.point.recorded.transition.name, note) for outcome in outcomes for note in outcome.notes)
    return Counter(f"{name}: {note}" for name, note in pairs)


def write_json(path: Path, recorded: Sequence[AnyRecorded], outcomes: Sequence[Outcome]) -> None:
    """Everything, for other programs."""
    whole = {one.transition.name: list(one.problems) for one in recorded}
    path.write_text(json.dumps({"transitions": whole, "points": [_json_of(one) for one in outcomes]}, indent=1))


def _json_of(outcome: Outcome) -> dict[str, Any]:
    point = outcome.point
    return {
        "transition": point.recorded.transition.name,
        "ordinal": point.ordinal,
        "kind": point.kind,
        "call": point.call.name,
        "k": point.call.k,
        "text": point.call.text,
        "category": outcome.category,
        "problems": outcome.problems,
        "notes": outcome.notes,
        "status": outcome.status,
        "report": outcome.report,
        "readers": outcome.readers,
        "listing": outcome.listing,
        "is_drifted": outcome.is_drifted,
    }
