"""Charts of a run as SVG whose widths are percentages: they fit any window without scripts, and their text stays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

HEIGHT: Final = 150
"""Pixels of what is drawn; a line of labels comes below it."""
_TOP: Final = 18
"""Pixels above the highest value, for its label."""
_GAP: Final = 0.3
"""The share of a bar's place that stays free."""
_WIDEST: Final = 6.0
"""Percent of a bar, where there are few."""
_LABELS: Final = 6


@dataclass(frozen=True, slots=True)
class Bar:
    """A checkpoint as a bar of two parts: what was written stands on the axis, what was linked on top of it."""

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
    """Of SVG: "start", "middle", "end"."""


@dataclass(frozen=True, slots=True)
class Point:
    """A value of a metric."""

    x: float
    """Percent."""
    y: float
    """Pixels."""
    number: int
    """Which checkpoint it is of."""
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
    """Draw what was written and what was linked for each checkpoint, side by side.

    Args:
        sizes: Bytes of both.
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
    """Label some of the bars: as many as have room on a telephone."""
    place = 100 / max(len(steps), 1)
    shown = range(0, len(steps), max(1, math.ceil(len(steps) / _LABELS)))
    return [Label(round((number + 0.5) * place, 3), f"{steps[number]:,}", "middle") for number in shown]


def line_of(metric: str, values: Sequence[tuple[int, float]]) -> Line | None:
    """Draw a metric.

    Args:
        metric: Its name.
        values: Step and value of each checkpoint; what is not finite is left out.

    Returns:
        The line, or None where there is nothing to draw.
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
    """Where a value lies between two, even where their difference is no number any more."""
    return 0.5 if least == greatest else (value / 2 - least / 2) / (greatest / 2 - least / 2)


def _pixels(share: float) -> float:
    return round(share * HEIGHT, 1)
