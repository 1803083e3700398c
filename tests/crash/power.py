"""Simulated power cuts: at each call of a save, what a disk may hold that keeps only what was flushed, and some more.

A file's bytes are safe once it was flushed; names in a directory once the directory was. Of the rest, any part may
have reached the disk, in any order: a name without the change before it, or a file without its bytes.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.crash.effects import Effect, effect_of
from tests.crash.points import Outcome, Point, Prepared, copy_of, examined
from tests.crash.saves.judge import judge
from tests.crash.saves.states import perform
from tests.crash.saves.targets import Target
from tests.crash.tracer import Run, traced

Tree = Mapping[str, bytes]
"""Path below the save directory -> content."""

ALL_SUBSETS = 4
"""Up to so many unflushed changes of names, every subset of them is tried: 16."""


@dataclass(slots=True)
class Disk:
    """Files by number, the names that they have now, and the names that a power cut is sure to leave.

    Attributes:
        names: Path -> file, as the running system sees it.
        durable: The same as it is on the disk for sure.
        pending: Changes of names that may have reached the disk or not: (path, file or None) pairs that go together.
        latest: File -> content.
        safe: File -> content that was flushed; none yet: not there.
    """

    names: dict[str, int] = field(default_factory=dict)
    durable: dict[str, int] = field(default_factory=dict)
    pending: list[tuple[tuple[str, int | None], ...]] = field(default_factory=list)
    latest: dict[int, bytes] = field(default_factory=dict)
    safe: dict[int, bytes] = field(default_factory=dict)

    @classmethod
    def holding(cls, tree: Tree) -> Disk:
        """A disk on which everything is flushed."""
        numbers = {path: number for number, path in enumerate(sorted(tree))}
        contents = {number: tree[path] for path, number in numbers.items()}
        return cls(dict(numbers), dict(numbers), [], dict(contents), dict(contents))

    def take(self, effect: Effect, after: Tree) -> None:
        """Do what a call did; `after` is what the directory then held."""
        path, target = effect.path, effect.target
        if effect.kind in ("create", "open") and path not in self.names:
            self.names[path] = len(self.latest)
            self.latest[self.names[path]] = b""
            self._change(((path, self.names[path]),))
        elif effect.kind == "rename" and path in self.names:
            self.names[target] = self.names.pop(path)
            self._change(((target, self.names[target]), (path, None)))
        elif effect.kind == "link" and path in self.names:
            self.names[target] = self.names[path]
            self._change(((target, self.names[path]),))
        elif effect.kind == "unlink":
            self.names.pop(path, None)
            self._change(((path, None),))
        for name, number in self.names.items():
            self.latest[number] = after.get(name, self.latest[number])
        if effect.kind == "sync" and path in self.names:
            self.safe[self.names[path]] = self.latest[self.names[path]]
        elif effect.kind == "sync" and path == ".":
            for change in self.pending:
                self._apply(self.durable, change)
            self.pending = []

    def _change(self, change: tuple[tuple[str, int | None], ...]) -> None:
        if "/" in change[0][0]:  # in the staging directory: no reader looks there, take it as done
            self._apply(self.durable, change)
        else:
            self.pending.append(change)

    @staticmethod
    def _apply(names: dict[str, int], change: tuple[tuple[str, int | None], ...]) -> None:
        for path, number in change:
            if number is None:
                names.pop(path, None)
            else:
                names[path] = number

    def cuts(self) -> Iterator[dict[str, bytes]]:
        """Every directory that a power cut may leave now."""
        for chosen in _subsets(len(self.pending)):
            names = dict(self.durable)
            for place in chosen:
                self._apply(names, self.pending[place])
            yield {path: self.latest[number] for path, number in names.items()}
            yield {path: self.safe.get(number, b"") for path, number in names.items()}


def _subsets(count: int) -> Iterator[Sequence[int]]:
    """Which of `count` changes are done: all subsets of a few; of many none, one, all but one, the first so many."""
    everything = range(count)
    if count <= ALL_SUBSETS:
        for size in range(count + 1):
            yield from itertools.combinations(everything, size)
        return
    for place in everything:
        yield [place]
        yield [other for other in everything if other != place]
        yield everything[:place]
    yield everything


def cut_power(prepared: Prepared, place: Path, target: Target) -> list[Outcome]:
    """Judge every directory that a power cut during a transition may leave."""
    root = Path(tempfile.mkdtemp(prefix="power-", dir=place))
    try:
        seen: set[frozenset[tuple[str, bytes]]] = set()
        outcomes = []
        for ordinal, tree in _cuts(prepared, root, target):
            key = frozenset(tree.items())
            if key not in seen:
                seen.add(key)
                outcomes.append(_judge_tree(Point(prepared, ordinal, "power"), tree, root, target))
        return outcomes
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _cuts(prepared: Prepared, root: Path, target: Target) -> Iterator[tuple[int, dict[str, bytes]]]:
    trees = [_tree_before(prepared, ordinal, root, target) for ordinal in range(len(prepared.calls) + 1)]
    disk = Disk.holding(trees[0])
    for ordinal, call in enumerate(prepared.calls):
        effect = effect_of(call)
        if effect is None:
            continue
        disk.take(_below(effect, prepared.recorded_in), trees[ordinal + 1])
        for tree in disk.cuts():
            yield ordinal, tree


def _below(effect: Effect, directory: Path) -> Effect:
    """The same effect with paths below the save directory; "." is that directory."""
    path = os.path.relpath(effect.path, directory)
    return Effect(effect.kind, path, os.path.relpath(effect.target, directory) if effect.target else "")


def _tree_before(prepared: Prepared, ordinal: int, root: Path, target: Target) -> Tree:
    """What the directory holds before a call: the save is killed there."""
    here = root / "tree"
    here.mkdir()
    directory = copy_of(prepared.template, here)
    inject = None
    if ordinal < len(prepared.calls):
        call = prepared.calls[ordinal]
        inject = f"{call.name}:signal=KILL:when={call.k}"
    traced(lambda: perform(prepared.transition.new, directory, target), root / "trace", inject)
    found = {
        os.path.relpath(os.path.join(base, name), directory): Path(base, name).read_bytes()
        for base, _, names in os.walk(directory)
        for name in names
    }
    shutil.rmtree(here)
    return found


def _judge_tree(point: Point, tree: Tree, root: Path, target: Target) -> Outcome:
    here = root / "cut"
    directory = here / "out"
    directory.mkdir(parents=True)
    for name, content in tree.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    run = Run("cut", "", (), "")
    prepared = point.prepared
    try:
        seen = examined(prepared, directory, target)
        judgement = judge(prepared.transition, prepared.baseline, seen, run, "power")
        return Outcome(point, judgement, run.status, run.report, False)
    finally:
        shutil.rmtree(here)
