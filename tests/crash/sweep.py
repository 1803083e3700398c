"""Run a table: record each transition once, stop it at every point in every way, judge what is left."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from tests.crash.forks import parallel
from tests.crash.points import POWER, B, Outcome, Point, Recorded, T, points_of, sample
from tests.crash.power import cut_power
from tests.crash.suite import Suite
from tests.crash.tracer import hidden_writes, traced

PROGRESS_SECONDS = 10.0

MEMORY = Path("/dev/shm")
MEMORY_BYTES = 48 * 1024 * 1024
"""A save wants 16 MiB free; containers give 64."""

GROUPS_PER_JOB = 8
"""With fewer transitions to a process than this, points are handed out one by one, so that all processes are busy."""

STOPPED = ("killed by SIGKILL", "--- SIGINT", "(INJECTED)")
"""One of these is in the trace of a process that was stopped."""

Work = Point[Any, Any] | Recorded[Any, Any]
"""One thing to do: a stop, or all power cuts of a transition."""


def prepare_process() -> None:
    """Make this process fit to be forked: quiet and offline."""
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1", TOKENIZERS_PARALLELISM="false")
    warnings.simplefilter("ignore")
    logging.getLogger("hfshard").addHandler(logging.NullHandler())  # readers may warn of a stopped save's remains
    gc.disable()


def record(suite: Suite[T, B], transition: T, place: Path) -> Recorded[T, B]:
    """Build the directory, carry out the transition in a copy of it under strace, and look at both."""
    root = Path(tempfile.mkdtemp(prefix="template-", dir=place))
    template = suite.build(transition, root)
    trial = Path(tempfile.mkdtemp(prefix="trial-", dir=place))
    copy = suite.copy(template, trial)
    run = traced(suite.unstopped(transition, copy), place / f"{trial.name}.trace", prepare=suite.prepare)
    if run.status != "saved":
        raise RuntimeError(f"{transition.name}: unstopped, it {run.status}: {run.report}")
    if hidden := hidden_writes(run.calls, trial):
        raise RuntimeError(f"{transition.name}: writes that this harness can't stop at: {hidden[:3]}")
    baseline, problems = suite.baseline(transition, template, copy, run)
    calls = tuple(call for call in run.calls if call.changes(trial))
    shutil.rmtree(trial)
    return Recorded(transition, template, baseline, calls, copy, problems)


def stop(suite: Suite[T, B], point: Point[T, B], place: Path) -> Outcome:
    """Work in a fresh copy, let it happen at the point, and judge what is left."""
    tries = 1
    outcome = _stop(suite, point, place)
    while outcome.category == "missed" and suite.stop_again(outcome, tries):
        tries += 1
        outcome = _stop(suite, point, place)
    return suite.settle(outcome)


def _stop(suite: Suite[T, B], point: Point[T, B], place: Path) -> Outcome:
    root = Path(tempfile.mkdtemp(prefix="point-", dir=place))
    trace = place / f"{root.name}.trace"
    try:
        directory = suite.copy(point.recorded.template, root)
        inject, scope = suite.aim(point, root)
        run = traced(suite.work(point, directory), trace, inject, suite.prepare, scope)
        if any(mark in run.raw for mark in STOPPED):
            outcome = suite.judge(point, run, directory)
        else:
            outcome = Outcome(point, "missed", ["missed: the call was not reached"])
        made = [call.name for call in run.calls if call.changes(root)]
        planned = [call.name for call in point.recorded.calls[: point.ordinal + 1] if scope.threads or not call.thread]
        outcome.status = run.status
        outcome.report = run.report
        outcome.is_drifted = made[: len(planned)] != planned and not scope.path
        return outcome
    finally:
        shutil.rmtree(root, ignore_errors=True)
        trace.unlink(missing_ok=True)


def memory() -> str | None:
    """In memory a flush costs nothing; what is left there is the same."""
    if not MEMORY.is_dir() or not os.access(MEMORY, os.W_OK):
        return None
    return str(MEMORY) if shutil.disk_usage(MEMORY).free >= MEMORY_BYTES else None


def _do(group: Sequence[Work], suite: Suite[T, B], place: Path) -> list[Outcome]:
    parts = [[stop(suite, one, place)] if isinstance(one, Point) else cut_power(suite, one, place) for one in group]
    return list(chain.from_iterable(parts))


def _grouped(work: Sequence[Work], jobs: int) -> list[list[Work]]:
    """All that is done with a transition goes to one process: it remembers what it has judged already."""
    groups: dict[str, list[Work]] = {}
    for one in work:
        recorded = one.recorded if isinstance(one, Point) else one
        groups.setdefault(recorded.transition.name, []).append(one)
    if jobs <= 1 or len(groups) < GROUPS_PER_JOB * jobs:
        return [[one] for one in work]
    return list(groups.values())


def sweep(
    suite: Suite[T, B],
    transitions: Sequence[T],
    kinds: Sequence[str],
    *,
    count: int | None = None,
    jobs: int = 1,
    where: Path | None = None,
    progress: Callable[[int, int, int], None] = lambda done, count, failed: None,
) -> tuple[list[Recorded[T, B]], list[Outcome]]:
    """Record every transition, then stop it at every point.

    Args:
        suite: What is swept.
        transitions: Of its table.
        kinds: Of `suite.kinds`.
        count: At most so many points of all (power cuts are not counted).
        jobs: Processes side by side.
        where: An existing directory to work in; None: in memory where there is /dev/shm, else the temporary one.
        progress: Called now and then with the number of things done, of all, and of failures.
    """
    prepare_process()
    place = Path(tempfile.mkdtemp(prefix="crash-sweep-", dir=where or memory())).resolve()
    try:
        suite.warm(place)
        recorded = list(parallel(partial(record, suite, place=place), transitions, jobs))
        order = {one.name: number for number, one in enumerate(transitions)}
        recorded.sort(key=lambda one: order[one.transition.name])
        injected = [kind for kind in kinds if kind != POWER]
        points = sample([point for one in recorded for point in points_of(one, injected)], count)
        work: list[Work] = [*points, *(recorded if POWER in kinds else [])]
        outcomes: list[Outcome] = []
        failed = 0
        spoken = time.monotonic()
        groups = _grouped(work, jobs)
        for done, some in enumerate(parallel(partial(_do, suite=suite, place=place), groups, jobs), 1):
            outcomes += some
            failed += sum(one.category in suite.failures for one in some)
            if time.monotonic() - spoken > PROGRESS_SECONDS:
                spoken = time.monotonic()
                progress(done, len(groups), failed)
        return recorded, outcomes
    finally:
        shutil.rmtree(place, ignore_errors=True)
