"""What a power cut in a save of a training state may leave: directories are renamed here, and flushed on their own."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.crash.effects import Effect, effect_of
from tests.crash.points import Recorded
from tests.crash.power import ALL_SUBSETS, Directory, Disk, File, Node, below, files_in, set_name, subsets
from tests.crash.runs.judge import Baseline
from tests.crash.runs.transitions import Transition
from tests.crash.suite import Tree
from tests.crash.tracer import OPENING, Call

SHARES = (0.0, 0.5, 1.0)
"""How much of the bytes that were not flushed has reached the disk, of every file of a directory alike."""

_MADE = re.compile(r'"((?:[^"\\]|\\.)*)", \S*O_CREAT')


class RunDisk(Disk):
    """A run's directory.

    Args:
        template: The directory before.
        contents: The bytes that the files get, in the order in which they are made.
    """

    def __init__(self, template: Path, contents: Sequence[bytes] = ()) -> None:
        super().__init__(template)
        self.contents = contents

    def first_bytes(self, number: int) -> bytes:
        """All that it will hold: how it was written bit by bit is not told apart."""
        return self.contents[number] if self.contents else b""

    def change(self, *names: tuple[str, Node | None]) -> None:
        """Change names; they are all of one directory."""
        change = self.change_of(names)
        directory = change[0][0]
        if any(other is not directory for other, _, _ in change):
            raise RuntimeError(f"A rename into another directory: {names}")
        directory.pending.append(change)

    def cuts(self) -> Iterator[Tree]:
        """Choices of changes for each directory on its own, and of so much of the bytes of its files."""
        if self.is_there:
            yield from _cuts(self.root, "", is_root=True)


def _cuts(directory: Directory, path: str, *, is_root: bool) -> Iterator[dict[str, bytes | None]]:
    for chosen in subsets(len(directory.pending), ALL_SUBSETS if is_root else 0):
        names = dict(directory.durable)
        for place in chosen:
            for _, name, node in directory.pending[place]:
                set_name(names, name, node)
        plain = [_plain(names, path, share) for share in SHARES]
        inner = [
            list(_cuts(node, f"{path}{name}/", is_root=False))
            for name, node in names.items()
            if isinstance(node, Directory)
        ]
        for trees in itertools.product(plain, *inner):
            yield {key: value for tree in trees for key, value in tree.items()}


def _plain(names: dict[str, Node], path: str, share: float) -> dict[str, bytes | None]:
    """A directory and its files, without the directories in it."""
    tree: dict[str, bytes | None] = {path: None} if path else {}
    for name, node in names.items():
        if isinstance(node, File):
            tree[f"{path}{name}"] = node.part(share)
    return tree


def cuts(recorded: Recorded[Transition, Baseline]) -> Iterator[tuple[int, Tree, bool]]:
    """What a power cut may leave after each call of a save; after the last one, the save is done."""
    effects = [_effect_of(call, recorded.recorded_in) for call in recorded.calls]
    disk = RunDisk(recorded.template, _final_contents(recorded, effects))
    last = max(ordinal for ordinal, effect in enumerate(effects) if effect is not None)
    for ordinal, effect in enumerate(effects):
        if effect is None:
            continue
        disk.take(effect, {})
        for tree in disk.cuts():
            yield ordinal, tree, ordinal == last


def _final_contents(recorded: Recorded[Transition, Baseline], effects: Sequence[Effect | None]) -> list[bytes]:
    """The bytes of the files that the save makes, which lie under their last names; none where they have none."""
    disk = RunDisk(recorded.template)
    for effect in effects:
        if effect is not None:
            disk.take(effect, {})
    last_names = {id(file): path for path, file in files_in(disk.root)}
    return [recorded.baseline.finished.get(last_names.get(id(file), ""), b"") for file in disk.made]


def _effect_of(call: Call, directory: Path) -> Effect | None:
    """The effect of a call below a directory, of one that another thread's call cuts in two in the trace, too."""
    if call.name in OPENING and "unfinished" in call.text and (made := _MADE.search(call.text)):
        return below(Effect("create", made[1]), directory)
    effect = effect_of(call)
    return below(effect, directory) if effect else None
