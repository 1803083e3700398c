"""Medians and ratios of the raw figures of one question, their tables in Markdown, and targets."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MIB = 2**20
MEGABYTE = 10**6
GIGABYTE = 10**9

Data = dict[str, Any]
"""The part of results.json about one question."""
LARGER, SUM = " | ", " + "
"""Between the names of several peers: the larger of their figures of a round is the base, or their sum."""
STATES = ("cold", "warm")
"""States of the page cache."""


@dataclass(frozen=True)
class Spread:
    """A median, and the lowest and highest value."""

    median: float
    lowest: float
    highest: float

    def show(self, digits: int = 2) -> str:
        """Write it as the cell of a table."""
        if self.lowest == self.highest:
            return f"{self.median:.{digits}f}"
        return f"{self.median:.{digits}f} ({self.lowest:.{digits}f}–{self.highest:.{digits}f})"


def spread(values: Iterable[float]) -> Spread | None:
    """Compute median and extremes; None where there are no values."""
    found = list(values)
    return Spread(statistics.median(found), min(found), max(found)) if found else None


def runs_of(data: Data, name: str) -> list[Data]:
    """The runs of a peer, by round; none where it was skipped."""
    runs: list[Data] = data["peers"].get(name, {}).get("runs", [])
    return runs


def peers_in(data: Data, state: str) -> list[str]:
    """The peers that ran with the page cache in this state."""
    return [name for name in data["peers"] if name.endswith(f"/{state}") and runs_of(data, name)]


def ours_in(data: Data) -> list[str]:
    """The peers that are hfshard."""
    return [name for name in data["peers"] if name.startswith("hfshard")]


def seconds(run: Data, phase: str = "") -> float:
    """Seconds to the end of a phase; of the last one where the run has none of that name."""
    times: dict[str, float] = run["seconds"]
    return times[phase] if phase in times else list(times.values())[-1]


def ratio(
    data: Data, name: str, base: str, phase: str = "", value: Callable[[Data, str], float] = seconds
) -> Spread | None:
    """Divide a peer's figure by another's of the same round, and take the median.

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
    """Name the peers that are faster than hfshard, and why.

    Args:
        data: The raw figures.
        names: The peers to compare, without their state.
        state: The state of the page cache.
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


@dataclass(frozen=True)
class Target:
    """A figure to aim at, and what was measured of it."""

    text: str
    measured: str
    is_met: bool | None
    """None where it was not measured."""


def at_most(
    text: str, limit: float, found: Spread | float | None, of: str = "", *, digits: int = 2, unit: str = ""
) -> Target:
    """A target that a figure is not above the limit; `of` is what the limit is a multiple of, in words."""
    text = f"{text} ≤ {limit} × {of}" if of else text
    if found is None:
        return Target(text, "not measured", None)
    value = found.median if isinstance(found, Spread) else found
    shown = found.show(digits) if isinstance(found, Spread) else f"{found:.{digits}f}"
    return Target(text, f"{shown}{unit}", value <= limit)


def peak_at_most(text: str, mib: int, data: Data, names: Iterable[str]) -> Target:
    """A target that the peak memory of some peers is not above so many MiB."""
    peaks = [run["peak"] / MIB for name in names for run in runs_of(data, name)]
    return at_most(f"{text}: peak memory ≤ {mib} MiB more", mib, max(peaks, default=None), digits=1, unit=" MiB")


def table(
    data: Data, names: Sequence[str], phases: Sequence[tuple[str, str]], base: str = "transformers", digits: int = 2
) -> str:
    """Write one line a peer.

    Columns are, for each (phase, heading), seconds and the ratio to the base; for the last, also that to the limit.
    """
    has_limit = any(data["peers"][name]["limit"] for name in names)
    titles = [""]
    for _, heading in phases:
        titles += [f"{heading}s (min–max)", f"{heading}× {base}"]
    titles += [*(["× the limit"] if has_limit else []), "CPU s", "peak MiB", "MB read", "MB written", "rounds"]
    return markdown_table(
        titles, [_row(data, name, phases, has_limit, digits) for name in names if runs_of(data, name)]
    )


def tables_by_state(data: Data, title: str, phase: str, base: str = "transformers") -> str:
    """Write a section and a table for each state of the page cache."""
    return paragraphs(
        *(
            f"### {title}, {state}\n\n{table(data, peers_in(data, state), [(phase, '')], base)}"
            for state in STATES
            if peers_in(data, state)
        )
    )


def _row(data: Data, name: str, phases: Sequence[tuple[str, str]], has_limit: bool, digits: int) -> list[str]:
    peer = data["peers"][name]
    runs = runs_of(data, name)
    cells = [peer["title"]]
    for phase, _ in phases:
        has_phase = phase in runs[0]["seconds"] or len(runs[0]["seconds"]) == 1
        cells.append(show(spread(seconds(run, phase) for run in runs), digits) if has_phase else "")
        cells.append(show_ratio(data, name, peer["base"], phase) if has_phase else "")
    if has_limit:
        cells.append(show_ratio(data, name, peer["limit"], phases[-1][0]))
    middle = {field: statistics.median(run[field] for run in runs) for field in ("cpu", "read", "written")}
    return [
        *cells,
        f"{middle['cpu']:.{digits}f}",
        f"{max(run['peak'] for run in runs) / MIB:.1f}",
        f"{middle['read'] / MEGABYTE:.1f}",
        f"{middle['written'] / MEGABYTE:.1f}",
        str(len(runs)),
    ]


def show(found: Spread | None, digits: int = 2) -> str:
    """Write a spread, or nothing."""
    return found.show(digits) if found else ""


def show_ratio(data: Data, name: str, other: str, phase: str = "") -> str:
    """Write the ratio to another peer; nothing where there is none."""
    return show(ratio(data, name, other, phase)) if other and other != name else ""


def skipped(data: Data) -> str:
    """List the peers that did not run, with the reasons."""
    lines = [f"- not run: {data['peers'][name]['title']}: {why}" for name, why in data["skipped"].items()]
    return "\n".join(dict.fromkeys(lines))  # one line for both states of the page cache


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay out rows of cells below their titles."""
    lines = [f"| {' | '.join(cells)} |" for cells in (titles, *rows)]
    return "\n".join([lines[0], "|---" * len(titles) + "|", *lines[1:]])


def paragraphs(*parts: str) -> str:
    """Join the parts that are not empty, with an empty line between."""
    return "\n\n".join(filter(None, parts))


def readme_block(command: str, head: str, table: str) -> str:
    """A README's measured block, between its comments; the command prints it."""
    return "\n".join([f"<!-- measured: {command} -->", head, "", table, "<!-- /measured -->"])
