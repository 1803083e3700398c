"""Run the table: record each transition once, stop it at every point in every way."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from tests.crash.points import INJECTIONS, Outcome, Point, Prepared, points_of, prepare, prepare_process, stop, warm
from tests.crash.power import cut_power
from tests.crash.saves.judge import FAILURES
from tests.crash.saves.targets import Target
from tests.crash.saves.transitions import Transition

KINDS = (*INJECTIONS, "power")
"""What can happen to a save."""

PROGRESS_SECONDS = 10.0

MEMORY = Path("/dev/shm")
MEMORY_BYTES = 48 * 1024 * 1024
"""A save wants 16 MiB free; containers give 64."""

A = TypeVar("A")
B = TypeVar("B")


def sample(points: Sequence[Point], count: int | None, seed: int = 0) -> list[Point]:
    """All points, or so many of them, always the same ones."""
    if count is None or count >= len(points):
        return list(points)
    chosen = sorted(random.Random(seed).sample(range(len(points)), count))
    return [points[place] for place in chosen]


def parallel(work: Callable[[A], B], items: Iterable[A], jobs: int) -> Iterator[B]:
    """Map in `jobs` forks of this warm process; in this process when there is one job."""
    if jobs <= 1:
        yield from map(work, items)
        return
    global _work
    _work = work
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap_unordered(_call, items)


_work: Callable[..., object]


def _call(item: object) -> object:
    return _work(item)


def _memory() -> str | None:
    """In memory a flush costs nothing; what a save leaves is the same."""
    if not MEMORY.is_dir() or not os.access(MEMORY, os.W_OK):
        return None
    return str(MEMORY) if shutil.disk_usage(MEMORY).free >= MEMORY_BYTES else None


def _do(work: Point | Prepared, place: Path, target: Target) -> list[Outcome]:
    return [stop(work, place, target)] if isinstance(work, Point) else cut_power(work, place, target)


def sweep(
    transitions: Sequence[Transition],
    target: Target,
    kinds: Sequence[str],
    *,
    count: int | None = None,
    jobs: int = 1,
    where: Path | None = None,
    tell: Callable[[int, int, int], None] = lambda done, count, failed: None,
) -> tuple[list[Prepared], list[Outcome]]:
    """Record every transition, then stop it at every point.

    Args:
        transitions: Which.
        target: Who saves.
        kinds: Of `KINDS`.
        count: At most so many points of all (power cuts are not counted).
        jobs: Processes side by side.
        where: An existing directory to work in; None: in memory where there is /dev/shm, else the temporary one.
        tell: Called now and then with the number of things done, of all, and of failures.
    """
    prepare_process()
    place = Path(tempfile.mkdtemp(prefix="crash-sweep-", dir=where or _memory())).resolve()
    try:
        warm(place, target)
        prepared = list(parallel(partial(prepare, place=place, target=target), transitions, jobs))
        order = {one.name: number for number, one in enumerate(transitions)}
        prepared.sort(key=lambda one: order[one.transition.name])
        injected = [kind for kind in kinds if kind in INJECTIONS]
        points = sample([point for one in prepared for point in points_of(one, injected)], count)
        work: list[Point | Prepared] = [*points, *(prepared if "power" in kinds else [])]
        outcomes: list[Outcome] = []
        spoken = time.monotonic()
        doings = parallel(partial(_do, place=place, target=target), work, jobs)
        for done, some in enumerate(doings, 1):
            outcomes += some
            if time.monotonic() - spoken > PROGRESS_SECONDS:
                spoken = time.monotonic()
                failed = sum(one.judgement.category in FAILURES for one in outcomes)
                tell(done, len(work), failed)
        return prepared, outcomes
    finally:
        shutil.rmtree(place, ignore_errors=True)
