"""What a sweep prints: a row per transition, totals by kind, and every failure in full."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.crash.points import Outcome, Prepared
from tests.crash.saves.judge import CATEGORIES, FAILURES

NAME_WIDTH = 33
WIDTH = 11


def failures(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Those that fail the sweep."""
    return [outcome for outcome in outcomes if outcome.judgement.category in FAILURES]


def table(prepared: Sequence[Prepared], outcomes: Sequence[Outcome]) -> str:
    """Counts by transition and by kind, and the totals."""
    header = ["calls", "points", *CATEGORIES]
    lines = [f"{'':{NAME_WIDTH}}" + " ".join(f"{word:>{WIDTH}}" for word in header)]
    for one in prepared:
        mine = [outcome for outcome in outcomes if outcome.point.prepared.transition.name == one.transition.name]
        lines.append(_row(one.transition.name, len(one.calls), mine))
    lines.append("")
    for kind in dict.fromkeys(outcome.point.kind for outcome in outcomes):
        lines.append(_row(f"all {kind}", None, [outcome for outcome in outcomes if outcome.point.kind == kind]))
    lines.append(_row("all", sum(len(one.calls) for one in prepared), outcomes))
    return "\n".join(lines)


def _row(name: str, calls: int | None, outcomes: Sequence[Outcome]) -> str:
    counts = Counter(outcome.judgement.category for outcome in outcomes)
    numbers = [calls if calls is not None else "", len(outcomes), *(counts[category] for category in CATEGORIES)]
    return f"{name:{NAME_WIDTH}}" + " ".join(f"{number:>{WIDTH}}" for number in numbers)


def details(outcome: Outcome) -> Iterator[str]:
    """One failing point: where, what every reader said, what was left."""
    point, judgement = outcome.point, outcome.judgement
    name = point.prepared.transition.name
    yield f"{judgement.category.upper()} {name} #{point.ordinal} {point.kind} at {point.call.name}, call {point.call.k}"
    yield f"    {point.call.name}({point.call.text[:200]}"
    yield f"    the save: {outcome.status}; {outcome.report[:400]}"
    for category, words in judgement.problems:
        yield f"    {category}: {words}"
    yield f"    left: {' '.join(judgement.listing)}"
    yield f"    readers: {judgement.readers}"


def notes(outcomes: Sequence[Outcome]) -> Counter[str]:
    """Remarks that are no failures, with their counts."""
    words = ((outcome.point.prepared.transition.name, note) for outcome in outcomes for note in outcome.judgement.notes)
    return Counter(f"{name}: {note}" for name, note in words)


def write_json(path: Path, prepared: Sequence[Prepared], outcomes: Sequence[Outcome]) -> None:
    """Everything, for other programs."""
    rows: list[dict[str, Any]] = [
        {
            "transition": outcome.point.prepared.transition.name,
            "ordinal": outcome.point.ordinal,
            "kind": outcome.point.kind,
            "call": outcome.point.call.name,
            "k": outcome.point.call.k,
            "text": outcome.point.call.text,
            "category": outcome.judgement.category,
            "problems": outcome.judgement.problems,
            "notes": outcome.judgement.notes,
            "status": outcome.status,
            "report": outcome.report,
            "readers": outcome.judgement.readers,
            "listing": outcome.judgement.listing,
            "is_drifted": outcome.is_drifted,
        }
        for outcome in outcomes
    ]
    whole = {one.transition.name: list(one.problems) for one in prepared}
    path.write_text(json.dumps({"transitions": whole, "points": rows}, indent=1))
