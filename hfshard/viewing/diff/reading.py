"""Does what needs bytes of tensors, several at once, each thread in the order of the files; with a bar."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from hfshard._util.progress import ProgressCallback, bytes_bar
from hfshard._util.threads import cancellable, in_threads

_RUN_BYTES: Final = 64 * 1024 * 1024
"""Bytes that one thread reads in a row: from far away, small tensors that follow each other come in one request."""

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class ReadJob(Generic[_Result]):
    """Something to do with the bytes of one tensor or two."""

    order: tuple[int, int]
    """Jobs of neighbours in a file are neighbours, too."""
    nbytes: int
    """That are read, at most."""
    work: Callable[[ProgressCallback], _Result]
    """Gets what it calls with the bytes of each block, and what ends it early by raising."""


def do_jobs(
    jobs: Sequence[ReadJob[_Result]], threads: int, progress: bool | None, title: str = "Comparing"
) -> list[_Result]:
    """Do all jobs; the first error of one ends the others.

    Args:
        jobs: In any order.
        threads: That read at once.
        progress: A bar on stderr; None: on a terminal.
        title: Of the bar.

    Returns:
        What each returned.

    Raises:
        What a job raises.
    """
    results: dict[int, _Result] = {}
    total = sum(job.nbytes for job in jobs)
    with bytes_bar(title, total, progress if total else False) as progress_callback:

        def do_run(run: Sequence[int], cancelled: threading.Event) -> None:
            for number in run:
                results[number] = jobs[number].work(cancellable(progress_callback, cancelled))

        in_threads(do_run, list(_runs(jobs)), threads)
    return [results[number] for number in range(len(jobs))]


def _runs(jobs: Sequence[ReadJob[_Result]]) -> Iterator[list[int]]:
    run: list[int] = []
    run_bytes = 0
    for number in sorted(range(len(jobs)), key=lambda number: jobs[number].order):
        run.append(number)
        run_bytes += jobs[number].nbytes
        if run_bytes >= _RUN_BYTES:
            yield run
            run, run_bytes = [], 0
    if run:
        yield run
