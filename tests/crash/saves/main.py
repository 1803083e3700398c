"""The command line of the crash sweep."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from tests.crash.points import Outcome, Prepared
from tests.crash.report import details, failures, notes, table, write_json
from tests.crash.saves.targets import TARGETS
from tests.crash.saves.transitions import Transition, all_transitions
from tests.crash.sweep import KINDS, sweep
from tests.crash.tracer import has_strace


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(
        prog="crash_sweep",
        description=(
            "Stop a save at each of its file-changing system calls (SIGKILL, Ctrl-C, a full disk, an I/O error) and "
            "ask hfshard, transformers and huggingface_hub what they then load: it must be wholly the old or wholly "
            "the new checkpoint, config included, and the next save must succeed and leave no litter. Needs strace. "
            "All of it is some 16,000 points: about 20 minutes with one job, half of that with --jobs 2 on two free "
            "cores; --kinds kill: 5 minutes. HFSHARD_WRITERS=4 in the environment writes several shards at once, "
            "HFSHARD_DIRECT=0 writes through the page cache."
        ),
    )
    made.add_argument("--target", choices=sorted(TARGETS), default="hfshard", help="who saves; upstream's must fail")
    kinds = "of %(default)s: full is a disk that stays full, power a simulated power cut"
    made.add_argument("--kinds", default=",".join(KINDS), help=kinds)
    made.add_argument(
        "--transition", action="append", help="only these; may be repeated, and be a pattern such as 'bin->*'"
    )
    made.add_argument("--sample", type=int, metavar="N", help="only N points of all, always the same ones")
    made.add_argument("--jobs", type=int, default=1, metavar="N", help="processes that work side by side")
    made.add_argument("--where", type=Path, metavar="DIR", help="work there, not in memory: another file system")
    made.add_argument("--show", type=int, default=20, metavar="N", help="failures to print in full")
    made.add_argument("--json", type=Path, metavar="FILE", help="write every point's outcome there")
    made.add_argument("--list", action="store_true", help="print the transitions and leave")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sweep; 0 when nothing failed, 1 when something did, 2 on bad usage."""
    options = parser().parse_args(arguments)
    chosen = _chosen(options.transition)
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
    target = TARGETS[options.target]
    if options.target != "hfshard":
        chosen = [replace(one, stock_only=True) for one in chosen]
    prepared, outcomes = sweep(
        chosen, target, kinds, count=options.sample, jobs=options.jobs, where=options.where, tell=_progress
    )
    return _tell(prepared, outcomes, options, time.monotonic() - began)


def _progress(done: int, count: int, failed: int) -> None:
    print(f"{done} of {count} points, {failed} failed", file=sys.stderr, flush=True)


def _chosen(patterns: Sequence[str] | None) -> list[Transition]:
    """The transitions that any pattern fits; none when a pattern fits none."""
    everything = all_transitions()
    for pattern in patterns or ["*"]:
        if not any(fnmatchcase(one.name, pattern) for one in everything):
            return []
    return [one for one in everything if any(fnmatchcase(one.name, pattern) for pattern in patterns or ["*"])]


def _tell(prepared: list[Prepared], outcomes: list[Outcome], options: argparse.Namespace, seconds: float) -> int:
    if options.json:
        write_json(options.json, prepared, outcomes)
    failed = failures(outcomes)
    whole = [f"{one.transition.name}: {problem}" for one in prepared for problem in one.problems]
    for problem in whole:
        print(f"WHOLE SAVE {problem}")
    for outcome in failed[: options.show]:
        print("\n".join(details(outcome)))
    for note, count in notes(outcomes).most_common(options.show):
        print(f"note ({count}): {note}")
    print(table(prepared, outcomes))
    drifted = sum(outcome.is_drifted for outcome in outcomes)
    print(
        f"\n{options.target}: {len(prepared)} transitions, {len(outcomes)} points, {len(failed)} failed, "
        f"{len(whole)} failures of whole saves, {drifted} points where the calls came in another order, {seconds:.0f} s"
    )
    return 1 if failed or whole else 0
