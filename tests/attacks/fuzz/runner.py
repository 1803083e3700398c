"""Runs cases in forked batches, each with limits of time and memory; a child that dies costs one case."""

from __future__ import annotations

import json
import logging
import mmap
import os
import signal
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.attacks.fuzz.cases import Fuzzer, Outcome
from tests.attacks.watch import limit_memory, read_until_quiet

WALL_SECONDS = 300.0
"""Without a word from a batch: it waits for something that never comes, as a reader of a pipe would."""
_TOLD_EVERY = 50
"""Cases: what a child has counted until it dies is not lost."""
GOOD = ("refused", "right")


@dataclass
class Report:
    """What came of all cases so far."""

    counts: Counter[str] = field(default_factory=Counter)
    by_base: Counter[str] = field(default_factory=Counter)
    findings: list[Outcome] = field(default_factory=list)

    @property
    def done(self) -> int:
        """Cases that were run."""
        return sum(self.counts.values())


def run_cases(fuzzer: Fuzzer, numbers: range, batch: int) -> Iterator[Report]:
    """Run cases; yields the report after every batch."""
    report = Report()
    first = numbers.start
    while first < numbers.stop:
        first = _run_batch(fuzzer, range(first, min(first + batch, numbers.stop)), report)
        yield report


def _run_batch(fuzzer: Fuzzer, numbers: range, report: Report) -> int:
    """Run cases in one child; returns the number of the next case."""
    with mmap.mmap(-1, 8) as current:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            _child(fuzzer, numbers, current, writing)
        os.close(writing)
        received, is_done = read_until_quiet(reading, WALL_SECONDS)
        os.close(reading)
        if not is_done:
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        for line in received.splitlines():
            part = json.loads(line)
            if "kind" in part:
                report.findings.append(Outcome(**part))
            else:
                report.counts.update(part["counts"])
                report.by_base.update(part["by_base"])
        if code == 0:
            return numbers.stop
        number = int.from_bytes(current[:], "little")
    kind = "hung" if not is_done else f"died ({code})"
    report.findings.append(Outcome(number, "?", "?", "?", kind))
    report.counts[kind] += 1
    fuzzer.restore()
    return number + 1


def _child(fuzzer: Fuzzer, numbers: range, current: mmap.mmap, fd: int) -> None:
    code = 1
    try:
        limit_memory()
        logging.disable(logging.CRITICAL)
        warnings.simplefilter("ignore")
        with tempfile.TemporaryDirectory() as cwd, os.fdopen(fd, "w", buffering=1) as pipe:
            os.chdir(cwd)
            _run_here(fuzzer, numbers, current, pipe.write)
            if os.listdir(cwd):
                pipe.write(json.dumps(asdict(Outcome(numbers.start, "?", str(os.listdir(cwd)), "?", "wrote here"))))
        code = 0
    finally:
        os._exit(code)


def _run_here(fuzzer: Fuzzer, numbers: range, current: mmap.mmap, tell: Callable[[str], object]) -> None:
    counts: Counter[str] = Counter()
    by_base: Counter[str] = Counter()

    def tell_counts() -> None:
        tell(json.dumps({"counts": counts, "by_base": by_base}) + "\n")
        counts.clear()
        by_base.clear()

    for number in numbers:
        current[:] = number.to_bytes(8, "little")
        outcome = fuzzer.run(number)
        counts[outcome.kind] += 1
        by_base[f"{outcome.base} {outcome.reader} {outcome.kind}"] += 1
        if outcome.kind not in GOOD:
            tell(json.dumps(asdict(outcome)) + "\n")
        if number % _TOLD_EVERY == 0:
            tell_counts()
    tell_counts()


def work_folder() -> tempfile.TemporaryDirectory[str]:
    """A directory in memory, where there is one."""
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(prefix="hfshard-fuzz-", dir=memory if memory.is_dir() else None)
