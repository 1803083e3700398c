"""The command line of the crash sweep of training checkpoints: `scripts/crash_sweep --training`."""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from tests.crash.points import INJECTIONS, prepare_process
from tests.crash.runs.content import warm
from tests.crash.runs.points import FAILURES, Outcome, Point, Prepared, points_of, prepare, stop
from tests.crash.runs.power import cut_power
from tests.crash.runs.transitions import Transition, all_transitions
from tests.crash.sweep import KINDS, PROGRESS_SECONDS, parallel
from tests.crash.sweep import _memory as memory
from tests.crash.tracer import has_strace

NAME_WIDTH = 30


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(
        prog="crash_sweep --training",
        description=(
            "Stop CheckpointManager.save at each of its file-changing system calls (SIGKILL, Ctrl-C, a full disk, an "
            "I/O error), and let a new process restore: it must be the old or the new state, to the bit, and the next "
            "save must succeed and leave no litter. Needs strace."
        ),
    )
    kinds = "of %(default)s: full is a disk that stays full, power a simulated power cut"
    made.add_argument("--kinds", default=",".join(KINDS), help=kinds)
    made.add_argument("--transition", action="append", help="only these; may be repeated, and be a pattern: 'async-*'")
    made.add_argument("--sample", type=int, metavar="N", help="only N points of all, always the same ones")
    made.add_argument("--jobs", type=int, default=1, metavar="N", help="processes that work side by side")
    made.add_argument("--where", type=Path, metavar="DIR", help="work there, not in memory: another file system")
    made.add_argument("--show", type=int, default=20, metavar="N", help="failures to print in full")
    made.add_argument("--list", action="store_true", help="print the transitions and leave")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sweep; 0 when nothing failed, 1 when something did, 2 on bad usage."""
    options = parser().parse_args(arguments)
    patterns = options.transition or ["*"]
    chosen = [one for one in all_transitions() if any(fnmatchcase(one.name, pattern) for pattern in patterns)]
    if options.list:
        print("\n".join(one.name for one in chosen))
        return 0
    kinds = options.kinds.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        print(f"crash_sweep: --kinds knows {', '.join(KINDS)}, not {', '.join(unknown)}", file=sys.stderr)
        return 2
    if not chosen or not has_strace():
        print("crash_sweep: no such transition" if not chosen else "crash_sweep: install strace", file=sys.stderr)
        return 2
    began = time.monotonic()
    prepared, outcomes = sweep(chosen, kinds, count=options.sample, jobs=options.jobs, where=options.where)
    failed = [one for one in outcomes if one.category in FAILURES]
    for outcome in failed[: options.show]:
        print("\n".join(_details(outcome)))
    print(_table(prepared, outcomes))
    drifted = sum(outcome.is_drifted for outcome in outcomes)
    print(
        f"\ntraining: {len(prepared)} transitions, {len(outcomes)} points, {len(failed)} failed, {drifted} points "
        f"where the calls came in another order, {time.monotonic() - began:.0f} s"
    )
    return 1 if failed else 0


def sweep(
    transitions: Sequence[Transition],
    kinds: Sequence[str],
    *,
    count: int | None = None,
    jobs: int = 1,
    where: Path | None = None,
) -> tuple[list[Prepared], list[Outcome]]:
    """Record every transition, then stop it at every point, or at `count` of them (power cuts are not counted)."""
    prepare_process()
    place = Path(tempfile.mkdtemp(prefix="training-sweep-", dir=where or memory())).resolve()
    try:
        warm()
        prepared = list(parallel(partial(prepare, place=place), transitions, jobs))
        order = {one.name: number for number, one in enumerate(transitions)}
        prepared.sort(key=lambda one: order[one.transition.name])
        injected = [kind for kind in kinds if kind in INJECTIONS]
        points = _sample([point for one in prepared for point in points_of(one, injected)], count)
        work: list[Point | Prepared] = [*points, *(prepared if "power" in kinds else [])]
        outcomes: list[Outcome] = []
        spoken = time.monotonic()
        for done, some in enumerate(parallel(partial(_do, place=place), work, jobs), 1):
            outcomes += some
            if time.monotonic() - spoken > PROGRESS_SECONDS:
                spoken = time.monotonic()
                failed = sum(one.category in FAILURES for one in outcomes)
                print(f"{done} of {len(work)}, {failed} failed", file=sys.stderr, flush=True)
        return prepared, outcomes
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _sample(points: list[Point], count: int | None) -> list[Point]:
    """All points, or so many of them, always the same ones."""
    if count is None or count >= len(points):
        return points
    chosen = sorted(random.Random(0).sample(range(len(points)), count))
    return [points[place] for place in chosen]


def _do(work: Point | Prepared, place: Path) -> list[Outcome]:
    return [stop(work, place)] if isinstance(work, Point) else cut_power(work, place)


def _table(prepared: Sequence[Prepared], outcomes: Sequence[Outcome]) -> str:
    categories = ["old", "new", *FAILURES]
    lines = [" " * NAME_WIDTH + "".join(f"{word:>8}" for word in ("calls", "points", *categories))]
    rows: list[tuple[str, int, list[Outcome]]] = []
    for one in prepared:
        mine = [outcome for outcome in outcomes if outcome.point.prepared.transition.name == one.transition.name]
        rows.append((one.transition.name, len(one.calls), mine))
    calls = sum(len(one.calls) for one in prepared)
    for kind in dict.fromkeys(outcome.point.kind for outcome in outcomes):
        rows.append((f"all {kind}", calls, [outcome for outcome in outcomes if outcome.point.kind == kind]))
    rows.append(("all", calls, list(outcomes)))
    for name, count, mine in rows:
        counts = Counter(outcome.category for outcome in mine)
        numbers = [count, len(mine), *(counts[category] for category in categories)]
        lines.append(f"{name:{NAME_WIDTH}}" + "".join(f"{number:>8}" for number in numbers))
    return "\n".join(lines)


def _details(outcome: Outcome) -> Iterator[str]:
    point = outcome.point
    call = f"{point.call.name}({point.call.text[:160]}"
    yield f"{outcome.category.upper()} {point.prepared.transition.name} #{point.ordinal} {point.kind} at {call}"
    yield f"    the save: {outcome.status}; {outcome.report[:400]}"
    for words in outcome.problems:
        yield f"    {words}"
