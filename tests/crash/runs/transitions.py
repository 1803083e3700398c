"""The table of the crash sweep of training checkpoints: what a run's directory holds, and what is saved into it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tests.crash.runs.content import Save, successor


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
