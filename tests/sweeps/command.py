"""The command line of the sweeps of directories, runs, hubs and ranks: `scripts/crash_sweep`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.sweeps.child import has_strace
from tests.sweeps.engine import Outcome, Recorded, TracedSuite, chosen, notes_of, sample, sweep, table, write_json

PROGRESS_SECONDS = 10.0

TARGETS = {
    "saves": ("hfshard", "transformers"),
    "runs": ("hfshard",),
    "directory-hub": ("hfshard", "hasty"),
    "distributed": ("hfshard",),
    "rank-faults": ("hfshard",),
}
"""Who does the work, by suite; all but hfshard must fail."""

DESCRIPTION = """\
Stop a save at each of its file-changing system calls (SIGKILL, Ctrl-C, a full disk, an I/O error), and ask what is
then there: it must be wholly the old or wholly the new, and the next save must succeed and leave no litter. Needs
strace.

saves          what hfshard, transformers and huggingface_hub load of a checkpoint, config included
runs           what a new process restores of a training run, to the bit
directory-hub  what readers find at every ref of a hub in a directory
distributed    what is loaded after two ranks have saved together, and that the other one is told who failed
rank-faults    the same where each of 2 or 4 ranks fails in each phase of each call that saves or loads: a table of
               cases, which --transition names; much of it is waiting, so that --jobs may be more than there are cores

HFSHARD_WRITERS=4 in the environment writes several shards at once, HFSHARD_DIRECT=0 writes through the page cache."""


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(
        prog="crash_sweep", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("suite", nargs="?", choices=TARGETS, default="saves", help="what is swept; default: %(default)s")
    made.add_argument("--target", default="hfshard", help="who does it: transformers (saves), hasty (directory-hub)")
    made.add_argument(
        "--kinds", help="of kill,int,enospc,eio,full (the disk stays full),power (a simulated power cut),unsupported "
        "(the file system does not know the call); default: all that the suite has",
    )  # fmt: skip
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


def suite_of(name: str, target: str) -> TracedSuite[Any, Any]:
    """The suite of a name; its imports take seconds."""
    if name == "directory-hub":
        from tests.sweeps.hub import DirectoryHubSuite

        return DirectoryHubSuite(target)
    if name == "runs":
        from tests.sweeps.run import RunsSuite

        return RunsSuite(target)
    if name == "distributed":
        from tests.sweeps.ranks import RanksSuite

        return RanksSuite(target)
    from tests.sweeps.directory import SavesSuite

    return SavesSuite(target)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a sweep; 0 when nothing failed, 1 when something did, 2 on bad usage."""
    options = parser().parse_args(arguments)
    if options.target not in TARGETS[options.suite]:
        return _misused(f"--target of {options.suite} is one of {', '.join(TARGETS[options.suite])}")
    suite = None
    if options.suite == "rank-faults":
        from tests.sweeps.rank_cases import all_cases

        some: list[Any] = chosen(all_cases(), options.transition)
    else:
        suite = suite_of(options.suite, options.target)
        some = chosen(suite.transitions(), options.transition)
    if options.list:
        print("\n".join(one.name for one in some))
        return 0
    kinds = options.kinds.split(",") if options.kinds else list(suite.kinds) if suite else []
    if suite and (unknown := [kind for kind in kinds if kind not in suite.kinds]):
        return _misused(f"--kinds knows {', '.join(suite.kinds)}, not {', '.join(unknown)}")
    if not some:
        return _misused("no such transition")
    if not has_strace():
        return _misused("install strace")
    if suite is None:
        from tests.sweeps.rank_faults import play_cases

        return play_cases(sample(some, options.sample), options)
    began = time.monotonic()
    choose = partial(sample, count=options.sample)
    recorded, outcomes = sweep(
        suite, some, kinds, choose=choose, jobs=options.jobs, where=options.where, progress=_progress_of(suite)
    )
    return _report(suite, recorded, outcomes, options, time.monotonic() - began)


def _misused(words: str) -> int:
    print(f"crash_sweep: {words}", file=sys.stderr)
    return 2


def _progress_of(suite: TracedSuite[Any, Any]) -> Callable[[int, int, Sequence[Outcome]], None]:
    """Print now and then how far the sweep is, and how many of its points have failed."""
    failed = 0
    spoken = time.monotonic()

    def progress(done: int, count: int, outcomes: Sequence[Outcome]) -> None:
        nonlocal failed, spoken
        failed += len(suite.failed(outcomes))
        if time.monotonic() - spoken > PROGRESS_SECONDS:
            spoken = time.monotonic()
            print(f"{done} of {count} done, {failed} points failed", file=sys.stderr, flush=True)

    return progress


def _report(
    suite: TracedSuite[Any, Any],
    recorded: list[Recorded[Any, Any]],
    outcomes: list[Outcome],
    options: argparse.Namespace,
    seconds: float,
) -> int:
    if options.json:
        write_json(options.json, recorded, outcomes)
    failed = suite.failed(outcomes)
    whole = [f"{one.transition.name}: {problem}" for one in recorded for problem in one.problems]
    for problem in whole:
        print(f"UNSTOPPED {problem}")
    for outcome in failed[: options.show]:
        print(outcome)
    for note, count in notes_of(outcomes).most_common(options.show):
        print(f"note ({count}): {note}")
    print(table(suite, recorded, outcomes))
    drifted = sum(outcome.is_drifted for outcome in outcomes)
    print(
        f"\n{suite.name} by {suite.target}: {len(recorded)} transitions, {len(outcomes)} points, {len(failed)} failed, "
        f"{len(whole)} failures of transitions that were not stopped, {drifted} points where the calls came in another "
        f"order, {seconds:.0f} s"
    )
    return 1 if failed or whole else 0
