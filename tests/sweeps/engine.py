"""The one engine of the sweeps: record a transition, stop it at each of its points, judge what is left, report."""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import shutil
import sys
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from tests.sweeps.child import EVERYTHING, Call, Run, Scope, hidden_writes, parallel, traced

INJECTIONS = {
    "kill": "signal=KILL:when={k}",
    "int": "signal=INT:when={k}",
    "enospc": "error=ENOSPC:when={k}",
    "eio": "error=EIO:when={k}",
    "full": "error=ENOSPC:when={k}+",
    "unsupported": "error=EOPNOTSUPP:when={k}+",
}
"""What happens at a point, in strace's words. `full`: the disk is full from that write on, for good. `unsupported`: the
file system does not know the call."""

POWER = "power"
"""The kind of a simulated power cut, which strace does not make."""

TAKES_SPACE = {"write", "pwrite64", "writev", "pwritev", "pwritev2", "fallocate", "ftruncate", "mkdir", "mkdirat"}

HAS_FALLBACK = frozenset({"rename", "link", "fsync", "flock", "fchmod"})
"""Calls that some file systems do not know, and that hfshard then does without."""

STOPPED = ("killed by SIGKILL", "--- SIGINT", "(INJECTED)")
"""One of these is in the trace of a process that was stopped."""

MEMORY = Path("/dev/shm")
MEMORY_BYTES = 48 * 1024 * 1024
"""A save wants 16 MiB free; containers give 64."""

GROUPS_PER_JOB = 8
"""With fewer transitions to a process than this, points are handed out one by one, so that all processes are busy."""

NAME_WIDTH = 33
WIDTH = 11

Tree = Mapping[str, bytes | None]
"""Path below a directory -> content; None: a directory."""


class Named(Protocol):
    """Anything with the name that `--transition` takes."""

    @property
    def name(self) -> str:
        """Of the row in the table."""


T = TypeVar("T", bound=Named)
B = TypeVar("B")


@dataclass(frozen=True, slots=True)
class Recorded(Generic[T, B]):
    """A transition that was carried out once without being stopped.

    Attributes:
        transition: Which.
        template: The directory (in a root of its own) that every point starts from a copy of.
        baseline: What is found before it and after it.
        calls: What it can be stopped at, in order: its file-changing calls, or its requests.
        recorded_in: The directory in which it was carried out, as its calls name it.
        problems: What is wrong although nothing was stopped.
    """

    transition: T
    template: Path
    baseline: B
    calls: tuple[Call, ...]
    recorded_in: Path
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Point(Generic[T, B]):
    """One way to stop one transition.

    Attributes:
        recorded: The transition.
        ordinal: Place of the call among `recorded.calls`.
        kind: One of the suite's.
    """

    recorded: Recorded[T, B]
    ordinal: int
    kind: str

    @property
    def call(self) -> Call:
        """The call at which it happens."""
        return self.recorded.calls[self.ordinal]


@dataclass(slots=True)
class Judgement:
    """What was found at one point.

    Attributes:
        category: One of the suite's.
        problems: (category, sentence) of each failure.
        notes: Seen, and no failure.
        readers: Reader -> what it found, in words.
        listing: Files and directories as they were left.
    """

    category: str = "missed"
    problems: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    readers: dict[str, str] = field(default_factory=dict)
    listing: list[str] = field(default_factory=list)

    def add(self, category: str, sentence: str) -> None:
        """Note a failure."""
        self.problems.append((category, sentence))

    def settle(self, failures: Sequence[str], quiet: str) -> Judgement:
        """Take the worst problem as the category, or `quiet` when there is none."""
        found = {category for category, _ in self.problems}
        self.category = next((category for category in failures if category in found), quiet)
        return self


@dataclass(slots=True)
class Outcome:
    """What came of a point.

    Attributes:
        point: Which.
        judgement: Of what was left.
        status: How the stopped process ended.
        report: Its words.
        is_drifted: The calls came in another order than when they were recorded.
    """

    point: Point[Any, Any]
    judgement: Judgement
    status: str = ""
    report: str = ""
    is_drifted: bool = False

    @property
    def category(self) -> str:
        """That of its judgement."""
        return self.judgement.category

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        """Where it was stopped, what every reader said, what was left."""
        point, found = self.point, self.judgement
        name, call = point.recorded.transition.name, point.call
        yield f"{found.category.upper()} {name} #{point.ordinal} {point.kind} at {call.name}, call {call.k}"
        yield f"    {call.name}({call.text[:200]}"
        yield f"    stopped, it {self.status}; {self.report[:400]}"
        for category, sentence in found.problems:
            yield f"    {category}: {sentence}"
        if found.listing:
            yield f"    left: {' '.join(found.listing)}"
        if found.readers:
            yield f"    readers: {found.readers}"

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        point, call = self.point, self.point.call
        return asdict(self.judgement) | {
            "transition": point.recorded.transition.name,
            "ordinal": point.ordinal,
            "kind": point.kind,
            "call": call.name,
            "k": call.k,
            "text": call.text,
            "problems": [f"{category}: {sentence}" for category, sentence in self.judgement.problems],
            "status": self.status,
            "report": self.report,
            "is_drifted": self.is_drifted,
        }


class Suite(ABC, Generic[T, B]):
    """A table of transitions, how each is recorded and stopped, and who judges what is left.

    Attributes:
        name: As the command line takes it.
        kinds: What can happen to a transition.
        fine: Categories of outcomes that do not fail the sweep.
        failures: Those that do, the worst first.
    """

    name: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]
    fine: ClassVar[tuple[str, ...]]
    failures: ClassVar[tuple[str, ...]]

    @abstractmethod
    def transitions(self) -> tuple[T, ...]:
        """Every transition, in the order of the table."""

    @abstractmethod
    def warm(self, place: Path) -> None:
        """Have everything imported and built, so that no fork does it in the middle of its work."""

    @abstractmethod
    def record(self, transition: T, place: Path) -> Recorded[T, B]:
        """Carry out a transition once, and look at both sides of it."""

    @abstractmethod
    def points(self, recorded: Recorded[T, B], kinds: Sequence[str]) -> list[Point[T, B]]:
        """Every point of a recorded transition, for these kinds; power cuts have none."""

    @abstractmethod
    def stop(self, point: Point[T, B], place: Path) -> Outcome:
        """Carry out a transition anew, let it happen at the point, and judge what is left."""

    def cut_power(self, recorded: Recorded[T, B], place: Path) -> list[Outcome]:
        """Judge every directory that a power cut during a transition may leave, each once, and those right after it."""
        raise NotImplementedError(f"The sweep of {self.name} has no power cuts.")

    def failed(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Those that fail the sweep."""
        return [outcome for outcome in outcomes if outcome.category in self.failures]

    def counts(self, outcomes: Sequence[Outcome]) -> list[int]:
        """How many outcomes there are of each category, the fine ones first."""
        counts = Counter(outcome.category for outcome in outcomes)
        return [counts[category] for category in (*self.fine, *self.failures)]


class TracedSuite(Suite[T, B]):
    """Transitions of a directory, which strace stops at each system call that changes a file.

    Attributes:
        inside: Path of the swept directory below a root of its own.
    """

    inside: ClassVar[str]

    def __init__(self, target: str = "hfshard") -> None:
        self.target = target

    def warm(self, place: Path) -> None:
        """Make this process fit to be forked: quiet and offline."""
        prepare_process()

    @abstractmethod
    def build(self, transition: T, root: Path) -> Path:
        """Make the directory that a transition starts from, `inside` a root; return its path."""

    @abstractmethod
    def perform(self, transition: T, directory: Path) -> None:
        """Carry out a transition from beginning to end."""

    @abstractmethod
    def baseline(self, transition: T, before: Path, after: Path, run: Run) -> tuple[B, tuple[str, ...]]:
        """Look at both sides of a transition that nothing stopped; return them, and what is wrong with them."""

    @abstractmethod
    def judge(self, point: Point[T, B], run: Run, directory: Path) -> Judgement:
        """Judge what a stopped process left; the directory is used up."""

    def aim(self, point: Point[T, B], root: Path) -> tuple[str, Scope]:
        """strace's `inject=` expression for a point, and among which calls of the process below a root it counts."""
        return injection(point.call, INJECTIONS[point.kind]), EVERYTHING

    def prepare(self) -> None:
        """What the process does after `unstopped` or `work` was called, and before it is recorded or stopped."""

    def work(self, point: Point[T, B], directory: Path) -> Callable[[], None]:
        """What the process does that is stopped at a point."""
        return self.unstopped(point.recorded.transition, directory)

    def unstopped(self, transition: T, directory: Path) -> Callable[[], None]:
        """What the process does that is recorded; called in its parent, which may start others."""
        return lambda: self.perform(transition, directory)

    def stop_again(self, outcome: Outcome, tries: int) -> bool:
        """Whether a stop that missed its call is worth another try after so many."""
        return False

    def settle(self, outcome: Outcome) -> Outcome:
        """The outcome of a point after the last try."""
        return outcome

    def cuts(self, recorded: Recorded[T, B], root: Path) -> Iterator[tuple[int, Tree, bool]]:
        """What a power cut may leave: (place of the call, directory, whether this is after the last call)."""
        raise NotImplementedError(f"The sweep of {self.name} has no power cuts.")

    def judge_cut(self, point: Point[T, B], directory: Path, *, is_last: bool) -> Judgement:
        """Judge what a power cut left, like a killed process; the directory is used up."""
        return self.judge(point, Run("cut", "", (), ""), directory)

    def copy(self, directory: Path, root: Path) -> Path:
        """Copy a directory into a root of its own; where it does not exist, return only the path."""
        copy = root / self.inside
        copy.parent.mkdir(parents=True, exist_ok=True)
        if directory.exists():
            shutil.copytree(directory, copy, symlinks=True)
        return copy

    def perform_killed(self, work: Callable[[Path], None], directory: Path, root: Path, share: float) -> None:
        """Rehearse in a copy, then kill the real thing at the call that `share` tells: from 0, the first, to 1."""
        trace = root.parent / f"{root.name}.trace"
        rehearsal = root / "rehearsal"
        rehearsal.mkdir()
        copy = self.copy(directory, rehearsal)
        run = traced(lambda: work(copy), trace)
        calls = [call for call in run.calls if call.changes(rehearsal)]
        shutil.rmtree(rehearsal)
        call = calls[round(share * (len(calls) - 1))]
        run = traced(lambda: work(directory), trace, injection(call, "signal=KILL:when={k}"))
        if run.status != "killed":
            raise RuntimeError(f"What makes the wreck was to be killed at {call}, but {run.status}: {run.report}")

    def perform_before(self, saves: Sequence[Any], perform: Callable[[Any, Path], None], directory: Path) -> None:
        """Carry out what was before, of which some is killed: what has a `killed_at`."""
        root = directory.parents[len(Path(self.inside).parts) - 1]
        for save in saves:
            if save.killed_at is None:
                perform(save, directory)
            else:
                self.perform_killed(partial(perform, save), directory, root, save.killed_at)

    def record(self, transition: T, place: Path) -> Recorded[T, B]:
        """Build the directory, carry out the transition in a copy of it under strace, and look at both."""
        root = Path(tempfile.mkdtemp(prefix="template-", dir=place))
        template = self.build(transition, root)
        trial = Path(tempfile.mkdtemp(prefix="trial-", dir=place))
        copy = self.copy(template, trial)
        run = traced(self.unstopped(transition, copy), place / f"{trial.name}.trace", prepare=self.prepare)
        if run.status != "saved":
            raise RuntimeError(f"{transition.name}: unstopped, it {run.status}: {run.report}")
        if hidden := hidden_writes(run.calls, trial):
            raise RuntimeError(f"{transition.name}: writes that this harness can't stop at: {hidden[:3]}")
        baseline, problems = self.baseline(transition, template, copy, run)
        calls = tuple(call for call in run.calls if call.changes(trial))
        shutil.rmtree(trial)
        return Recorded(transition, template, baseline, calls, copy, problems)

    def points(self, recorded: Recorded[T, B], kinds: Sequence[str]) -> list[Point[T, B]]:
        """Every point of a recorded transition, for these kinds of `INJECTIONS`."""
        points = []
        for kind in kinds:
            names: set[str] = set()
            for ordinal, call in enumerate(recorded.calls):
                if _can_happen(kind, call, names):
                    points.append(Point(recorded, ordinal, kind))
                names.add(call.name)
        return points

    def stop(self, point: Point[T, B], place: Path) -> Outcome:
        """Work in a fresh copy, let it happen at the point, and judge what is left."""
        tries = 1
        outcome = self._stop(point, place)
        while outcome.category == "missed" and self.stop_again(outcome, tries):
            tries += 1
            outcome = self._stop(point, place)
        return self.settle(outcome)

    def _stop(self, point: Point[T, B], place: Path) -> Outcome:
        root = Path(tempfile.mkdtemp(prefix="point-", dir=place))
        trace = place / f"{root.name}.trace"
        try:
            directory = self.copy(point.recorded.template, root)
            inject, scope = self.aim(point, root)
            run = traced(self.work(point, directory), trace, inject, self.prepare, scope)
            if any(mark in run.raw for mark in STOPPED):
                judgement = self.judge(point, run, directory)
            else:
                judgement = Judgement("missed", [("missed", "the call was not reached")])
            made = [call.name for call in run.calls if call.changes(root)]
            calls = point.recorded.calls[: point.ordinal + 1]
            planned = [call.name for call in calls if scope.threads or not call.thread]
            is_drifted = made[: len(planned)] != planned and not scope.path
            return Outcome(point, judgement, run.status, run.report, is_drifted)
        finally:
            shutil.rmtree(root, ignore_errors=True)
            trace.unlink(missing_ok=True)

    def cut_power(self, recorded: Recorded[T, B], place: Path) -> list[Outcome]:
        """Judge every directory that a power cut during a transition may leave, each once, and those right after it."""
        root = Path(tempfile.mkdtemp(prefix="power-", dir=place))
        seen: set[tuple[bool, frozenset[tuple[str, bytes | None]]]] = set()
        outcomes = []
        try:
            for ordinal, tree, is_last in self.cuts(recorded, root):
                key = (is_last, frozenset(tree.items()))
                if key in seen:
                    continue
                seen.add(key)
                directory = root / "cut" / self.inside
                directory.mkdir(parents=True)
                write_files(tree, directory)
                point = Point(recorded, ordinal, POWER)
                outcomes.append(Outcome(point, self.judge_cut(point, directory, is_last=is_last), "cut"))
                shutil.rmtree(root / "cut")
            return outcomes
        finally:
            shutil.rmtree(root, ignore_errors=True)


def _can_happen(kind: str, call: Call, earlier: set[str]) -> bool:
    """Whether it can happen at a call; a call that a file system does not know is missing from its first use on."""
    if kind == "full":
        return call.name in TAKES_SPACE
    if kind == "unsupported":
        return call.name in HAS_FALLBACK and call.name not in earlier
    return True


def injection(call: Call, how: str) -> str:
    """strace's `inject=` expression for one call, where `how` is one of `INJECTIONS`."""
    return f"{call.name}:{how.format(k=call.k)}"


def files_below(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, with its bytes."""
    return {
        os.path.relpath(os.path.join(base, name), directory): Path(base, name).read_bytes()
        for base, _, names in os.walk(directory)
        for name in names
    }


def write_files(tree: Tree, directory: Path) -> Path:
    """Make files and directories below a directory, and return it."""
    for name, data in sorted(tree.items()):
        path = directory / name
        if data is None:
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    return directory


def chosen(everything: Sequence[T], patterns: Sequence[str] | None) -> list[T]:
    """Those that any pattern fits, or all of them; none when a pattern fits none."""
    patterns = patterns or ["*"]
    for pattern in patterns:
        if not any(fnmatchcase(one.name, pattern) for one in everything):
            return []
    return [one for one in everything if any(fnmatchcase(one.name, pattern) for pattern in patterns)]


S = TypeVar("S")


def sample(everything: Sequence[S], count: int | None, seed: int = 0) -> list[S]:
    """All things, or so many of them, always the same ones."""
    if count is None or count >= len(everything):
        return list(everything)
    places = sorted(random.Random(seed).sample(range(len(everything)), count))
    return [everything[place] for place in places]


def prepare_process() -> None:
    """Make this process fit to be forked: quiet, offline, and without compiling files, which shifts points."""
    sys.dont_write_bytecode = True
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1", TOKENIZERS_PARALLELISM="false")
    warnings.simplefilter("ignore")
    logging.getLogger("hfshard").addHandler(logging.NullHandler())  # readers may warn of a stopped save's remains
    gc.disable()


def memory() -> str | None:
    """In memory a flush costs nothing; what is left there is the same."""
    if not MEMORY.is_dir() or not os.access(MEMORY, os.W_OK):
        return None
    return str(MEMORY) if shutil.disk_usage(MEMORY).free >= MEMORY_BYTES else None


Work = Point[Any, Any] | Recorded[Any, Any]
"""One thing to do: a stop, or all power cuts of a transition."""


def _do(group: Sequence[Work], suite: Suite[T, B], place: Path) -> list[Outcome]:
    parts = [[suite.stop(one, place)] if isinstance(one, Point) else suite.cut_power(one, place) for one in group]
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
    choose: Callable[[Sequence[Point[T, B]]], list[Point[T, B]]] = list,
    jobs: int = 1,
    where: Path | None = None,
    progress: Callable[[int, int, Sequence[Outcome]], None] = lambda done, count, outcomes: None,
) -> tuple[list[Recorded[T, B]], list[Outcome]]:
    """Record every transition, then stop it at every point.

    Args:
        suite: What is swept.
        transitions: Of its table.
        kinds: Of `suite.kinds`.
        choose: Chooses some of all points (power cuts are not among them).
        jobs: Processes side by side.
        where: An existing directory to work in; None: in memory where there is /dev/shm, else the temporary one.
        progress: Called with the number of things done, of all, and what came of the last ones.
    """
    place = Path(tempfile.mkdtemp(prefix="crash-sweep-", dir=where or memory())).resolve()
    try:
        suite.warm(place)
        recorded = list(parallel(partial(suite.record, place=place), transitions, jobs))
        order = {one.name: number for number, one in enumerate(transitions)}
        recorded.sort(key=lambda one: order[one.transition.name])
        injected = [kind for kind in kinds if kind != POWER]
        points = choose([point for one in recorded for point in suite.points(one, injected)])
        work: list[Work] = [*points, *(recorded if POWER in kinds else [])]
        outcomes: list[Outcome] = []
        groups = _grouped(work, jobs)
        for done, some in enumerate(parallel(partial(_do, suite=suite, place=place), groups, jobs), 1):
            outcomes += some
            progress(done, len(groups), some)
        return recorded, outcomes
    finally:
        shutil.rmtree(place, ignore_errors=True)


def table(suite: Suite[T, B], recorded: Sequence[Recorded[T, B]], outcomes: Sequence[Outcome]) -> str:
    """Counts by transition and by kind, and the totals."""
    words = " ".join(f"{word:>{WIDTH}}" for word in ("calls", "points", *suite.fine, *suite.failures))
    lines = [f"{'':{NAME_WIDTH}}{words}"]
    for one in recorded:
        mine = [outcome for outcome in outcomes if outcome.point.recorded.transition.name == one.transition.name]
        lines.append(_row(suite, one.transition.name, len(one.calls), mine))
    lines.append("")
    for kind in dict.fromkeys(outcome.point.kind for outcome in outcomes):
        lines.append(_row(suite, f"all {kind}", "", [outcome for outcome in outcomes if outcome.point.kind == kind]))
    lines.append(_row(suite, "all", sum(len(one.calls) for one in recorded), outcomes))
    return "\n".join(lines)


def _row(suite: Suite[T, B], name: str, calls: int | str, outcomes: Sequence[Outcome]) -> str:
    numbers = [calls, len(outcomes), *suite.counts(outcomes)]
    return f"{name:{NAME_WIDTH}}" + " ".join(f"{number:>{WIDTH}}" for number in numbers)


def notes_of(outcomes: Sequence[Outcome]) -> Counter[str]:
    """Remarks that are not failures, with their counts."""
    pairs = ((one.point.recorded.transition.name, note) for one in outcomes for note in one.judgement.notes)
    return Counter(f"{name}: {note}" for name, note in pairs)


def write_json(path: Path, recorded: Sequence[Recorded[T, B]], outcomes: Sequence[Outcome]) -> None:
    """Everything, for other programs."""
    whole = {one.transition.name: list(one.problems) for one in recorded}
    path.write_text(json.dumps({"transitions": whole, "points": [one.to_json() for one in outcomes]}, indent=1))
