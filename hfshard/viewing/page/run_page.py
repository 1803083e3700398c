"""Page of a run: its checkpoints over the steps, with their sizes, metrics and problems."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from hfshard._util.text import format_size, printable
from hfshard.viewing.page.page import Fact, Page, is_path, name_of, printable_value
from hfshard.viewing.run_listing import ListedCheckpoint, Part, metrics_text

MOST_CHECKPOINTS: Final = 500
"""The most checkpoints that the page shows, the latest ones."""
_MOST_METRICS: Final = 8
"""The most metrics that are drawn; the list has all."""
_MOST_COLUMNS: Final = 4
"""The most columns of metrics; if there are more metrics, or one has a long name, they share a column."""
_LONGEST_HEAD: Final = 24
"""The most characters of the name of a metric with its own column."""
_MOST_PROBLEMS: Final = 5
"""The most problems shown of one checkpoint, since each of its files may be damaged."""
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
    """Values of the metrics that have columns."""
    states: tuple[str, ...]
    problems: tuple[str, ...]
    more_problems: int


@dataclass(frozen=True, slots=True)
class _Mark:
    """A bar with the row that describes it."""

    bar: Bar
    row: _Row


def make_run_page(
    root: str,
    listed: Sequence[ListedCheckpoint],
    unchanged: Mapping[str, int],
    *,
    best: str | None = None,
    is_store: bool = False,
) -> Page:
    """Build the page of a run's checkpoints.

    Args:
        root: The run's path or address.
        listed: Its checkpoints, in the order in which they were saved.
        unchanged: Path of a checkpoint -> its bytes that an earlier one also has.
        best: The metric that selects the checkpoint marked as the best.
        is_store: Whether it is in a store, where unchanged files are copied rather than linked.
    """
    latest = listed[-MOST_CHECKPOINTS:]
    names = sorted({name for one in latest for name in one.metrics})
    columns = names if len(names) <= _MOST_COLUMNS and all(len(name) <= _LONGEST_HEAD for name in names) else []
    rows = [_row(number, one, unchanged.get(one.path), columns) for number, one in enumerate(latest)]
    measured = [row for row in rows if row.size is not None]
    bars = bars_of([(row.written or 0, row.linked or 0) for row in measured])
    return Page(
        kind="run",
        title=name_of(root),
        place="" if is_path(root) else printable(root),
        facts=_facts(listed, unchanged, best, is_store=is_store),
        view={
            "rows": rows,
            "more": len(listed) - len(rows),
            "parts": _PARTS,
            "marks": [_Mark(bar, row) for bar, row in zip(bars, measured, strict=True)],
            "bar_labels": labels_of_bars([row.step for row in measured]),
            "largest": max((row.size or 0 for row in measured), default=0),
            "lines": _lines(latest, names[:_MOST_METRICS]),
            "columns": list(map(printable, columns)),
            "has_metrics": bool(names),
            "more_lines": max(0, len(names) - _MOST_METRICS),
            "height": HEIGHT,
            "linked_word": "copied" if is_store else "linked",
        },
    )


def _facts(
    listed: Sequence[ListedCheckpoint], unchanged: Mapping[str, int], best: str | None, *, is_store: bool
) -> tuple[Fact, ...]:
    total = sum(one.size or 0 for one in listed)
    linked = sum(unchanged.values())
    note = f"{format_size(linked)} more are linked" if linked else "nothing is linked"
    latest = next((one for one in listed if one.is_latest), None)
    damaged = sum(one.is_damaged for one in listed)
    unfinished = sum(one.is_unfinished for one in listed)
    steps = [one.step for one in listed]
    return (
        Fact("checkpoints", f"{len(listed):,}", f"steps {min(steps):,} to {max(steps):,}"),
        Fact("in the store" if is_store else "on disk", format_size(total if is_store else total - linked),
             f"{format_size(linked)} were copied there" if is_store else note),
        Fact("latest", "none" if latest is None else f"step {latest.step:,}",
             "" if latest is None or latest.saved is None else f"{latest.saved_text} UTC"),
        *([] if best is None else [_best_fact(listed, best)]),
        Fact("damaged", f"{damaged:,}" if damaged else "none", f"{unfinished:,} more unfinished" if unfinished else ""),
    )  # fmt: skip


def _best_fact(listed: Sequence[ListedCheckpoint], best: str) -> Fact:
    found = next((one for one in listed if one.is_best), None)
    if found is None:
        return Fact("best", "none", printable_value(best))
    return Fact("best", f"step {found.step:,}", printable_value(metrics_text({best: found.metrics[best]})))


def _row(number: int, one: ListedCheckpoint, linked: int | None, columns: Sequence[str]) -> _Row:
    sizes = {part.part: part.nbytes for part in one.parts}
    return _Row(
        number=number,
        step=one.step,
        save_number="" if one.save_number is None else f"{one.save_number:,}",
        saved=one.saved_text,
        size=one.size,
        parts=tuple(map(sizes.get, _PARTS)),
        written=None if one.size is None or linked is None else one.size - linked,
        linked=linked,
        metrics=printable_value(metrics_text(one.metrics)),
        values=tuple(f"{one.metrics[name]:.6g}" if name in one.metrics else "" for name in columns),
        states=one.states,
        problems=tuple(printable_value(problem.message) for problem in one.problems[:_MOST_PROBLEMS]),
        more_problems=max(0, len(one.problems) - _MOST_PROBLEMS),
    )


def _lines(latest: Sequence[ListedCheckpoint], names: Sequence[str]) -> list[Line]:
    lines = []
    for name in names:
        line = line_of(printable_value(name), [(one.step, one.metrics.get(name, float("nan"))) for one in latest])
        if line is not None:
            lines.append(line)
    return lines


# Charts of a run as SVG with widths in percent: they fit any window without scripts, and text keeps its size.


HEIGHT: Final = 150
"""The height of the drawing in pixels; a line of labels is below it."""
_TOP: Final = 18
"""Pixels above the highest value, for its label."""
_GAP: Final = 0.3
"""The share of a bar's slot that stays free."""
_WIDEST: Final = 6.0
"""The largest width of a bar in percent, used if there are few."""
_LABELS: Final = 6


@dataclass(frozen=True, slots=True)
class Bar:
    """A checkpoint as a bar of two parts: written bytes on the axis, linked bytes on top."""

    left: float
    """Percent."""
    width: float
    written_top: float
    """Pixels."""
    written_height: float
    linked_top: float
    linked_height: float


@dataclass(frozen=True, slots=True)
class Label:
    """A step below a chart."""

    at: float
    """Percent."""
    text: str
    anchor: str
    """SVG text anchor: "start", "middle" or "end"."""


@dataclass(frozen=True, slots=True)
class Point:
    """A value of a metric."""

    x: float
    """Percent."""
    y: float
    """Pixels."""
    number: int
    """The number of its checkpoint."""
    value: float


@dataclass(frozen=True, slots=True)
class Line:
    """A metric over the steps."""

    metric: str
    points: tuple[Point, ...]
    least: float
    greatest: float
    labels: tuple[Label, ...]


def bars_of(sizes: Sequence[tuple[int, int]]) -> list[Bar]:
    """Draw a bar of written and linked bytes for each checkpoint, side by side.

    Args:
        sizes: The written and the linked bytes of each checkpoint.
    """
    most = max((written + linked for written, linked in sizes), default=0) or 1
    place = 100 / max(len(sizes), 1)
    width = min(place * (1 - _GAP), _WIDEST)
    bars = []
    for number, (written, linked) in enumerate(sizes):
        written_height = _pixels(written / most)
        linked_height = _pixels(linked / most)
        written_top = _TOP + HEIGHT - written_height
        bars.append(
            Bar(
                round(number * place + (place - width) / 2, 3),
                round(width, 3),
                round(written_top, 1),
                written_height,
                round(written_top - linked_height, 1),
                linked_height,
            )
        )
    return bars


def labels_of_bars(steps: Sequence[int]) -> list[Label]:
    """Label some of the bars, only as many as fit on a phone."""
    place = 100 / max(len(steps), 1)
    shown = range(0, len(steps), max(1, math.ceil(len(steps) / _LABELS)))
    return [Label(round((number + 0.5) * place, 3), f"{steps[number]:,}", "middle") for number in shown]


def line_of(metric: str, values: Sequence[tuple[int, float]]) -> Line | None:
    """Draw a metric.

    Args:
        metric: Its name.
        values: Step and value of each checkpoint; values that are not finite are left out.

    Returns:
        The line, or None if there is nothing to draw.
    """
    known = [(number, step, value) for number, (step, value) in enumerate(values) if math.isfinite(value)]
    if not known:
        return None
    steps = [step for _, step, _ in known]
    least = min(value for _, _, value in known)
    greatest = max(value for _, _, value in known)
    across = max(steps) - min(steps)
    points = [
        Point(
            round(2 + 96 * (step - min(steps)) / across, 3) if across else 50.0,
            round(_TOP + HEIGHT - 8 - (HEIGHT - 16) * _share(value, least, greatest), 1),
            number,
            value,
        )
        for number, step, value in known
    ]
    ends = {min(steps): ("start", 0.0), max(steps): ("end", 100.0)}
    labels = [Label(at, f"{step:,}", anchor) for step, (anchor, at) in ends.items()]
    return Line(metric, tuple(sorted(points, key=lambda point: point.x)), least, greatest, tuple(labels))


def _share(value: float, least: float, greatest: float) -> float:
    """Return a value's relative position between two others, even if their difference overflows."""
    return 0.5 if least == greatest else (value / 2 - least / 2) / (greatest / 2 - least / 2)


def _pixels(share: float) -> float:
    return round(share * HEIGHT, 1)
