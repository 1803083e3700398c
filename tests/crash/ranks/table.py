"""Plays the table of faults, some cases side by side, and prints what came of it."""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from fnmatch import fnmatchcase
from pathlib import Path

from tests.crash.forks import parallel
from tests.crash.ranks.cases import Case, all_cases
from tests.crash.tracer import has_strace


def play_table(options: argparse.Namespace) -> int:
    """Play the cases that the command line asks for; 0 when nothing failed, 1 when something did, 2 on bad usage."""
    patterns = options.transition or ["*"]
    chosen = [case for case in all_cases() if any(fnmatchcase(case.name, pattern) for pattern in patterns)]
    if options.list:
        print("\n".join(case.name for case in chosen))
        return 0
    if not chosen or not has_strace():
        print(f"crash_sweep: {'install strace' if chosen else 'no such case'}", file=sys.stderr)
        return 2
    return _play(_sampled(chosen, options.sample), options)


def _sampled(cases: list[Case], count: int | None) -> list[Case]:
    return cases if count is None else random.Random(0).sample(cases, min(count, len(cases)))


def _play(cases: list[Case], options: argparse.Namespace) -> int:
    import torch

    from tests.crash.ranks.judging import Played
    from tests.crash.ranks.load_calls import warm
    from tests.crash.ranks.playing import play
    from tests.crash.sweep import memory, prepare_process

    prepare_process()
    torch.set_num_threads(1)
    where = str(options.where) if options.where else memory()
    with tempfile.TemporaryDirectory(prefix="rank-faults-", dir=where) as place:
        warm(Path(place), {case.call for case in cases})
    began = time.monotonic()
    results: list[Played] = []
    for played in parallel(lambda case: play(case, where), cases, options.jobs):
        results.append(played)
        if played.problems:
            print(f"FAILED {played}", flush=True)
        print(f"{len(results)} of {len(cases)} played: {played.case.name}", file=sys.stderr, flush=True)
    failed = [played for played in results if played.problems]
    if options.json:
        told = {one.case.name: {"problems": one.problems, "found": one.found, "ends": str(one)} for one in results}
        options.json.write_text(json.dumps(told, indent=1))
    slowest = max(results, key=lambda one: one.seconds)
    print(
        f"rank-faults: {len(results)} cases, {len(failed)} failed, {time.monotonic() - began:.0f} s; the slowest call "
        f"of a survivor took {slowest.seconds:.1f} s, in {slowest.case.name}"
    )
    return 1 if failed else 0
