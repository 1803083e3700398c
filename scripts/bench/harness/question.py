"""The parts of a question: the peers to compare, the work of each, and how the answer reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.harness.figures import Data, Target
from bench.harness.models import SIZES, Size

QUESTIONS = (
    "save",
    "load",
    "reshard",
    "foreign",
    "verify",
    "small",
    "tiny",
    "imports",
    "push",
    "stores",
    "distributed",
    "zero3",
    "node",
    "ranks",
    "gpu",
)
"""Modules of `bench.questions`, in the order of RESULTS.md."""
SIDE = 3
"""Minor peers run in every third round only."""


class SkipPeer(Exception):
    """This peer cannot run here; the text says why."""


@dataclass(frozen=True)
class Context:
    """The setting of a run."""

    directory: Path
    """Inputs; deleted in the end."""
    params: str
    """A key of `SIZES`."""
    device: str = "cpu"
    target: Path = Path()
    """A new directory for the output of this run; deleted after it."""
    environment: dict[str, str] = field(default_factory=dict)
    """Additions to the children's environment."""
    checkout: Path = Path(__file__).resolve().parents[3]
    """Where the hfshard lies that is measured."""

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
        """The checkpoint to read, saved by hfshard with sha256."""
        return self.directory / "source"

    def as_json(self) -> dict[str, Any]:
        """Write it as JSON, for a child's command line."""
        return asdict(self) | {name: str(getattr(self, name)) for name in ("directory", "target", "checkout")}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Context:
        """Read the output of `as_json`."""
        return cls(**value | {name: Path(value[name]) for name in ("directory", "target", "checkout")})


@dataclass(frozen=True)
class Job:
    """The work of a prepared child: phases one after another, each timed."""

    phases: Sequence[tuple[str, Callable[[], object]]]
    result: Callable[[], dict[str, Any]] = dict
    """Collects findings after the measurement."""


@dataclass(frozen=True)
class Peer:
    """One line of a table."""

    key: str
    title: str
    prepare: Callable[[Context], Job]
    """Runs in the child: imports, builds the input, and returns the work to measure. Raises SkipPeer."""
    state: str = ""
    """ "cold": the files that `Question.files` names are dropped from the page cache; "warm": read once before."""
    every: int = 1
    """Takes part in every n-th round."""
    base: str = ""
    """Name of the peer to compare it with; "" for none."""
    limit: str = ""
    """Name of the peer that is its limit; of several, the larger ("write | hash") or the sum ("read + write")."""

    @property
    def name(self) -> str:
        """A name that no other peer of the question has."""
        return f"{self.key}/{self.state}" if self.state else self.key

    @property
    def written_by_hfshard(self) -> bool:
        """Return whether hfshard itself runs: its failure is an error, not a skipped line."""
        return self.key.startswith("hfshard")


def _nothing(context: Context) -> None:
    """Make no inputs."""


def _no_files(context: Context, peer: Peer) -> list[Path]:
    """Read no files."""
    return []


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question: its peers, its inputs, and how its answer reads."""

    name: str
    title: str
    peers: Callable[[Context], list[Peer]]
    """The lines of the tables."""
    render: Callable[[Data], str]
    """Writes the section of RESULTS.md from the raw figures."""
    targets: Callable[[Data], list[Target]]
    """Compares the raw figures with the aims."""
    make_inputs: Callable[[Context], None] = _nothing
    """Runs in a child, once."""
    files: Callable[[Context, Peer], list[Path]] = _no_files
    """Names the files to drop or to fill before a run."""
    held: float = 1.0
    """Memory that the hungriest peer touches while it is measured, pages of files included, in sizes of the model:
    as much is held and freed before (reserve.py)."""
    side_by_side: int = 2
    """Peers that import and build their inputs at once, each with memory of its own; they are measured in turns."""
    max_rounds: int = 99
    """More rounds tell nothing, or take too long."""
    around: Callable[[Context], AbstractContextManager[Context]] | None = None
    """A setting for all runs, such as a server."""


def question_of(name: str) -> Question:
    """Import a question."""
    question: Question = import_module(f"bench.questions.{name}").QUESTION
    return question
