"""The sweep of training checkpoints: a new process restores the old or the new state to the bit, and can save."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from hfshard.shards.write_shards import WRITERS_VARIABLE
from tests.crash.forks import Aside
from tests.crash.points import Outcome, Point, Recorded
from tests.crash.runs import content
from tests.crash.runs.content import contents, litter, name_of, perform, perform_and_go_on
from tests.crash.runs.judge import (
    FAILURES,
    FINE,
    MAY_BE_EITHER,
    MUST_BE_NEW,
    Baseline,
    Finding,
    after_next_save,
    contents_of,
    examine,
    with_litter,
)
from tests.crash.runs.power import cuts
from tests.crash.runs.transitions import Transition, all_transitions
from tests.crash.saves.suite import prepare_process
from tests.crash.suite import Suite, Tree, files_below
from tests.crash.tracer import Run

TRIES = 8
"""Links are made by several threads, and which of them makes which is another one each time."""


class RunsSuite(Suite[Transition, Baseline]):
    """Saves of training states by `CheckpointManager`."""

    name = "runs"
    kinds = ("kill", "int", "enospc", "eio", "full", "power")
    fine = FINE
    failures = FAILURES
    inside = "nested/run"

    def __init__(self, target: str = "hfshard") -> None:
        super().__init__(target)
        self._examined: dict[tuple[str, str, frozenset[tuple[str, bytes]]], Finding] = {}
        self._aside = Aside()

    def transitions(self) -> tuple[Transition, ...]:
        """Every transition."""
        return all_transitions()

    def warm(self, place: Path) -> None:
        """Train every generation."""
        prepare_process()
        content.warm()

    def build(self, transition: Transition, root: Path) -> Path:
        """Save all that was there before."""
        run = root / self.inside
        run.parent.mkdir()
        if transition.is_made:
            run.mkdir()
        for save in transition.before:
            if save.killed_at is None:
                perform(save, run)
            else:
                self._perform_killed(save, run, root, save.killed_at)
        return run

    def _perform_killed(self, save: content.Save, run: Path, root: Path, share: float) -> None:
        self.perform_killed(lambda path: perform(save, path), run, root, share)

    def perform(self, transition: Transition, directory: Path) -> None:
        """The new save by a new manager."""
        perform(transition.new, directory)

    def baseline(self, transition: Transition, before: Path, after: Path, run: Run) -> tuple[Baseline, tuple[str, ...]]:
        """What is restored."""
        saves = (*transition.before, transition.new)
        old = self._aside.call(contents_of, before, saves)
        new = self._aside.call(contents_of, after, saves)
        problems = []
        if transition.whole and old.newest not in [name_of(save) for save in transition.before]:
            problems.append(f"before the save: {old}")
        if new.newest != name_of(transition.new) or new.litter:
            problems.append(f"after the whole save: {new}")
        return Baseline(old, new, files_below(after)), tuple(problems)

    def work(self, point: Point[Transition, Baseline], directory: Path) -> Callable[[], None]:
        """Save; where the manager can go on after the error, let it save the next step too."""
        transition = point.recorded.transition
        if not _goes_on(point):
            return lambda: perform(transition.new, directory)
        return lambda: perform_and_go_on(transition.new, transition.next, directory, self._raised(directory))

    def _raised(self, directory: Path) -> Path:
        """Where a copy lies of what a save that raised has left."""
        return directory.parents[1] / "raised"

    def stop_again(self, outcome: Outcome, tries: int) -> bool:
        """Threads may have shared the calls otherwise."""
        return tries < TRIES

    def settle(self, outcome: Outcome) -> Outcome:
        """Where no thread made so many of these calls, nothing was stopped, and the save is simply done."""
        is_of_several = outcome.point.call.name == "link" or os.environ[WRITERS_VARIABLE] != "1"
        if outcome.category == "missed" and is_of_several and outcome.status == "saved":
            return Outcome(outcome.point, "new", status=outcome.status, is_drifted=True)
        return outcome

    def judge(self, point: Point[Transition, Baseline], run: Run, directory: Path) -> Outcome:
        """Restore every step, then save again."""
        if run.status == "hung":
            return Outcome(point, "hung")
        if run.status == "saved":
            category, problems = self._examine(point.recorded, directory, MUST_BE_NEW)
            if point.kind == "int" and category in FINE:
                category = "silent"
            return Outcome(point, category, problems)
        if run.status == "killed" or not _goes_on(point):
            left = litter(directory)
            return with_litter(point, self._examine(point.recorded, directory), left, run)
        return self._judge_raised(point, run, directory)

    def _judge_raised(self, point: Point[Transition, Baseline], run: Run, directory: Path) -> Outcome:
        """A save raised, and the same manager went on to the next one."""
        transition, baseline = point.recorded.transition, point.recorded.baseline
        raised = self._raised(directory)
        found = self._aside.call(after_next_save, transition, directory)
        if not raised.exists() and found.newest == baseline.after.newest:  # it came when all was done: in close()
            return Outcome(point, *self._examine(point.recorded, directory, MUST_BE_NEW))
        if found.newest != name_of(transition.next):
            told = run.report.split(" <- ")[0]
            return Outcome(point, "stuck", [f"the next save of the same manager: {found}; {told}"])
        if found.litter:
            return Outcome(point, "litter", [f"after the next save of the same manager: {found.litter}"])
        if not raised.exists():  # the run's directory was not made, or the next save failed
            return Outcome(point, "old")
        left = litter(raised)
        return with_litter(point, self._examine(point.recorded, raised), left, run)

    def cuts(self, recorded: Recorded[Transition, Baseline], root: Path) -> Iterator[tuple[int, Tree, bool]]:
        """What a power cut may leave after each call."""
        return cuts(recorded)

    def judge_cut(self, point: Point[Transition, Baseline], directory: Path, *, is_last: bool) -> Outcome:
        """Judge it like a killed save; after the last call only the new state will do."""
        finding = self._examine(point.recorded, directory, MUST_BE_NEW if is_last else MAY_BE_EITHER)
        return Outcome(point, *finding, status="cut")

    def _examine(self, recorded: Recorded[Transition, Baseline], run: Path, allowed: str = MAY_BE_EITHER) -> Finding:
        """Examine aside, or remember a directory with the same files: many stops leave those."""
        key = (recorded.transition.name, allowed, contents(run))
        if key not in self._examined:
            self._examined[key] = self._aside.call(examine, recorded.transition, recorded.baseline, run, allowed)
        return self._examined[key]


def _goes_on(point: Point[Transition, Baseline]) -> bool:
    """Whether the manager saves again in the process that is stopped.

    A thread's calls are counted from one, so that the next save of a manager that saves in one would be hit again.
    """
    is_one_thread = os.environ[WRITERS_VARIABLE] == "1" and point.call.name != "link"
    return is_one_thread and point.recorded.transition.new.blocking and point.kind in ("enospc", "eio", "int")
