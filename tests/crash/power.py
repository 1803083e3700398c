"""Simulated power cuts: what a disk may hold that keeps only what was flushed, and some more.

A file's bytes are safe once it was flushed; names in a directory once the directory was. Of the rest, any part may
have reached the disk, in any order: a name without the change before it, or a file without its bytes.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.crash.effects import Effect
from tests.crash.points import POWER, B, Outcome, Point, Recorded, T
from tests.crash.suite import Suite, Tree

ALL_SUBSETS = 4
"""Up to so many unflushed changes of names, every subset of them is tried: 16."""


@dataclass(slots=True, eq=False)
class File:
    """A file.

    Attributes:
        latest: Its bytes as the running system sees them.
        safe: Its bytes when it was flushed; empty before that.
    """

    latest: bytes = b""
    safe: bytes = b""

    def part(self, share: float) -> bytes:
        """What is left of it when so much of the bytes that were not flushed has reached the disk."""
        if share == 1 or self.safe == self.latest:
            return self.latest
        return self.safe + self.latest[len(self.safe) :][: int(share * (len(self.latest) - len(self.safe)))]


@dataclass(slots=True, eq=False)
class Directory:
    """A directory.

    Attributes:
        names: Name -> file or directory, as the running system sees it.
        durable: The same as it is on the disk for sure.
        pending: Changes that may have reached the disk or not; each is of one or more names that go together.
    """

    names: dict[str, Node] = field(default_factory=dict)
    durable: dict[str, Node] = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)

    def flush(self) -> None:
        """Make its names safe."""
        for change in self.pending:
            for directory, name, node in change:
                set_name(directory.durable, name, node)
        self.pending = []


Node = Directory | File

Change = Sequence[tuple[Directory, str, Node | None]]
"""(directory, name, what it is then); a rename between directories is of two of them."""


def set_name(names: dict[str, Node], name: str, node: Node | None) -> None:
    """Give a name to a node; None: remove the name."""
    if node is None:
        names.pop(name, None)
    else:
        names[name] = node


def subsets(count: int, most: int = ALL_SUBSETS) -> Iterator[Sequence[int]]:
    """Which of `count` changes are done: all subsets of up to `most`; of more none, one, all but one, the first ones.

    With `most` 0: none, all, or the first half of them.
    """
    everything = range(count)
    if count <= most:
        for size in range(count + 1):
            yield from itertools.combinations(everything, size)
        return
    yield ()
    yield everything
    if not most:
        yield range(count // 2)
        return
    for place in everything:
        yield [place]
        yield [other for other in everything if other != place]
        yield range(place)


class Disk(ABC):
    """A directory, and what the calls of a process do to it.

    Args:
        template: The directory before; it may be missing.
    """

    def __init__(self, template: Path) -> None:
        self.is_there = template.exists()
        self.root = _read(template) if self.is_there else Directory()
        self.made: list[File] = []

    def take(self, effect: Effect, contents: Mapping[str, bytes]) -> None:
        """Do what a call did.

        Args:
            effect: With paths below the directory; "." is the directory.
            contents: Path -> bytes that it holds now.
        """
        if effect.kind == "mkdir" and effect.path == ".":
            self.is_there = True
        if effect.path.startswith(".."):
            return
        self._take_names(effect)
        for path, file in files_in(self.root):
            file.latest = contents.get(path, file.latest)
        node = self.find(effect.path)
        if effect.kind == "sync" and isinstance(node, File):
            node.safe = node.latest
        elif effect.kind == "sync" and isinstance(node, Directory):
            node.flush()

    def _take_names(self, effect: Effect) -> None:
        path, node = effect.path, self.find(effect.path)
        if effect.kind in ("create", "open") and node is None:
            made = File(self.first_bytes(len(self.made)))
            self.made.append(made)
            self.change((path, made))
        elif effect.kind == "mkdir" and node is None:
            self.change((path, Directory()))
        elif effect.kind in ("unlink", "rmdir"):
            self.change((path, None))
        elif effect.kind == "link" and node is not None:
            self.change((effect.target, node))
        elif effect.kind == "rename" and node is not None:
            self.change((effect.target, node), (path, None))

    def first_bytes(self, number: int) -> bytes:
        """What is in the file that is made as number `number`, from 0."""
        return b""

    @abstractmethod
    def change(self, *names: tuple[str, Node | None]) -> None:
        """Change the nodes of some paths together."""

    def change_of(self, names: Iterable[tuple[str, Node | None]]) -> Change:
        """Change the names as the running system sees them; return the change that may have reached the disk."""
        change = [(self._parent(path), os.path.basename(path), node) for path, node in names]
        for directory, name, node in change:
            set_name(directory.names, name, node)
        return change

    def find(self, path: str) -> Node | None:
        """What a path names now."""
        node: Node | None = self.root
        for part in [] if path == "." else path.split("/"):
            node = node.names.get(part) if isinstance(node, Directory) else None
        return node

    def _parent(self, path: str) -> Directory:
        found = self.find(os.path.dirname(path) or ".")
        if not isinstance(found, Directory):
            raise RuntimeError(f"{path} is not below a directory that the trace has shown.")
        return found

    @abstractmethod
    def cuts(self) -> Iterator[Tree]:
        """Every directory that a power cut may leave now."""


def _read(path: Path) -> Directory:
    names: dict[str, Node] = {}
    for entry in path.iterdir():
        data = b"" if entry.is_dir() else entry.read_bytes()
        names[entry.name] = _read(entry) if entry.is_dir() else File(data, data)
    return Directory(names, dict(names))


def files_in(directory: Directory, above: str = "") -> Iterator[tuple[str, File]]:
    """(path, file) of every file below, as the running system sees them."""
    for name, node in directory.names.items():
        if isinstance(node, Directory):
            yield from files_in(node, f"{above}{name}/")
        else:
            yield f"{above}{name}", node


def below(effect: Effect, directory: Path) -> Effect:
    """The same effect with paths below a directory; "." is that directory."""
    path = os.path.relpath(effect.path, directory)
    return Effect(effect.kind, path, os.path.relpath(effect.target, directory) if effect.target else "")


def cut_power(suite: Suite[T, B], recorded: Recorded[T, B], place: Path) -> list[Outcome]:
    """Judge every directory that a power cut during a transition may leave, each once, and those right after it."""
    root = Path(tempfile.mkdtemp(prefix="power-", dir=place))
    seen: set[tuple[bool, frozenset[tuple[str, bytes | None]]]] = set()
    outcomes = []
    try:
        for ordinal, tree, is_last in suite.cuts(recorded, root):
            key = (is_last, frozenset(tree.items()))
            if key in seen:
                continue
            seen.add(key)
            directory = root / "cut" / suite.inside
            _write(tree, directory)
            outcomes.append(suite.judge_cut(Point(recorded, ordinal, POWER), directory, is_last=is_last))
            shutil.rmtree(root / "cut")
        return outcomes
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _write(tree: Tree, directory: Path) -> None:
    directory.mkdir(parents=True)
    for name, data in sorted(tree.items()):
        path = directory / name
        if data is None:
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
