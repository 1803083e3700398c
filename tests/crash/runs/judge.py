"""The verdict on one stopped save of a training state: what is restored then, and whether the next save succeeds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.crash.points import Outcome, Point
from tests.crash.runs.content import Save, contents, generation_of, litter, name_of, perform, steps_in
from tests.crash.runs.transitions import Transition
from tests.crash.tracer import Run

FAILURES = ("wrong", "lost", "litter", "hung", "silent", "stuck", "missed")
"""What fails the sweep: another state than the old or the new one; a checkpoint that is not there any more; files left
by a save that raised, or after the next save; a save that does not end, or swallows Ctrl-C; no next save."""

FINE = ("old", "new")
"""What does not."""

MAY_BE_EITHER, MUST_BE_NEW = "both", "new"

Finding = tuple[str, list[str]]
"""Category and problems."""


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


def examine(transition: Transition, baseline: Baseline, run: Path, allowed: str) -> Finding:
    """Judge a directory that a stop left; it is used up by the next save.

    Args:
        transition: Which.
        baseline: What it looks like when nothing is stopped.
        run: The directory.
        allowed: `MAY_BE_EITHER`: the old or the new state may be the newest; `MUST_BE_NEW`: only the new.
    """
    found = contents_of(run, (*transition.before, transition.new))
    is_new = found.newest == baseline.after.newest
    wrong = _wrong(baseline, found, allowed)
    lost = []
    kept = baseline.before.steps.keys() & baseline.after.steps.keys()
    if gone := sorted(kept - found.steps.keys()):
        lost.append(f"the checkpoints of {gone} are not there")
    try:
        perform(transition.next, run)
    except Exception as error:  # the sentence is the finding
        return "stuck", [*wrong, *lost, f"the next save: {type(error).__name__}: {error}"]
    then = after_next_save(transition, run)
    if then.newest != name_of(transition.next):
        wrong.append(f"after the next save the newest is {then.newest!r}")
    wrong += [f"after the next save, step {step}: {words}" for step, words in then.steps.items() if ":" in words]
    left = [f"after the next save: {then.litter}"] if then.litter else []
    category = "wrong" if wrong else "lost" if lost else "litter" if left else "new" if is_new else "old"
    return category, [*wrong, *lost, *left]


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


def with_litter(point: Point[Transition, Baseline], finding: Finding, left: list[str], run: Run) -> Outcome:
    """A save that raised leaves nothing of its own behind; one that was killed may, for the next one to clean up.

    Where the last flush failed, the checkpoint that was replaced is kept: the new one may not be on the disk. Ctrl-C in
    the middle of tidying up leaves the rest to the next save, too.
    """
    category, problems = finding
    mine = {name for name in left if not name.startswith(".replaced-")} - set(point.recorded.baseline.before.litter)
    if point.kind == "int":
        mine = set()
    if run.status == "raised" and mine and category in FINE:
        return Outcome(point, "litter", [*problems, f"left by a save that raised: {sorted(mine)}"])
    return Outcome(point, category, problems)
