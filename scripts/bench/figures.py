"""Medians and ratios of the raw figures of one question, and the Markdown tables of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

MIB = 2**20
MEGABYTE = 10**6

Data = dict[str, Any]
"""What results.json holds of one question."""


@dataclass(frozen=True)
class Spread:
    """A median, and between what."""

    median: float
    lowest: float
    highest: float

    def show(self, digits: int = 2) -> str:
        """As in a table's cell."""
        if self.lowest == self.highest:
            return f"{self.median:.{digits}f}"
        return f"{self.median:.{digits}f} ({self.lowest:.{digits}f}–{self.highest:.{digits}f})"


def spread(values: Iterable[float]) -> Spread | None:
    """None where there are no values."""
    found = list(values)
    return Spread(statistics.median(found), min(found), max(found)) if found else None


def runs_of(data: Data, name: str) -> list[Data]:
    """The runs of a peer, by round; none where it was skipped."""
    runs: list[Data] = data["peers"].get(name, {}).get("runs", [])
    return runs


def seconds(run: Data, phase: str = "") -> float:
    """Seconds to the end of a phase; of the last one where the run has none of that name."""
    times: dict[str, float] = run["seconds"]
    return times[phase] if phase in times else list(times.values())[-1]


def ratio(
    data: Data, name: str, base: str, phase: str = "", value: Callable[[Data, str], float] = seconds
) -> Spread | None:
    """A peer's figure divided by another's of the same round, and the median of these."""
    bases = {run["round"]: value(run, phase) for run in runs_of(data, base)}
    return spread(value(run, phase) / bases[run["round"]] for run in runs_of(data, name) if bases.get(run["round"]))


def cpu_of(run: Data, phase: str = "") -> float:
    """CPU seconds of all threads."""
    return float(run["cpu"])


def highest(data: Data, names: Iterable[str], field: str) -> float | None:
    """The highest of a field over all runs of some peers."""
    values = [run[field] for name in names for run in runs_of(data, name)]
    return max(values) if values else None


def table(data: Data, names: Sequence[str], phases: Sequence[tuple[str, str]], base: str = "transformers") -> str:
    """One line a peer: for each (phase, heading) seconds and the ratio to the base; for the last, that to the limit."""
    has_limit = any(data["peers"][name]["limit"] for name in names)
    head = [""]
    for _, heading in phases:
        head += [f"{heading}s (min–max)", f"{heading}× {base}"]
    head += [*(["× the limit"] if has_limit else []), "CPU s", "peak MiB", "MB read", "MB written", "rounds"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name in names:
        runs = runs_of(data, name)
        if not runs:
            continue
        peer = data["peers"][name]
        cells = [peer["title"]]
        for phase, _ in phases:
            has_phase = phase in runs[0]["seconds"] or len(runs[0]["seconds"]) == 1
            shown = spread(seconds(run, phase) for run in runs)
            cells.append(shown.show() if shown and has_phase else "")
            cells.append(_show_ratio(data, name, peer["base"], phase) if has_phase else "")
        if has_limit:
            cells.append(_show_ratio(data, name, peer["limit"], phases[-1][0]))
        middle = {field: statistics.median(run[field] for run in runs) for field in ("cpu", "read", "written")}
        cells += [
            f"{middle['cpu']:.2f}",
            f"{max(run['peak'] for run in runs) / MIB:.1f}",
            f"{middle['read'] / MEGABYTE:.1f}",
            f"{middle['written'] / MEGABYTE:.1f}",
            str(len(runs)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _show_ratio(data: Data, name: str, other: str, phase: str) -> str:
    pair = ratio(data, name, other, phase) if other and other != name else None
    return pair.show() if pair else ""


def skipped(data: Data) -> str:
    """A list of the peers that did not run, with the reasons."""
    lines = [f"- not run: {data['peers'][name]['title']}: {why}" for name, why in data["skipped"].items()]
    return "\n".join(dict.fromkeys(lines))  # one line for both states of the page cache


def at_most(limit: float, found: Spread | float | None, digits: int = 2, unit: str = "") -> tuple[str, bool | None]:
    """What a target says of a figure that must not be above the limit."""
    if found is None:
        return "not measured", None
    value = found.median if isinstance(found, Spread) else found
    shown = found.show(digits) if isinstance(found, Spread) else f"{found:.{digits}f}"
    return f"{shown}{unit}", value <= limit
