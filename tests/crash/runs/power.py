"""Simulated power cuts in a save of a training state: what a disk may hold that keeps only what was flushed.

Directories are renamed here, so a disk is a graph: names in a directory are safe once that directory was flushed,
bytes once the file was; of the rest any part may have reached the disk.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.crash.effects import Effect, effect_of
from tests.crash.runs.points import Outcome, Point, Prepared, examined
from tests.crash.tracer import OPENING, Call

ALL_SUBSETS = 4
"""Up to so many unflushed changes of a directory, every subset of them is tried."""

_MADE = re.compile(r'"((?:[^"\\]|\\.)*)", \S*O_CREAT')

Tree = dict[str, bytes | None]
"""Path -> bytes; None: a directory."""


@dataclass(slots=True)
class Directory:
    """Names as the running system sees them, and those that a power cut is sure to leave.

    Attributes:
        names: Name -> file or directory.
        durable: The same as it is on the disk for sure.
        pending: Changes that may have reached the disk or not: (name, what it is then) pairs that go together.
    """

    names: dict[str, Node] = field(default_factory=dict)
    durable: dict[str, Node] = field(default_factory=dict)
    pending: list[tuple[tuple[str, Node | None], ...]] = field(default_factory=list)

    def change(self, *changes: tuple[str, Node | None]) -> None:
        """Change names together."""
        _apply(self.names, changes)
        self.pending.append(changes)

    def flush(self) -> None:
        """Make the names safe."""
        self.durable, self.pending = dict(self.names), []

    def cuts(self, *, is_root: bool) -> Iterator[dict[str, Node]]:
        """What names may be left."""
        for chosen in _subsets(len(self.pending), ALL_SUBSETS if is_root else 0):
            names = dict(self.durable)
            for place in chosen:
                _apply(names, self.pending[place])
            yield names


@dataclass(slots=True, eq=False)
class File:
    """A file: what it will hold when it was written, and whether that is safe."""

    data: bytes = b""
    is_safe: bool = False


Node = Directory | File


def _apply(names: dict[str, Node], changes: Sequence[tuple[str, Node | None]]) -> None:
    for name, node in changes:
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def _subsets(count: int, most: int) -> Iterator[Sequence[int]]:
    """Which of `count` changes are done: all subsets of a few; of many none, one, all but one, the first so many."""
    if count <= most:
        for size in range(count + 1):
            yield from itertools.combinations(range(count), size)
        return
    yield ()
    yield range(count)
    if most:
        for place in range(count):
            yield [place]
            yield [other for other in range(count) if other != place]
            yield range(place)
    else:
        yield range(count // 2)


class Disk:
    """A run's directory, and what the calls of a save do to it."""

    def __init__(self, template: Path, finished: dict[str, bytes]) -> None:
        self.finished = finished
        self.is_there = template.exists()
        self.root = _read(template) if self.is_there else Directory()
        self.made: list[tuple[str, File]] = []

    def find(self, path: str) -> Node | None:
        """What a path names now."""
        node: Node | None = self.root
        for part in [] if path == "." else path.split("/"):
            node = node.names.get(part) if isinstance(node, Directory) else None
        return node

    def directory(self, path: str) -> Directory:
        """The directory that holds what a path names."""
        found = self.find(os.path.dirname(path) or ".")
        assert isinstance(found, Directory), path
        return found

    def take(self, effect: Effect) -> None:
        """Do what a call did."""
        path, name = effect.path, os.path.basename(effect.path)
        node = self.find(path) if not path.startswith("..") else None
        if effect.kind == "mkdir" and path == ".":
            self.is_there = True
        elif effect.kind == "sync" and isinstance(node, File):
            node.is_safe = True
        elif effect.kind == "sync" and isinstance(node, Directory):
            node.flush()
        elif path.startswith(".."):
            return
        elif effect.kind in ("create", "open") and node is None:
            made = File()
            self.made.append((path, made))
            self.directory(path).change((name, made))
        elif effect.kind == "mkdir":
            self.directory(path).change((name, Directory()))
        elif effect.kind in ("unlink", "rmdir"):
            self.directory(path).change((name, None))
        elif effect.kind == "link" and node is not None:
            self.directory(effect.target).change((os.path.basename(effect.target), node))
        elif effect.kind == "rename" and node is not None:
            assert os.path.dirname(path) == os.path.dirname(effect.target), "a rename into another directory"
            self.directory(path).change((os.path.basename(effect.target), node), (name, None))

    def fill(self) -> None:
        """Give each file that was made its bytes, which lie under its last name."""
        by_node = {id(node): path for path, node in _files(self.root, "")}
        for _, file in self.made:
            file.data = self.finished.get(by_node.get(id(file), ""), b"")

    def cuts(self) -> Iterator[Tree]:
        """Every tree that a power cut may leave now."""
        yield from _cuts(self.root, "", is_root=True) if self.is_there else ()


def _read(path: Path) -> Directory:
    names: dict[str, Node] = {
        entry.name: _read(entry) if entry.is_dir() else File(entry.read_bytes(), True) for entry in path.iterdir()
    }
    return Directory(names, dict(names))


def _files(directory: Directory, path: str) -> Iterator[tuple[str, File]]:
    for name, node in directory.names.items():
        below = f"{path}{name}"
        if isinstance(node, Directory):
            yield from _files(node, f"{below}/")
        else:
            yield below, node


def _cuts(directory: Directory, path: str, *, is_root: bool) -> Iterator[Tree]:
    for names in directory.cuts(is_root=is_root):
        inner = [list(_cuts(node, f"{path}{name}/", is_root=False)) for name, node in names.items()
                 if isinstance(node, Directory)]  # fmt: skip
        plain: list[Tree] = []
        for part in (0.0, 0.5, 1.0):  # of the bytes of every file that was not flushed
            plain.append({path: None} if path else {})
            for name, node in names.items():
                if isinstance(node, File):
                    plain[-1][f"{path}{name}"] = node.data if node.is_safe else node.data[: int(part * len(node.data))]
        for base, *parts in itertools.product(plain, *inner):
            yield {key: value for tree in (base, *parts) for key, value in tree.items()}


def cut_power(prepared: Prepared, place: Path) -> list[Outcome]:
    """Judge every directory that a power cut during a transition, or right after it, may leave."""
    root = Path(tempfile.mkdtemp(prefix="power-", dir=place))
    effects = [_effect_of(call) for call in prepared.calls]
    below = [_below(effect, prepared.recorded_in) if effect else None for effect in effects]
    disk = Disk(prepared.template, prepared.finished)
    seen: set[frozenset[tuple[str, bytes | None]]] = set()
    outcomes = []
    try:
        contents = _final_contents(prepared, below)
        for ordinal, effect in enumerate(below):
            if effect is None:
                continue
            disk.take(effect)
            for number, (_, file) in enumerate(disk.made):
                file.data = contents[number]
            is_last = ordinal == len(below) - 1
            for tree in disk.cuts():
                key = frozenset(tree.items())
                if key not in seen or is_last:
                    seen.add(key)
                    outcomes.append(_judge(Point(prepared, ordinal, "power"), tree, root, is_last=is_last))
        return outcomes
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _final_contents(prepared: Prepared, effects: Sequence[Effect | None]) -> list[bytes]:
    disk = Disk(prepared.template, prepared.finished)
    for effect in effects:
        if effect is not None:
            disk.take(effect)
    disk.fill()
    return [file.data for _, file in disk.made]


def _effect_of(call: Call) -> Effect | None:
    """The effect of a call, of one that another thread's call cuts in two in the trace, too."""
    if call.name in OPENING and "unfinished" in call.text and (made := _MADE.search(call.text)):
        return Effect("create", made[1])
    return effect_of(call)


def _below(effect: Effect, directory: Path) -> Effect:
    """The same effect with paths below the run's directory; "." is that directory."""
    path = os.path.relpath(effect.path, directory)
    return Effect(effect.kind, path, os.path.relpath(effect.target, directory) if effect.target else "")


def _judge(point: Point, tree: Tree, root: Path, *, is_last: bool) -> Outcome:
    run = root / "cut"
    run.mkdir()
    for name, data in sorted(tree.items()):
        path = run / name
        if data is None:
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.write_bytes(data)
    try:
        category, problems = examined(point.prepared, run, "new" if is_last else "both")
        return Outcome(point, category, problems, "cut")
    finally:
        shutil.rmtree(run)
