"""The page of a run: its checkpoints over the steps, what each takes, its metrics, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from hfshard._util.text import format_size
from hfshard.viewing.page.charts import HEIGHT, Bar, Line, bars_of, labels_of_bars, line_of
from hfshard.viewing.page.page import Fact, Page, shown, shown_value
from hfshard.viewing.runs.listing import ListedCheckpoint
from hfshard.viewing.runs.space import CheckpointSpace, Part

MOST_CHECKPOINTS: Final = 500
"""Of the latest ones, that the page shows."""
_MOST_METRICS: Final = 8
"""That are drawn; the list has all."""
_MOST_COLUMNS: Final = 4
"""Of metrics; where there are more, or one has a long name, they share a column."""
_LONGEST_HEAD: Final = 24
"""Characters of a metric's name that has a column."""
_MOST_PROBLEMS: Final = 5
"""Of one checkpoint: each file of it may be damaged."""
_PARTS: Final[tuple[Part, ...]] = ("model", "optimizer", "state", "other")


@dataclass(frozen=True, slots=True)
class _Row:
    number: int
    step: int
    save_number: str
    saved: str
    size: int | None
    parts: tuple[int | None, ...]
    """Bytes, in the order of `_PARTS`."""
    written: int | None
    linked: int | None
    metrics: str
    values: tuple[str, ...]
    """Of the metrics that have columns."""
    states: tuple[str, ...]
    problems: tuple[str, ...]
    more_problems: int


@dataclass(frozen=True, slots=True)
class _Mark:
    """A bar with what is said of it."""

    bar: Bar
    row: _Row


def make_run_page(
    root: str,
    listed: Sequence[ListedCheckpoint],
    spaces: Mapping[str, CheckpointSpace],
    *,
    best: str | None = None,
    is_store: bool = False,
) -> Page:
    """Lay out the checkpoints of a run.

    Args:
        root: Of the run.
        listed: Its checkpoints, in the order in which they were saved.
        spaces: Path of a checkpoint -> its bytes.
        best: The metric by which one is marked as the best.
        is_store: Whether it lies in a store, where what did not change is copied rather than linked.
    """
    latest = listed[-MOST_CHECKPOINTS:]
    names = sorted({name for one in latest for name in one.metrics})
    columns = names if len(names) <= _MOST_COLUMNS and all(len(name) <= _LONGEST_HEAD for name in names) else []
    rows = [_row(number, one, spaces.get(one.path), columns) for number, one in enumerate(latest)]
    measured = [row for row in rows if row.size is not None]
    bars = bars_of([(row.written or 0, row.linked or 0) for row in measured])
    return Page(
        kind="run",
        title=shown(root),
        facts=_facts(listed, spaces, best, is_store=is_store),
        view={
            "rows": rows,
            "more": len(listed) - len(rows),
            "parts": _PARTS,
            "marks": [_Mark(bar, row) for bar, row in zip(bars, measured, strict=True)],
            "bar_labels": labels_of_bars([row.step for row in measured]),
            "largest": max((row.size or 0 for row in measured), default=0),
            "lines": _lines(latest, names[:_MOST_METRICS]),
            "columns": list(map(shown, columns)),
            "has_metrics": bool(names),
            "more_lines": max(0, len(names) - _MOST_METRICS),
            "height": HEIGHT,
            "linked_word": "copied" if is_store else "linked",
        },
    )


def _facts(
    listed: Sequence[ListedCheckpoint], spaces: Mapping[str, CheckpointSpace], best: str | None, *, is_store: bool
) -> tuple[Fact, ...]:
    written = sum(space.written for space in spaces.values())
    total = sum(space.total for space in spaces.values())
    linked = f"{format_size(total - written)} more are linked" if total > written else "nothing is linked"
    latest = next((one for one in listed if one.is_latest), None)
    damaged = sum(one.is_damaged for one in listed)
    unfinished = sum(one.is_unfinished for one in listed)
    steps = [one.step for one in listed]
    return (
        Fact("checkpoints", f"{len(listed):,}", f"steps {min(steps):,} to {max(steps):,}"),
        Fact("in the store" if is_store else "on the disk", format_size(total if is_store else written),
             f"{format_size(total - written)} were copied there" if is_store else linked),
        Fact("latest", "none" if latest is None else f"step {latest.step:,}",
             "" if latest is None or latest.saved is None else f"{latest.saved:%Y-%m-%d %H:%M} UTC"),
        *([] if best is None else [_best_fact(listed, best)]),
        Fact("damaged", f"{damaged:,}" if damaged else "none", f"{unfinished:,} more unfinished" if unfinished else ""),
    )  # fmt: skip


def _best_fact(listed: Sequence[ListedCheckpoint], best: str) -> Fact:
    found = next((one for one in listed if one.is_best), None)
    if found is None:
        return Fact("best", "none", shown_value(best))
    return Fact("best", f"step {found.step:,}", shown_value(f"{best} {found.metrics[best]:.6g}"))


def _row(number: int, one: ListedCheckpoint, space: CheckpointSpace | None, columns: Sequence[str]) -> _Row:
    states = (
        ("damaged", one.is_damaged),
        ("unfinished", one.is_unfinished),
        ("latest", one.is_latest),
        ("best", one.is_best),
    )
    return _Row(
        number=number,
        step=one.step,
        save_number="" if one.save_number is None else f"{one.save_number:,}",
        saved="" if one.saved is None else f"{one.saved:%Y-%m-%d %H:%M}",
        size=None if space is None else space.total,
        parts=tuple(None if space is None else space.parts.get(part) for part in _PARTS),
        written=None if space is None else space.written,
        linked=None if space is None else space.unchanged,
        metrics=shown_value(", ".join(f"{name} {value:.6g}" for name, value in sorted(one.metrics.items()))),
        values=tuple(f"{one.metrics[name]:.6g}" if name in one.metrics else "" for name in columns),
        states=tuple(word for word, is_so in states if is_so),
        problems=tuple(shown_value(problem.message) for problem in one.problems[:_MOST_PROBLEMS]),
        more_problems=max(0, len(one.problems) - _MOST_PROBLEMS),
    )


def _lines(latest: Sequence[ListedCheckpoint], names: Sequence[str]) -> list[Line]:
    lines = []
    for name in names:
        line = line_of(shown_value(name), [(one.step, one.metrics.get(name, float("nan"))) for one in latest])
        if line is not None:
            lines.append(line)
    return lines
