"""What an attack is: a function that builds a directory and says which error it must meet, under a name."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

    def prepare(self) -> None:
        """Make the checkpoint's empty directory, and an outside with weights of another save under every name."""
        for path in (self.checkpoint, self.outside, self.root / "cwd"):
            path.mkdir(parents=True)
        raw.write(self.outside, raw.stock_sharded(9) | raw.stock_single(9))
        os.chdir(self.root / "cwd")

    def write(self, files: Mapping[str, bytes]) -> Place:
        """Write files into the checkpoint."""
        raw.write(self.checkpoint, files)
        return self

    def link(self, name: str, target: str | Path) -> Place:
        """Put a symbolic link into the checkpoint."""
        path = self.checkpoint / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)
        return self

    def fifo(self, *names: str) -> Place:
        """Put pipes into the checkpoint, whose readers wait for ever."""
        for name in names:
            os.mkfifo(self.checkpoint / name)
        return self

    def folder(self, name: str) -> Place:
        """Put an empty folder into the checkpoint."""
        (self.checkpoint / name).mkdir()
        return self

    def stretch(self, name: str, size: int) -> Place:
        """Make a file as long as this with NULs, which cost nothing."""
        os.truncate(self.checkpoint / name, size)
        return self

    def expects(self, file: str, match: str = "") -> Expected:
        """The error that what was built here must meet."""
        return Expected(file, match)


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


def edited(base: Callable[[], raw.Files], change: Callable[[raw.Files], object], file: str, match: str = "") -> Build:
    """An attack that changes the files of a whole checkpoint."""

    def build(place: Place) -> Expected:
        files = base()
        change(files)
        return place.write(files).expects(file, match)

    return build


def replaced(base: Callable[[], raw.Files], file: str, content: str | bytes, match: str = "") -> Build:
    """An attack that is a whole checkpoint but for the content of one file, which the error must name."""
    put = content.encode() if isinstance(content, str) else content
    return lambda place: place.write(base() | {file: put}).expects(file, match)


def register_all(theme: str, builds: Mapping[str, Build], **options: Any) -> None:
    """Add attacks of one theme."""
    for name, build in builds.items():
        register(f"{theme}-{name}", build, **options)


def register_contents(
    theme: str, base: Callable[[], raw.Files], file: str, contents: Mapping[str, str | bytes], **options: Any
) -> None:
    """Add attacks that are a whole checkpoint but for one file."""
    register_all(theme, {name: replaced(base, file, content) for name, content in contents.items()}, **options)
