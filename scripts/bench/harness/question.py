"""What a question is made of: the peers that are compared, what each one does, and what a run of one gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.harness.models import SIZES, Size

SIDE = 3
"""Peers that matter less run in every third round only."""


class SkipPeer(Exception):
    """This peer can't run here; the text says why."""


@dataclass(frozen=True)
class Context:
    """Where a run takes place."""

    directory: Path
    """Of the inputs; deleted in the end."""
    params: str
    """A key of `SIZES`."""
    device: str = "cpu"
    target: Path = Path()
    """A new directory for what this run writes; deleted after it."""
    environment: dict[str, str] = field(default_factory=dict)
    """More for the children's environment."""

    @property
    def size(self) -> Size:
        """The model's shapes."""
        return SIZES[self.params]

    @property
    def specs(self) -> Path:
        """Names and shapes of the tensors."""
        return self.directory / "specs.json"

    @property
    def source(self) -> Path:
        """The checkpoint that is read, saved by hfshard with sha256."""
        return self.directory / "source"

    def as_json(self) -> dict[str, Any]:
        """Write it as JSON, for a child's command line."""
        return {**asdict(self), "directory": str(self.directory), "target": str(self.target)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Context:
        """Read what `as_json` wrote."""
        return cls(**{**value, "directory": Path(value["directory"]), "target": Path(value["target"])})


@dataclass(frozen=True)
class Job:
    """What a prepared child does: phases one after another, each timed."""

    phases: Sequence[tuple[str, Callable[[], object]]]
    result: Callable[[], dict[str, Any]] = dict
    """What it found, asked for after the measurement."""


@dataclass(frozen=True)
class Peer:
    """One line of a table."""

    key: str
    title: str
    prepare: Callable[[Context], Job]
    """Runs in the child: imports, builds the input, and returns what is to be measured. Raises SkipPeer."""
    state: str = ""
    """ "cold": the files that `Question.files` names are dropped from the page cache; "warm": read once before."""
    every: int = 1
    """Takes part in every n-th round."""
    base: str = ""
    """Name of the peer that it is compared with; "" for none."""
    limit: str = ""
    """Name of the peer that is its limit; of several, the larger ("write | hash") or the sum ("read + write")."""

    @property
    def name(self) -> str:
        """A name that no other peer of the question has."""
        return f"{self.key}/{self.state}" if self.state else self.key

    @property
    def written_by_hfshard(self) -> bool:
        """Whether hfshard itself is run: its failure is an error, not a skipped line."""
        return self.key.startswith("hfshard")


@dataclass(frozen=True)
class Target:
    """A figure that is aimed at, and what was measured of it."""

    text: str
    measured: str
    is_met: bool | None
    """None where it was not measured."""


@dataclass(frozen=True)
class Question:
    """One question: its peers, its inputs, and how its answer reads."""

    name: str
    title: str
    peers: Callable[[Context], list[Peer]]
    make_inputs: Callable[[Context], None]
    """Runs in a child, once."""
    files: Callable[[Context, Peer], list[Path]]
    """The files whose pages are dropped or filled before a run."""
    render: Callable[[dict[str, Any]], str]
    """The section of RESULTS.md, from the raw figures."""
    targets: Callable[[dict[str, Any]], list[Target]]
    held: float = 1.0
    """What the hungriest peer touches while it is measured, pages of files included, in sizes of the model: so much
    memory is held and freed before (reserve.py)."""
    side_by_side: int = 2
    """How many peers import and build their inputs at once, each with memory of its own; they are measured in turns."""
    max_rounds: int = 99
    """More rounds tell nothing, or take too long."""
    around: Callable[[Context], AbstractContextManager[Context]] | None = None
    """What has to be there while it runs, such as a server."""


_ROOMS = {"many_ranks": ("distributed", "node", "ranks"), "small_end": ("small", "tiny", "imports", "plan")}
"""Where the questions are that are not in `questions`."""


def question_of(name: str) -> Question:
    """The question of a module of one of the rooms."""
    room = next((room for room, names in _ROOMS.items() if name in names), "questions")
    question: Question = import_module(f"bench.{room}.{name}").QUESTION
    return question
