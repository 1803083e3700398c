"""Stop one save of a training state at a system call, and ask a new process what the run's directory then holds."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hfshard.storage.weights.safetensors_writer import WRITERS_VARIABLE
from tests.crash.points import INJECTIONS, TAKES_SPACE
from tests.crash.runs.content import (
    Save,
    contents,
    generation_of,
    litter,
    name_of,
    perform,
    perform_and_go_on,
    steps_in,
)
from tests.crash.runs.transitions import Transition
from tests.crash.saves.judge import in_fork
from tests.crash.tracer import Call, Run, hidden_writes, traced

FAILURES = ("wrong", "lost", "litter", "hung", "silent", "stuck", "missed")
"""What fails the sweep: another state than the old or the new one; a checkpoint that is not there any more; files left
by a save that raised, or after the next save; a save that does not end, or swallows Ctrl-C; no next save."""

TRIES = 8
"""Links are made by several threads, and which of them makes which is another one each time."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What a run's directory holds.

    Attributes:
        newest: What `restore_latest` restores, in `generation_of`'s words.
        steps: Step -> what `restore` restores.
        litter: What is no checkpoint.
    """

    newest: str
    steps: dict[int, str]
    litter: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A transition, recorded.

    Attributes:
        transition: Which.
        template: The run's directory before, in a root of its own.
        before: What that holds.
        after: What the whole save makes of it.
        calls: The file-changing calls of the whole save, in order.
        recorded_in: The run's directory of that save, as its calls name it.
        finished: What lies in it then.
    """

    transition: Transition
    template: Path
    before: Holding
    after: Holding
    calls: tuple[Call, ...]
    recorded_in: Path
    finished: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class Point:
    """One way to stop one save."""

    prepared: Prepared
    ordinal: int
    kind: str

    @property
    def call(self) -> Call:
        """The system call at which it happens."""
        return self.prepared.calls[self.ordinal]


@dataclass(slots=True)
class Outcome:
    """What came of a point.

    Attributes:
        point: Which.
        category: "old", "new", or one of `FAILURES`.
        problems: Sentences.
        status: How the save ended.
        report: Its words.
        is_drifted: The calls came in another order than when they were recorded.
    """

    point: Point
    category: str
    problems: list[str] = field(default_factory=list)
    status: str = ""
    report: str = ""
    is_drifted: bool = False


def holding(run: Path, saves: tuple[Save, ...]) -> Holding:
    """Look, in this process."""
    steps = {step: generation_of(run, step, saves) for step in steps_in(run)}
    return Holding(generation_of(run, None, saves), steps, tuple(litter(run)))


def prepare(transition: Transition, place: Path) -> Prepared:
    """Make the directory, and save into a copy of it under strace."""
    root = Path(tempfile.mkdtemp(prefix="template-", dir=place))
    run = build(transition, root)
    saves = (*transition.before, transition.new)
    before = in_fork(lambda: holding(run, saves))
    trial = Path(tempfile.mkdtemp(prefix="trial-", dir=place))
    copy = copy_of(run, trial)
    done = traced(lambda: perform(transition.new, copy), place / f"{trial.name}.trace")
    if done.status != "saved":
        raise RuntimeError(f"{transition.name}: the unstopped save {done.status}: {done.report}")
    if hidden := hidden_writes(done.calls, trial):
        raise RuntimeError(f"{transition.name}: writes that this harness can't stop at: {hidden[:3]}")
    after = in_fork(lambda: holding(copy, saves))
    if transition.whole and before.newest not in [name_of(save) for save in transition.before]:
        raise RuntimeError(f"{transition.name}: before the save: {before}")
    if after.newest != name_of(transition.new) or after.litter:
        raise RuntimeError(f"{transition.name}: after the whole save: {after}")
    calls = tuple(call for call in done.calls if call.changes(trial))
    finished = {
        os.path.relpath(os.path.join(base, name), copy): Path(base, name).read_bytes()
        for base, _, names in os.walk(copy)
        for name in names
    }
    shutil.rmtree(trial)
    return Prepared(transition, run, before, after, calls, copy, finished)


def build(transition: Transition, root: Path) -> Path:
    """Make the directory that a transition starts from, below `root`."""
    run = root / "nested" / "run"
    run.parent.mkdir()
    if transition.is_made:
        run.mkdir()
    for number, save in enumerate(transition.before):
        if save.killed_at is None:
            perform(save, run)
            continue
        rehearsal = root / f"rehearsal-{number}"
        rehearsal.mkdir()
        copy, trace = copy_of(run, rehearsal), root.parent / f"{root.name}.trace"
        calls = [call for call in _traced(save, copy, trace).calls if call.changes(rehearsal)]
        shutil.rmtree(rehearsal)
        call = calls[round(save.killed_at * (len(calls) - 1))]
        killed = _traced(save, run, trace, f"{call.name}:signal=KILL:when={call.k}")
        if killed.status != "killed":
            raise RuntimeError(f"The save that makes the wreck was to be killed at {call}: {killed}")
    return run


def _traced(save: Save, run: Path, trace: Path, inject: str | None = None) -> Run:
    return traced(lambda: perform(save, run), trace, inject)


def copy_of(run: Path, root: Path) -> Path:
    """A copy of a run's directory in a root of its own; only a path where there is none."""
    copy = root / "nested" / "run"
    copy.parent.mkdir()
    if run.exists():
        shutil.copytree(run, copy, symlinks=True)
    return copy


def points_of(prepared: Prepared, kinds: Sequence[str]) -> list[Point]:
    """Every point of a recorded transition."""
    return [
        Point(prepared, ordinal, kind)
        for kind in kinds
        for ordinal, call in enumerate(prepared.calls)
        if kind != "full" or call.name in TAKES_SPACE
    ]


_SEEN: dict[tuple[str, str, frozenset[tuple[str, bytes]]], tuple[str, list[str]]] = {}
"""What this process has examined: many stops leave the very same files."""


def examined(prepared: Prepared, run: Path, allowed: str = "both") -> tuple[str, list[str]]:
    """The category and the problems of a directory that a stop left; it is used up by the next save.

    Args:
        prepared: The transition.
        run: The directory.
        allowed: "both": the old or the new state may be the newest; "new": only the new.
    """
    key = (prepared.transition.name, allowed, contents(run))
    if key not in _SEEN:
        _SEEN[key] = in_fork(lambda: _examine(prepared, run, allowed))
    return _SEEN[key]


def _examine(prepared: Prepared, run: Path, allowed: str) -> tuple[str, list[str]]:
    transition, before, after = prepared.transition, prepared.before, prepared.after
    saves = (*transition.before, transition.new)
    found = holding(run, saves)
    wrong, lost, left = [], [], []
    is_new = found.newest == after.newest
    if not is_new and (allowed == "new" or found.newest != before.newest):
        wrong.append(f"the newest is {found.newest!r}, and may be {before.newest!r} or {after.newest!r} ({allowed})")
    for step, verdict in found.steps.items():
        if verdict not in (before.steps.get(step), after.steps.get(step)):
            wrong.append(f"step {step} is {verdict!r}, and was {before.steps.get(step)!r}")
    kept = before.steps.keys() & after.steps.keys()
    if gone := sorted(kept - found.steps.keys()):
        lost.append(f"the checkpoints of {gone} are not there")
    try:
        perform(transition.next, run)
    except Exception as error:  # the sentence is the finding
        return "stuck", [*wrong, *lost, f"the next save: {type(error).__name__}: {error}"]
    then = holding(run, (*saves, transition.next))
    if then.newest != name_of(transition.next):
        wrong.append(f"after the next save the newest is {then.newest!r}")
    wrong += [f"after the next save, step {step}: {words}" for step, words in then.steps.items() if ":" in words]
    if then.litter:
        left.append(f"after the next save: {then.litter}")
    category = "wrong" if wrong else "lost" if lost else "litter" if left else "new" if is_new else "old"
    return category, [*wrong, *lost, *left]


def stop(point: Point, place: Path) -> Outcome:
    """Save into a fresh copy, let it happen at the point, and judge what is left."""
    for _ in range(TRIES):
        outcome = _stop(point, place)
        if outcome.category != "missed":
            return outcome
    is_of_several = point.call.name == "link" or os.environ[WRITERS_VARIABLE] != "1"
    if is_of_several and outcome.status == "saved":  # no thread made so many of these calls, and nothing was stopped
        return Outcome(point, "new", status=outcome.status, is_drifted=True)
    return outcome


def _stop(point: Point, place: Path) -> Outcome:
    root = Path(tempfile.mkdtemp(prefix="point-", dir=place))
    trace = place / f"{root.name}.trace"
    transition = point.prepared.transition
    try:
        run, raised = copy_of(point.prepared.template, root), root / "raised"
        inject = f"{point.call.name}:{INJECTIONS[point.kind].format(k=point.call.k)}"
        # A thread's calls are counted anew, so that the next save of a manager that saves in one would be hit again.
        in_one_thread = transition.new.blocking and point.call.name != "link" and os.environ[WRITERS_VARIABLE] == "1"
        goes_on = in_one_thread and point.kind in ("enospc", "eio", "int")

        def work() -> None:
            if goes_on:
                perform_and_go_on(transition.new, transition.next, run, raised)
            else:
                perform(transition.new, run)

        done = traced(work, trace, inject)
        if not any(mark in done.raw for mark in ("killed by SIGKILL", "--- SIGINT", "(INJECTED)")):
            return Outcome(point, "missed", [], done.status, done.report)
        outcome = _judged(point, done, run, raised, goes_on=goes_on)
        made = [call.name for call in done.calls if call.changes(root)]
        planned = [call.name for call in point.prepared.calls[: point.ordinal + 1]]
        outcome.status, outcome.report = done.status, done.report
        outcome.is_drifted = made[: len(planned)] != planned
        return outcome
    finally:
        shutil.rmtree(root, ignore_errors=True)
        trace.unlink(missing_ok=True)


def _judged(point: Point, done: Run, run: Path, raised: Path, *, goes_on: bool) -> Outcome:
    prepared = point.prepared
    if done.status == "hung":
        return Outcome(point, "hung")
    if done.status == "saved":
        category, problems = examined(prepared, run, "new")
        if point.kind == "int" and category in ("old", "new"):
            category = "silent"
        return Outcome(point, category, problems)
    if done.status == "killed" or not goes_on:
        old = litter(run)
        category, problems = examined(prepared, run)
        return _with_litter(Outcome(point, category, problems), old, prepared, done)
    told = done.report.split(" <- ")[0]
    found = in_fork(
        lambda: holding(run, (*prepared.transition.before, prepared.transition.new, prepared.transition.next))
    )
    if not raised.exists() and found.newest == prepared.after.newest:  # it came when all was done: in close()
        return Outcome(point, *examined(prepared, run, "new"))
    if found.newest != name_of(prepared.transition.next):
        return Outcome(point, "stuck", [f"the next save of the same manager: {found}; {told}"])
    if found.litter:
        return Outcome(point, "litter", [f"after the next save of the same manager: {found.litter}"])
    if not raised.exists():  # the run's directory was not made, or the next save failed
        return Outcome(point, "old")
    old = litter(raised)
    category, problems = examined(prepared, raised)
    return _with_litter(Outcome(point, category, problems), old, prepared, done)


def _with_litter(outcome: Outcome, left: list[str], prepared: Prepared, done: Run) -> Outcome:
    """A save that raised leaves nothing of its own behind; one that was killed may, for the next one to sweep.

    Where the last flush failed, the checkpoint that was replaced is kept: the new one may not be on the disk. Ctrl-C in
    the middle of tidying up leaves the rest to the next save, too.
    """
    mine = {name for name in left if not name.startswith(".replaced-")} - set(prepared.before.litter)
    if outcome.point.kind == "int":
        mine = set()
    if done.status == "raised" and mine and outcome.category in ("old", "new"):
        outcome.category = "litter"
        outcome.problems.append(f"left by a save that raised: {sorted(mine)}")
    return outcome
