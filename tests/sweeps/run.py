"""The sweep of training checkpoints: a new process restores the old or the new state to the bit, and can save."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hfshard.shards.write_shards import WRITERS_VARIABLE
from tests.sweeps import run_states
from tests.sweeps.child import Aside, Run
from tests.sweeps.directory_models import prepare_libraries
from tests.sweeps.engine import Judgement, Outcome, Point, Recorded, TracedSuite, Tree, files_below
from tests.sweeps.power import Effect, RunDisk, cuts, effect_below, files_in
from tests.sweeps.run_states import (
    Save,
    contents,
    generation_of,
    litter,
    name_of,
    perform,
    perform_and_go_on,
    steps_in,
    successor,
)


@dataclass(frozen=True, slots=True)
class Transition:
    """A run's history, and the save that is stopped.

    Attributes:
        name: As `--transition` takes it.
        before: The saves before, the last one last.
        new: The save that is stopped.
        is_made: The run's directory is there before its first save.
    """

    name: str
    before: tuple[Save, ...]
    new: Save
    is_made: bool = False

    @property
    def next(self) -> Save:
        """The save after the stopped one."""
        return successor(self.new, self.before)

    @property
    def whole(self) -> tuple[Save, ...]:
        """Saves that were not killed, before."""
        return tuple(save for save in self.before if save.killed_at is None)


ONE, TWO, THREE = Save(1, 1), Save(2, 2), Save(3, 3)


def _plain() -> Iterator[Transition]:
    yield Transition("first", (), ONE)
    yield Transition("first-into-made", (), ONE, is_made=True)
    yield Transition("second", (ONE,), TWO)
    yield Transition("rotated", (ONE,), replace(TWO, keep=1))
    yield Transition("rotated-two", (ONE, TWO), replace(THREE, keep=1))
    yield Transition("replaced", (ONE,), Save(1, 2))
    yield Transition("replaced-of-two", (ONE, TWO), Save(1, 3))
    yield Transition("replaced-and-rotated", (ONE, TWO), Save(2, 3, keep=1))
    yield Transition("branched", (Save(100, 1), Save(200, 2)), Save(150, 3, keep=2))
    best = replace(ONE, metric=0.1)
    yield Transition("kept-best", (best, replace(TWO, metric=0.5)), replace(THREE, keep=1, metric=0.3))
    yield Transition("replaced-best", (best, replace(TWO, metric=0.5)), Save(1, 3, keep=1, metric=0.9))


def _linked() -> Iterator[Transition]:
    one, two = (replace(save, layout="sharded", frozen=True) for save in (ONE, TWO))
    yield Transition("sharded", (replace(ONE, layout="sharded"),), replace(TWO, layout="sharded"))
    yield Transition("linked", (one,), two)
    yield Transition("linked-rotated", (one,), replace(two, keep=1))
    yield Transition("linked-replaced", (one,), replace(two, step=1))
    yield Transition("linked-single", (replace(ONE, frozen=True),), replace(TWO, frozen=True, keep=1))


def _in_the_background() -> Iterator[Transition]:
    for transition in (*_plain(), *_linked()):
        if transition.name in ("first", "second", "rotated", "replaced", "linked-rotated"):
            new = replace(transition.new, blocking=False)
            yield replace(transition, name=f"async-{transition.name}", new=new)


def _after_wrecks() -> Iterator[Transition]:
    for percent in (10, 40, 70, 90, 100):
        killed = replace(TWO, killed_at=percent / 100)
        yield Transition(f"wreck-{percent}", (ONE, killed), THREE)
    for percent in (30, 90):
        killed = replace(ONE, killed_at=percent / 100)
        yield Transition(f"wreck-first-{percent}", (killed,), TWO)
    for percent in (80, 85, 90, 95, 100):  # about the two renames
        killed = Save(1, 2, killed_at=percent / 100)
        yield Transition(f"wreck-replaced-{percent}", (ONE, killed), replace(THREE, keep=1))
        yield Transition(f"wreck-replaced-again-{percent}", (ONE, killed), Save(1, 3))
    for percent in (85, 95):
        killed = replace(TWO, keep=1, killed_at=percent / 100)
        yield Transition(f"wreck-rotated-{percent}", (ONE, killed), replace(THREE, keep=1))


def all_transitions() -> tuple[Transition, ...]:
    """Every transition, in the order of the table."""
    makers = (_plain, _linked, _in_the_background, _after_wrecks)
    return tuple(transition for make in makers for transition in make())


FAILURES = ("wrong", "lost", "litter", "hung", "silent", "stuck", "missed")
"""What fails the sweep: another state than the old or the new one; a checkpoint that is not there any more; files left
by a save that raised, or after the next save; a save that does not end, or swallows Ctrl-C; no next save."""

FINE = ("old", "new")
"""What does not."""

MAY_BE_EITHER, MUST_BE_NEW = "both", "new"


@dataclass(frozen=True, slots=True)
class RunContents:
    """What a run's directory holds.

    Attributes:
        newest: What `restore_latest` restores, in `generation_of`'s words.
        steps: Step -> what `restore` restores.
        litter: What is not a checkpoint.
    """

    newest: str
    steps: dict[int, str]
    litter: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a transition looks like when nothing is stopped.

    Attributes:
        before: What the directory holds before the save.
        after: The same after it.
        finished: The files that lie in it then.
    """

    before: RunContents
    after: RunContents
    finished: dict[str, bytes]


TRIES = 8
"""Links are made by several threads, and which of them makes which is another one each time."""


class RunsSuite(TracedSuite[Transition, Baseline]):
    """Saves of training states by `CheckpointManager`."""

    name = "runs"
    kinds = ("kill", "int", "enospc", "eio", "full", "power")
    fine = FINE
    failures = FAILURES
    inside = "nested/run"

    def __init__(self, target: str = "hfshard") -> None:
        super().__init__(target)
        self._aside = Aside()

    def transitions(self) -> tuple[Transition, ...]:
        """Every transition."""
        return all_transitions()

    def warm(self, place: Path) -> None:
        """Train every generation."""
        super().warm(place)
        prepare_libraries()
        run_states.warm()

    def build(self, transition: Transition, root: Path) -> Path:
        """Save all that was there before."""
        run = root / self.inside
        run.parent.mkdir()
        if transition.is_made:
            run.mkdir()
        self.perform_before(transition.before, perform, run)
        return run

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
            return Outcome(outcome.point, Judgement("new"), status=outcome.status, is_drifted=True)
        return outcome

    def judge(self, point: Point[Transition, Baseline], run: Run, directory: Path) -> Judgement:
        """Restore every step, then save again."""
        if run.status == "hung":
            return Judgement("hung")
        if run.status == "saved":
            found = self._examine(point.recorded, directory, MUST_BE_NEW)
            return replace(found, category="silent") if point.kind == "int" and found.category in FINE else found
        if run.status == "killed" or not _goes_on(point):
            left = litter(directory)
            return with_litter(point, self._examine(point.recorded, directory), left, run)
        return self._judge_raised(point, run, directory)

    def _judge_raised(self, point: Point[Transition, Baseline], run: Run, directory: Path) -> Judgement:
        """A save raised, and the same manager went on to the next one."""
        transition, baseline = point.recorded.transition, point.recorded.baseline
        raised = self._raised(directory)
        found = self._aside.call(after_next_save, transition, directory)
        if not raised.exists() and found.newest == baseline.after.newest:  # it came when all was done: in close()
            return self._examine(point.recorded, directory, MUST_BE_NEW)
        if found.newest != name_of(transition.next):
            told = run.report.split(" <- ")[0]
            return Judgement("stuck", [("stuck", f"the next save of the same manager: {found}; {told}")])
        if found.litter:
            return Judgement("litter", [("litter", f"after the next save of the same manager: {found.litter}")])
        if not raised.exists():  # the run's directory was not made, or the next save failed
            return Judgement("old")
        left = litter(raised)
        return with_litter(point, self._examine(point.recorded, raised), left, run)

    def cuts(self, recorded: Recorded[Transition, Baseline], root: Path) -> Iterator[tuple[int, Tree, bool]]:
        """What a power cut may leave after each call of a save; after the last one, the save is done."""
        effects = [effect_below(call, recorded.recorded_in) for call in recorded.calls]
        return cuts(RunDisk(recorded.template, _final_contents(recorded, effects)), effects)

    def judge_cut(self, point: Point[Transition, Baseline], directory: Path, *, is_last: bool) -> Judgement:
        """Judge it like a killed save; after the last call only the new state will do."""
        return self._examine(point.recorded, directory, MUST_BE_NEW if is_last else MAY_BE_EITHER)

    def _examine(self, recorded: Recorded[Transition, Baseline], run: Path, allowed: str = MAY_BE_EITHER) -> Judgement:
        """Examine aside, once for the same files."""
        key = (recorded.transition.name, allowed, contents(run))
        return self._aside.remember(key, examine, recorded.transition, recorded.baseline, run, allowed)


def _final_contents(recorded: Recorded[Transition, Baseline], effects: Sequence[Effect | None]) -> list[bytes]:
    """The bytes of the files that the save makes, which lie under their last names; none where they have none."""
    disk = RunDisk(recorded.template)
    for effect in effects:
        if effect is not None:
            disk.take(effect, {})
    last_names = {id(file): path for path, file in files_in(disk.root)}
    return [recorded.baseline.finished.get(last_names.get(id(file), ""), b"") for file in disk.made]


def _goes_on(point: Point[Transition, Baseline]) -> bool:
    """Whether the manager saves again in the process that is stopped.

    A thread's calls are counted from one, so that the next save of a manager that saves in one would be hit again.
    """
    is_one_thread = os.environ[WRITERS_VARIABLE] == "1" and point.call.name != "link"
    return is_one_thread and point.recorded.transition.new.blocking and point.kind in ("enospc", "eio", "int")


_known: dict[tuple[str, frozenset[tuple[str, bytes]]], RunContents] = {}
"""(transition, files) -> what is restored after a next save that succeeded: it leaves one of a few directories."""


def after_next_save(transition: Transition, run: Path) -> RunContents:
    """What a directory holds after the save that follows a stopped one.

    The same files are restored once, unless that fails with an error, which names the directory.
    """
    key = (transition.name, contents(run))
    if key in _known:
        return _known[key]
    found = contents_of(run, (*transition.before, transition.new, transition.next))
    if not any(":" in words for words in (found.newest, *found.steps.values())):
        _known[key] = found
    return found


def contents_of(run: Path, saves: tuple[Save, ...]) -> RunContents:
    """Look, in this process."""
    steps = {step: generation_of(run, step, saves) for step in steps_in(run)}
    return RunContents(generation_of(run, None, saves), steps, tuple(litter(run)))


def examine(transition: Transition, baseline: Baseline, run: Path, allowed: str) -> Judgement:
    """Judge a directory that a stop left; it is used up by the next save.

    Args:
        transition: Which.
        baseline: What it looks like when nothing is stopped.
        run: The directory.
        allowed: `MAY_BE_EITHER`: the old or the new state may be the newest; `MUST_BE_NEW`: only the new.
    """
    seen = contents_of(run, (*transition.before, transition.new))
    found = Judgement()
    for words in _wrong(baseline, seen, allowed):
        found.add("wrong", words)
    kept = baseline.before.steps.keys() & baseline.after.steps.keys()
    if gone := sorted(kept - seen.steps.keys()):
        found.add("lost", f"the checkpoints of {gone} are not there")
    try:
        perform(transition.next, run)
    except Exception as error:  # the sentence is the finding
        found.add("stuck", f"the next save: {type(error).__name__}: {error}")
        return replace(found, category="stuck")
    then = after_next_save(transition, run)
    if then.newest != name_of(transition.next):
        found.add("wrong", f"after the next save the newest is {then.newest!r}")
    for step, words in then.steps.items():
        if ":" in words:
            found.add("wrong", f"after the next save, step {step}: {words}")
    if then.litter:
        found.add("litter", f"after the next save: {then.litter}")
    return found.settle(FAILURES, "new" if seen.newest == baseline.after.newest else "old")


def _wrong(baseline: Baseline, found: RunContents, allowed: str) -> list[str]:
    """What is neither of before nor of after."""
    before, after = baseline.before, baseline.after
    wrong = []
    if found.newest != after.newest and (allowed == MUST_BE_NEW or found.newest != before.newest):
        wrong.append(f"the newest is {found.newest!r}, and may be {before.newest!r} or {after.newest!r} ({allowed})")
    for step, verdict in found.steps.items():
        if verdict not in (before.steps.get(step), after.steps.get(step)):
            wrong.append(f"step {step} is {verdict!r}, and was {before.steps.get(step)!r}")
    return wrong


def with_litter(point: Point[Transition, Baseline], found: Judgement, left: list[str], run: Run) -> Judgement:
    """A save that raised leaves nothing of its own behind; one that was killed may, for the next one to clean up.

    Where the last flush failed, the checkpoint that was replaced is kept: the new one may not be on the disk. Ctrl-C in
    the middle of tidying up leaves the rest to the next save, too.
    """
    mine = {name for name in left if not name.startswith(".replaced-")} - set(point.recorded.baseline.before.litter)
    if point.kind == "int":
        mine = set()
    if run.status == "raised" and mine and found.category in FINE:
        return Judgement("litter", [*found.problems, ("litter", f"left by a save that raised: {sorted(mine)}")])
    return found
