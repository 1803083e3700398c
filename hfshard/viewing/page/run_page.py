"""Page of a run: its metrics over the steps, and its checkpoints with their sizes, changes and problems."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Final

from hfshard._util.text import count_of, format_size, printable
from hfshard.viewing.page.page import Fact, Page, is_path, name_of, printable_value, share_text
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
_LEAST_RANGE: Final = 3.0
"""The least ratio of a metric's greatest value to its least for which a logarithmic scale is offered."""
_MOST_TIMES: Final = 10
"""The multiple of the best value from which on the latest one is not compared by a percentage."""


@dataclass(frozen=True, slots=True)
class StepChange:
    """What changed in the model since the checkpoint before."""

    differing: int
    """Tensors that are not the same."""
    tensors: int
    sentence: str
    """The headline of the comparison; printable."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the table of checkpoints."""

    text: str
    value: float | str = ""
    """What the cell sorts by; "": its text."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the table of checkpoints, in the order of the checkpoints."""

    head: str
    cells: tuple[Cell, ...]

    @property
    def constant(self) -> str | None:
        """The text that every filled cell has; None if they differ, or if there are fewer than two."""
        texts = [cell.text for cell in self.cells if cell.text]
        return texts[0] if len(texts) > 1 and len(set(texts)) == 1 else None


@dataclass(frozen=True, slots=True)
class _Row:
    number: int
    step: int
    size: int | None
    written: int | None
    linked: int | None
    metrics: str
    states: tuple[str, ...]
    problems: tuple[str, ...]
    more_problems: int
    change: StepChange | None
    """What changed since the checkpoint before; None if that is unknown or was not asked for."""


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
    changes: Mapping[str, StepChange] | None = None,
    about: tuple[str, ...] = (),
    training: str = "",
) -> Page:
    """Build the page of a run's checkpoints.

    Args:
        root: The run's path or address.
        listed: Its checkpoints, in the order in which they were saved.
        unchanged: Path of a checkpoint -> its bytes that an earlier one also has.
        best: The metric that selects the checkpoint marked as the best.
        is_store: Whether it is in a store, where unchanged files are copied rather than linked.
        changes: Path of a checkpoint -> what changed since the one before, as far as it is known; None: not asked for.
        about: What the model is, in a few words each.
        training: What changed since the first, in one printable sentence; "": that is unknown.
    """
    latest = listed[-MOST_CHECKPOINTS:]
    names = sorted({name for one in latest for name in one.metrics}, key=lambda name: (name != best, name))
    has_columns = len(names) <= _MOST_COLUMNS and all(len(name) <= _LONGEST_HEAD for name in names)
    unchanged_word = "copied" if is_store else "unchanged"
    rows = [_row(number, one, unchanged.get(one.path), changes or {}) for number, one in enumerate(latest)]
    columns = [*(_metric_columns(latest, names) if has_columns else ()), *_byte_columns(latest, rows, unchanged_word)]
    columns += _save_columns(latest)
    measured = [row for row in rows if row.size is not None]
    bars = bars_of([(row.written or 0, row.linked or 0) for row in measured])
    lines = [line for name in names if (line := line_of(name, latest, best)) is not None]
    return Page(
        kind="run",
        title=name_of(root),
        place="" if is_path(root) else printable(root),
        facts=_facts(listed, unchanged, best, is_store=is_store),
        about=about,
        view={
            "rows": rows,
            "is_by_step": all(before.step < after.step for before, after in pairwise(rows)),
            "more": len(listed) - len(rows),
            "marks": [_Mark(bar, row) for bar, row in zip(bars, measured, strict=True)],
            "bar_labels": labels_of_bars([row.step for row in measured]),
            "largest": max((row.size or 0 for row in measured), default=0),
            "lines": lines[:_MOST_METRICS],
            "has_log": any(line.log is not None for line in lines[:_MOST_METRICS]),
            "more_lines": max(0, len(lines) - _MOST_METRICS),
            "has_best": _having("best", latest) is not None,
            "sentences": [text for text in (_best_sentence(listed, best), training) if text],
            "columns": [column for column in columns if column.constant is None and any(c.text for c in column.cells)],
            "constants": [(column.head, column.constant) for column in columns if column.constant is not None],
            "lists_metrics": bool(names) and not has_columns,
            "lists_changes": changes is not None,
            "changed": _alike([row for row in rows if row.change is not None]),
            "unknown_changes": sum(row.change is None for row in rows[1:]),
            "height": HEIGHT,
            "bar_height": BAR_HEIGHT,
            "unchanged_word": unchanged_word,
            "is_store": is_store,
        },
    )


def _having(state: str, listed: Sequence[ListedCheckpoint]) -> ListedCheckpoint | None:
    return next((one for one in listed if state in one.states), None)


def _best_sentence(listed: Sequence[ListedCheckpoint], best: str | None) -> str:
    """Say which step is the best and by what; "" if none is."""
    found = _having("best", listed)
    if best is None or found is None:
        return ""
    values = [value for one in listed if math.isfinite(value := one.metrics.get(best, math.nan))]
    value = found.metrics[best]
    extreme = "lowest" if value == min(values) else "highest"
    shown = printable_value(metrics_text({best: value}))
    sentence = f"Step {found.step:,} is the best: {shown} is the {extreme} of {count_of(len(values), 'checkpoint')}"
    latest = _having("latest", listed)
    if latest is None or latest is found or best not in latest.metrics:
        return f"{sentence}."
    return f"{sentence}; the latest, step {latest.step:,}, has {_compared_text(latest.metrics[best], value)}."


def _compared_text(value: float, best: float) -> str:
    """Write a value, and by how much it is worse than the best one, if that is a percentage that says something."""
    if value == best:
        return "the same"
    if value * best > 0 and abs(value) < _MOST_TIMES * abs(best):
        return f"{value:.6g} ({share_text(abs(value - best), abs(best))} {'higher' if value > best else 'lower'})"
    return f"{value:.6g}"


def _alike(changed: Sequence[_Row]) -> list[list[_Row]]:
    """Join neighbors in which the same changed."""
    return [list(group) for _, group in groupby(changed, lambda row: row.change and row.change.sentence)]


def _facts(
    listed: Sequence[ListedCheckpoint], unchanged: Mapping[str, int], best: str | None, *, is_store: bool
) -> tuple[Fact, ...]:
    total = sum(one.size or 0 for one in listed)
    linked = sum(unchanged.values())
    note = f"{format_size(linked)} more unchanged: stored once" if linked else ""
    latest = _having("latest", listed)
    damaged = sum(one.is_damaged for one in listed)
    unfinished = sum(one.is_unfinished for one in listed)
    steps = [one.step for one in listed]
    return (
        *([] if best is None else [_step_fact("best", _having("best", listed), best, printable_value(best))]),
        _step_fact("latest", latest, best, f"{latest.saved_text} UTC" if latest and latest.saved else ""),
        Fact("checkpoints", f"{len(listed):,}", f"steps {min(steps):,} to {max(steps):,}"),
        Fact("in the store" if is_store else "on disk", format_size(total if is_store else total - linked),
             f"{format_size(linked)} unchanged: copied there" if is_store and linked else note),
        Fact("damaged", f"{damaged:,}" if damaged else "none", f"{unfinished:,} more unfinished" if unfinished else ""),
    )  # fmt: skip


def _step_fact(label: str, found: ListedCheckpoint | None, best: str | None, note: str) -> Fact:
    """Name the step of a state with its metric; with the note, if it has no such metric, or there is no such step."""
    if found is not None and best in found.metrics:
        note = printable_value(metrics_text({best: found.metrics[best]}))
    return Fact(label, "none" if found is None else f"step {found.step:,}", note)


def _row(number: int, one: ListedCheckpoint, linked: int | None, changes: Mapping[str, StepChange]) -> _Row:
    return _Row(
        number=number,
        step=one.step,
        size=one.size,
        written=None if one.size is None or linked is None else one.size - linked,
        linked=linked,
        metrics=printable_value(metrics_text(one.metrics)),
        states=one.states,
        problems=tuple(printable_value(problem.message) for problem in one.problems[:_MOST_PROBLEMS]),
        more_problems=max(0, len(one.problems) - _MOST_PROBLEMS),
        change=changes.get(one.path),
    )


def _metric_columns(latest: Sequence[ListedCheckpoint], names: Sequence[str]) -> Iterator[Column]:
    for name in names:
        values = [one.metrics.get(name) for one in latest]
        cells = (
            Cell(text, "" if value is None else value) for text, value in zip(aligned(values), values, strict=True)
        )
        yield Column(printable(name), tuple(cells))


def aligned(values: Sequence[float | None]) -> list[str]:
    """Write numbers with as many decimals as one of them needs for six digits; without, if one has an exponent."""
    texts = ["" if value is None else f"{value:.6g}" for value in values]
    known = [value for value in values if value is not None]
    if not all(map(math.isfinite, known)) or any("e" in text for text in texts):
        return texts
    decimals = max((len(text.partition(".")[2]) for text in texts), default=0)
    return ["" if value is None else f"{value:.{decimals}f}" for value in values]


def _byte_columns(latest: Sequence[ListedCheckpoint], rows: Sequence[_Row], unchanged_word: str) -> Iterator[Column]:
    yield Column("size", tuple(_byte_cell(row.size) for row in rows))
    yield Column("written", tuple(_byte_cell(row.written) for row in rows))
    yield Column(unchanged_word, tuple(_byte_cell(row.linked) for row in rows))
    parts = [{part.part: part.nbytes for part in one.parts} for one in latest]
    for part in _PARTS:
        yield Column(part, tuple(_byte_cell(sizes.get(part)) for sizes in parts))


def _byte_cell(nbytes: int | None) -> Cell:
    return Cell("") if nbytes is None else Cell(format_size(nbytes), nbytes)


def _save_columns(latest: Sequence[ListedCheckpoint]) -> Iterator[Column]:
    """Yield when each was saved; and the place in the order of saves, where it is not the order of the steps."""
    yield Column("saved (UTC)", tuple(Cell(one.saved_text) for one in latest))
    saved = sorted((one.save_number, one.step) for one in latest if one.save_number is not None)
    if [step for _, step in saved] != sorted(step for _, step in saved):
        numbers = [one.save_number for one in latest]
        yield Column("save", tuple(Cell("" if number is None else f"{number:,}", number or "") for number in numbers))


# Charts of a run as SVG with widths in percent: they fit any window without scripts, and text keeps its size.


HEIGHT: Final = 150
"""The height of a metric's plot in pixels."""
BAR_HEIGHT: Final = 80
"""The height of the bars in pixels; a line of labels is below them."""
_TOP: Final = 18
"""Pixels above the highest bar, for its label."""
_EDGE: Final = 8
"""Pixels between a metric's extremes and the edges of its plot."""
_GAP: Final = 0.3
"""The share of a bar's slot that stays free."""
_WIDEST: Final = 6.0
"""The largest width of a bar in percent, used if there are few."""
_LABELS: Final = 6
_TICKS: Final = 4
"""About the number of gridlines of a metric, and of steps below it."""
_DENSE: Final = 60
"""Points of a line that are drawn as circles; if there are more, only those of a state are."""


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
class Tick:
    """A gridline, with its value."""

    y: float
    """Pixels."""
    text: str


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
class Scale:
    """A metric, drawn on one scale."""

    points: tuple[Point, ...]
    """By step; those to be drawn as circles."""
    curves: tuple[str, ...]
    """Polylines in percent and pixels, interrupted where a value is not finite."""
    ticks: tuple[Tick, ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """A value that is named above a chart."""

    word: str
    value: str
    step: int
    state: str = ""
    """The state of its checkpoint that the word is of."""


@dataclass(frozen=True, slots=True)
class Line:
    """A metric over the steps."""

    metric: str
    readings: tuple[Reading, ...]
    not_finite: tuple[int, ...]
    """Steps at which it is NaN or infinite."""
    linear: Scale
    log: Scale | None
    """None if it has values of zero or less, or hardly any range."""
    labels: tuple[Label, ...]
    best_at: float | None
    """The percentage of the best checkpoint."""

    @property
    def scales(self) -> tuple[tuple[str, Scale], ...]:
        """The scales with the names of their classes."""
        return (("linear", self.linear), *(() if self.log is None else (("log", self.log),)))


def bars_of(sizes: Sequence[tuple[int, int]]) -> list[Bar]:
    """Draw a bar for each checkpoint's written and linked bytes, side by side."""
    most = max((written + linked for written, linked in sizes), default=0) or 1
    place = 100 / max(len(sizes), 1)
    width = min(place * (1 - _GAP), _WIDEST)
    bars = []
    for number, (written, linked) in enumerate(sizes):
        written_height = round(written / most * BAR_HEIGHT, 1)
        linked_height = round(linked / most * BAR_HEIGHT, 1)
        written_top = _TOP + BAR_HEIGHT - written_height
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


def line_of(metric: str, listed: Sequence[ListedCheckpoint], best: str | None = None) -> Line | None:
    """Draw a metric, or return None if there is nothing to draw; all metrics have the same axis of steps.

    `best` is the metric that selects the best checkpoint.
    """
    having = sorted(
        ((number, one, one.metrics[metric]) for number, one in enumerate(listed) if metric in one.metrics),
        key=lambda found: found[1].step,
    )
    finite = [value for _, _, value in having if math.isfinite(value)]
    if not finite:
        return None
    first, last = min(one.step for one in listed), max(one.step for one in listed)

    def x_of(step: int) -> float:
        return round(1 + 98 * (step - first) / (last - first), 3) if last > first else 50.0

    def draw(share_of: Callable[[float], float], ticks: Sequence[tuple[float, str]]) -> Scale:
        def y_of(value: float) -> float:
            return round(HEIGHT - _EDGE - (HEIGHT - 2 * _EDGE) * share_of(value), 1)

        points: list[Point] = []
        curves: list[list[str]] = [[]]
        for number, one, value in having:
            if not math.isfinite(value):
                curves.append([])
                continue
            point = Point(x_of(one.step), y_of(value), number, value)
            curves[-1].append(f"{point.x},{point.y}")
            if len(finite) <= _DENSE or one.states:
                points.append(point)
        return Scale(
            tuple(points),
            tuple(" ".join(curve) for curve in curves if len(curve) > 1),
            tuple(Tick(y_of(value), text) for value, text in ticks),
        )

    least, greatest = min(finite), max(finite)
    log = None
    if least > 0 and greatest / least >= _LEAST_RANGE:
        low, high = math.log(least), math.log(greatest)
        log = draw(lambda value: (math.log(value) - low) / (high - low), log_ticks(least, greatest))
    best_one = _having("best", listed)
    return Line(
        printable_value(metric),
        tuple(_readings([(one, value) for _, one, value in having if math.isfinite(value)], metric, best)),
        tuple(one.step for _, one, value in having if not math.isfinite(value)),
        draw(lambda value: _share(value, least, greatest), linear_ticks(least, greatest)),
        log,
        tuple(_step_labels(first, last, x_of)),
        None if best_one is None else x_of(best_one.step),
    )


def _readings(values: Sequence[tuple[ListedCheckpoint, float]], metric: str, best: str | None) -> Iterator[Reading]:
    """Yield the best and the latest value of a metric, and its extremes where they are others.

    A metric that does not select the best checkpoint has one extreme, in the direction in which it moved until then.
    """
    extremes: list[tuple[str, Callable[..., tuple[ListedCheckpoint, float]]]] = [("lowest", min), ("highest", max)]
    at_best = next(((one, value) for one, value in values if one.is_best), None)
    if at_best is not None:
        one, value = at_best
        yield Reading("best" if metric == best else "at the best", f"{value:.4g}", one.step, "best")
        first = values[0][1]
        extremes = [] if metric == best or value == first else extremes[value > first :][:1]
    for word, choose in extremes:
        one, value = choose(values, key=lambda found: found[1])
        if at_best is None or value != at_best[1]:
            yield Reading(word, f"{value:.4g}", one.step)
    yield from (Reading("latest", f"{value:.4g}", one.step, "latest") for one, value in values if one.is_latest)


def linear_ticks(least: float, greatest: float) -> list[tuple[float, str]]:
    """Choose a few round values between two others, which may be the same or too far apart to subtract."""
    spacing = _round_up((greatest / 2 - least / 2) / _TICKS * 2)
    if not spacing or math.isinf(spacing):
        return [(value, f"{value:.4g}") for value in sorted({least, greatest})]
    decimals = max(0, -math.floor(math.log10(spacing)))
    counts = range(math.ceil(least / spacing), math.floor(greatest / spacing) + 1)
    values = [count * spacing for count in counts]
    most = max(map(abs, values), default=0.0)
    if decimals > _MOST_DECIMALS or most >= _LARGEST_FIXED:
        return [(value, f"{value:.3g}") for value in values]
    return [(value, f"{value:,.{decimals}f}") for value in values]


_MOST_DECIMALS: Final = 6
_LARGEST_FIXED: Final = 1e6
"""Limits within which values beside an axis are not written with an exponent."""


def log_ticks(least: float, greatest: float) -> list[tuple[float, str]]:
    """Choose powers of ten between two positive values; with few of those, also their doubles and fives."""
    powers = range(math.floor(math.log10(least)), math.ceil(math.log10(greatest)) + 1)
    powers = powers[:: max(1, len(powers) // (2 * _TICKS))]
    factors = (1,) if len(powers) > _TICKS else (1, 2, 5)
    values = [float(f"{factor}e{power}") for power in powers for factor in factors]
    return [(value, f"{value:g}") for value in values if least <= value <= greatest]


def _round_up(spacing: float) -> float:
    """Return the next of 1, 2, 5 times a power of ten; 0 if there is none."""
    if not spacing or math.isinf(spacing):
        return spacing
    power = math.floor(math.log10(spacing))
    found = (float(f"{factor}e{power}") for factor in (1, 2, 5, 10))
    return next((value for value in found if value >= spacing), 0.0)


def _step_labels(first: int, last: int, x_of: Callable[[int], float]) -> Iterator[Label]:
    spacing = max(1, int(_round_up((last - first) / _TICKS)))
    for step in sorted({first, *range(math.ceil(first / spacing) * spacing, last + 1, spacing)}):
        at = x_of(step)
        if step != first and at - x_of(first) < _NEAREST:
            continue
        anchor = "start" if step == first < last else "end" if at > 100 - _NEAREST / 2 else "middle"
        yield Label(at, f"{step:,}", anchor)


_NEAREST: Final = 14.0
"""The least distance of a step's label from the first one, in percent: on a phone, that is some 40 pixels."""


def _share(value: float, least: float, greatest: float) -> float:
    """Return a value's relative position between two others, even if their difference overflows."""
    return 0.5 if least == greatest else (value / 2 - least / 2) / (greatest / 2 - least / 2)
