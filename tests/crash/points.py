"""A recorded change, the points at which it can be stopped, and what came of stopping it there."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from tests.crash.tracer import Call

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
        calls: Its file-changing calls, in order.
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
        ordinal: Place of the system call among `recorded.calls`.
        kind: A key of `INJECTIONS`, or `POWER`.
    """

    recorded: Recorded[T, B]
    ordinal: int
    kind: str

    @property
    def call(self) -> Call:
        """The system call at which it happens."""
        return self.recorded.calls[self.ordinal]


@dataclass(slots=True)
class Outcome:
    """What came of a point.

    Attributes:
        point: Which.
        category: One of the suite's.
        problems: A sentence for each failure.
        notes: Seen, and not a failure.
        readers: Reader -> what it found, in words.
        listing: Files and directories as they were left.
        status: How the stopped process ended.
        report: Its words.
        is_drifted: The calls came in another order than when they were recorded.
    """

    point: Point[Any, Any]
    category: str
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    readers: dict[str, str] = field(default_factory=dict)
    listing: list[str] = field(default_factory=list)
    status: str = ""
    report: str = ""
    is_drifted: bool = False


def points_of(recorded: Recorded[T, B], kinds: Sequence[str]) -> list[Point[T, B]]:
    """Every point of a recorded transition, for these kinds of `INJECTIONS`."""
    points = []
    for kind in kinds:
        names: set[str] = set()
        for ordinal, call in enumerate(recorded.calls):
            if _can_happen(kind, call, names):
                points.append(Point(recorded, ordinal, kind))
            names.add(call.name)
    return points


def _can_happen(kind: str, call: Call, earlier: set[str]) -> bool:
    """Whether it can happen at a call; a call that a file system does not know is missing from its first use on."""
    if kind == "full":
        return call.name in TAKES_SPACE
    if kind == "unsupported":
        return call.name in HAS_FALLBACK and call.name not in earlier
    return True


def sample(points: Sequence[Point[T, B]], count: int | None, seed: int = 0) -> list[Point[T, B]]:
    """All points, or so many of them, always the same ones."""
    if count is None or count >= len(points):
        return list(points)
    chosen = sorted(random.Random(seed).sample(range(len(points)), count))
    return [points[place] for place in chosen]
