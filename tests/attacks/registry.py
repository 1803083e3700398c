"""What an attack is: a function that builds a directory and says which error it must meet, under a name."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.attacks.files import raw

ENTRIES = ("state_dict", "module", "pretrained", "verify")
"""The four ways into hfshard that every attack tries, unless it says otherwise."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The error that an attack must meet."""

    file: str
    """What the message must name: the damaged file, or the directory where nothing else can be named."""
    match: str = ""
    """A regular expression that the message must match, case aside."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an attack is built: the checkpoint, and an outside that nobody may touch."""

    root: Path

    @property
    def checkpoint(self) -> Path:
        """The directory that is loaded."""
        return self.root / "checkpoint"

    @property
    def outside(self) -> Path:
        """Full of weights that load well and must never be opened."""
        return self.root / "outside"

    @property
    def executed(self) -> Path:
        """The file that a payload makes when it runs."""
        return self.outside / "executed"

    def write(self, files: raw.Files) -> None:
        """Write files into the checkpoint."""
        for name, content in files.items():
            path = self.checkpoint / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def prepare(self) -> None:
        """Make the checkpoint's empty directory, and an outside with weights of another save under every name."""
        for path in (self.checkpoint, self.outside, self.root / "cwd"):
            path.mkdir(parents=True)
        for name, content in (raw.stock_sharded(9) | raw.stock_single(9)).items():
            (self.outside / name).write_bytes(content)
        os.chdir(self.root / "cwd")


Build = Callable[[Place], Expected]


@dataclass(frozen=True, slots=True)
class Attack:
    """One hostile or damaged checkpoint."""

    name: str
    build: Build
    entries: tuple[str, ...] = ENTRIES
    full: bool = False
    """Only `verify="full"` must see it; the default may load it (a flipped bit outside of the fingerprint)."""


ATTACKS: dict[str, Attack] = {}


def register(name: str, build: Build, *, entries: tuple[str, ...] = ENTRIES, full: bool = False) -> None:
    """Add an attack."""
    if name in ATTACKS:
        raise ValueError(f"two attacks are called {name}")
    ATTACKS[name] = Attack(name, build, entries, full)


def attack(theme: str, *, entries: tuple[str, ...] = ENTRIES, full: bool = False) -> Callable[[Build], Build]:
    """Register a function as an attack, under its theme and its own name."""

    def wrap(build: Build) -> Build:
        register(f"{theme}-{build.__name__.strip('_').replace('_', '-')}", build, entries=entries, full=full)
        return build

    return wrap


def edit_stock(change: Callable[[raw.Files], None], expected: Expected) -> Build:
    """An attack that changes the files of a valid stock sharded checkpoint."""

    def build(place: Place) -> Expected:
        files = raw.stock_sharded()
        change(files)
        place.write(files)
        return expected

    return build
