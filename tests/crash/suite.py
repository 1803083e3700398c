"""What a sweep has to know of the thing that it sweeps: its table, how a directory is made, and who judges it."""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar, Generic

from tests.crash.points import INJECTIONS, B, Outcome, Point, Recorded, T
from tests.crash.tracer import EVERYTHING, Call, Run, Scope, traced

Tree = Mapping[str, bytes | None]
"""Path below a directory -> content; None: a directory."""


class Suite(ABC, Generic[T, B]):
    """A table of transitions, and what is done with each of them.

    Attributes:
        name: As the command line takes it.
        kinds: What can happen to a transition, of `INJECTIONS` and `POWER`.
        fine: Categories of outcomes that do not fail the sweep.
        failures: Those that do, the worst first.
        inside: Path of the swept directory below a root of its own.
    """

    name: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]
    fine: ClassVar[tuple[str, ...]]
    failures: ClassVar[tuple[str, ...]]
    inside: ClassVar[str]

    def __init__(self, target: str = "hfshard") -> None:
        self.target = target

    @abstractmethod
    def transitions(self) -> tuple[T, ...]:
        """Every transition, in the order of the table."""

    @abstractmethod
    def warm(self, place: Path) -> None:
        """Have everything imported and built, so that no fork does it in the middle of its work."""

    @abstractmethod
    def build(self, transition: T, root: Path) -> Path:
        """Make the directory that a transition starts from, `inside` a root; return its path."""

    @abstractmethod
    def perform(self, transition: T, directory: Path) -> None:
        """Carry out a transition from beginning to end."""

    def aim(self, point: Point[T, B], root: Path) -> tuple[str, Scope]:
        """strace's `inject=` expression for a point, and among which calls of the process below a root it counts."""
        return injection(point.call, INJECTIONS[point.kind]), EVERYTHING

    def prepare(self) -> None:
        """What the process does after `unstopped` or `work` was called, and before it is recorded or stopped."""

    @abstractmethod
    def baseline(self, transition: T, before: Path, after: Path, run: Run) -> tuple[B, tuple[str, ...]]:
        """Look at both sides of a transition that nothing stopped; return them, and what is wrong with them."""

    @abstractmethod
    def judge(self, point: Point[T, B], run: Run, directory: Path) -> Outcome:
        """Judge what a stopped process left; the directory is used up."""

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

    def judge_cut(self, point: Point[T, B], directory: Path, *, is_last: bool) -> Outcome:
        """Judge what a power cut left; the directory is used up."""
        raise NotImplementedError(f"The sweep of {self.name} has no power cuts.")

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
