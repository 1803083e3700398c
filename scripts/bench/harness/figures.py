"""Medians and ratios of the raw figures of one question, the tables of them, and what targets say of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.markdown import markdown_table

MIB = 2**20
GIB = 2**30
MEGABYTE = 10**6
GIGABYTE = 10**9

Data = dict[str, Any]
"""What results.json holds of one question."""

LARGER, SUM = " | ", " + "
"""Between the names of several peers: the larger of their figures of a round is the base, or their sum."""

Verdict = tuple[str, bool | None]
"""What was measured, in words, and whether it meets the target; None where it was not measured."""


@dataclass(frozen=True)
class Spread:
    """A median, and the lowest and highest value."""

    median: float
    lowest: float
    highest: float

    def show(self, digits: int = 2) -> str:
        """Write it as a table's cell has it."""
        if self.lowest == self.highest:
            return f"{self.median:.{digits}f}"
        return f"{self.median:.{digits}f} ({self.lowest:.{digits}f}–{self.highest:.{digits}f})"


def spread(values: Iterable[float]) -> Spread | None:
    """Median and extremes; None where there are no values."""
    found = list(values)
    return Spread(statistics.median(found), min(found), max(found)) if found else None


def runs_of(data: Data, name: str) -> list[Data]:
    """The runs of a peer, by round; none where it was skipped."""
    runs: list[Data] = data["peers"].get(name, {}).get("runs", [])
    return runs


def peers_in(data: Data, state: str) -> list[str]:
    """The peers that ran with the page cache in this state."""
    return [name for name in data["peers"] if name.endswith(f"/{state}") and runs_of(data, name)]


def seconds(run: Data, phase: str = "") -> float:
    """Seconds to the end of a phase; of the last one where the run has none of that name."""
    times: dict[str, float] = run["seconds"]
    return times[phase] if phase in times else list(times.values())[-1]


def cpu_of(run: Data, phase: str = "") -> float:
    """CPU seconds of all threads."""
    return float(run["cpu"])


def ratio(
    data: Data, name: str, base: str, phase: str = "", value: Callable[[Data, str], float] = seconds
) -> Spread | None:
    """A peer's figure divided by another's of the same round, and the median of these.

    Args:
        data: The raw figures.
        name: The peer.
        base: The other one; or several, of which the larger counts ("write | hash") or the sum ("read + write").
        phase: To the end of which phase.
        value: Which figure.
    """
    bases = _by_round(data, base, phase, value)
    return spread(value(run, phase) / bases[run["round"]] for run in runs_of(data, name) if bases.get(run["round"]))


def _by_round(data: Data, base: str, phase: str, value: Callable[[Data, str], float]) -> dict[int, float]:
    """{round: figure} of a peer, or of several in the rounds that all took part in."""
    for sign, joined in ((LARGER, max), (SUM, sum)):
        if sign in base:
            parts = [_by_round(data, part, phase, value) for part in base.split(sign)]
            rounds = set.intersection(*map(set, parts))
            return {number: joined([part[number] for part in parts]) for number in sorted(rounds)}
    return {run["round"]: value(run, phase) for run in runs_of(data, base)}


def who_is_first(data: Data, names: Iterable[str], state: str, why: Mapping[str, str], phase: str = "") -> str:
    """Say who is before hfshard, and why that is so.

    Args:
        data: Of the question.
        names: The peers to compare, without their state.
        state: Of the page cache.
        why: Name -> the reason.
        phase: Up to its end.
    """
    found = {name: spread(seconds(run, phase) for run in runs_of(data, f"{name}/{state}")) for name in names}
    medians = {name: one.median for name, one in found.items() if one is not None}
    ours = [name for name in medians if name.startswith("hfshard")]
    if not ours:
        return ""
    fastest = medians[ours[0]]
    ahead = sorted((name for name in medians if medians[name] < fastest), key=medians.__getitem__)
    ahead = [name for name in ahead if name not in ours]
    if not ahead:
        return "hfshard is first."
    shown = ", ".join(f"{name} ({medians[name] / fastest:.2f} × hfshard)" for name in ahead)
    reasons = dict.fromkeys(why[name] for name in ahead if name in why)
    return f"hfshard is not first. Before it: {shown}. {' '.join(reasons)}".rstrip()


def highest(data: Data, names: Iterable[str], field: str) -> float | None:
    """The highest of a field over all runs of some peers."""
    values = [run[field] for name in names for run in runs_of(data, name)]
    return max(values) if values else None


def table(
    data: Data, names: Sequence[str], phases: Sequence[tuple[str, str]], base: str = "transformers", digits: int = 2
) -> str:
    """One line a peer: for each (phase, heading) seconds and the ratio to the base; for the last, that to the limit."""
    has_limit = any(data["peers"][name]["limit"] for name in names)
    titles = [""]
    for _, heading in phases:
        titles += [f"{heading}s (min–max)", f"{heading}× {base}"]
    titles += [*(["× the limit"] if has_limit else []), "CPU s", "peak MiB", "MB read", "MB written", "rounds"]
    return markdown_table(
        titles, [_row(data, name, phases, has_limit, digits) for name in names if runs_of(data, name)]
    )


def _row(data: Data, name: str, phases: Sequence[tuple[str, str]], has_limit: bool, digits: int) -> list[str]:
    peer = data["peers"][name]
    runs = runs_of(data, name)
    cells = [peer["title"]]
    for phase, _ in phases:
        has_phase = phase in runs[0]["seconds"] or len(runs[0]["seconds"]) == 1
        shown = spread(seconds(run, phase) for run in runs)
        cells.append(shown.show(digits) if shown and has_phase else "")
        cells.append(_show_ratio(data, name, peer["base"], phase) if has_phase else "")
    if has_limit:
        cells.append(_show_ratio(data, name, peer["limit"], phases[-1][0]))
    return cells + _resources(runs, digits)


def _resources(runs: Sequence[Data], digits: int) -> list[str]:
    """What the runs took beside time: the last cells of a row."""
    middle = {field: statistics.median(run[field] for run in runs) for field in ("cpu", "read", "written")}
    return [
        f"{middle['cpu']:.{digits}f}",
        f"{max(run['peak'] for run in runs) / MIB:.1f}",
        f"{middle['read'] / MEGABYTE:.1f}",
        f"{middle['written'] / MEGABYTE:.1f}",
        str(len(runs)),
    ]


def _show_ratio(data: Data, name: str, other: str, phase: str) -> str:
    found = ratio(data, name, other, phase) if other and other != name else None
    return found.show() if found else ""


def skipped(data: Data) -> str:
    """List the peers that did not run, with the reasons."""
    lines = [f"- not run: {data['peers'][name]['title']}: {why}" for name, why in data["skipped"].items()]
    return "\n".join(dict.fromkeys(lines))  # one line for both states of the page cache


def at_most(limit: float, found: Spread | float | None, digits: int = 2, unit: str = "") -> Verdict:
    """What a target says of a figure that must not be above the limit."""
    if found is None:
        return "not measured", None
    value = found.median if isinstance(found, Spread) else found
    shown = found.show(digits) if isinstance(found, Spread) else f"{found:.{digits}f}"
    return f"{shown}{unit}", value <= limit


def at_least(limit: float, found: Spread | None) -> Verdict:
    """What a target says of a figure that must not be below the limit."""
    if found is None:
        return "not measured", None
    return found.show(), found.median >= limit


def peak_at_most(limit_mib: float, data: Data, names: Iterable[str], digits: int = 1) -> Verdict:
    """What a target says of the peak memory of some peers, in MiB."""
    peak = highest(data, names, "peak")
    return at_most(limit_mib, None if peak is None else peak / MIB, digits, " MiB")
