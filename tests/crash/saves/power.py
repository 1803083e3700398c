"""What a power cut in a save may leave: the bytes of each moment, and any of the names in the save directory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.crash.effects import effect_of
from tests.crash.points import Recorded
from tests.crash.power import Change, Directory, Disk, File, Node, below, set_name, subsets
from tests.crash.saves.judge import Baseline
from tests.crash.saves.transitions import Transition
from tests.crash.suite import Suite, Tree, files_below, injection
from tests.crash.tracer import traced


class SaveDisk(Disk):
    """A save directory. No reader looks below it, so that changes there are taken as done."""

    def change(self, *names: tuple[str, Node | None]) -> None:
        """Change names; those of files in the save directory itself may not have reached the disk."""
        change = self.change_of(names)
        path, node = names[0]
        if "/" in path or isinstance(node, Directory):
            for directory, name, one in change:
                set_name(directory.durable, name, one)
        else:
            self.root.pending.append(change)

    def cuts(self) -> Iterator[Tree]:
        """For each choice of changes: every file as it was written last, and every file as it was flushed last."""
        for chosen in subsets(len(self.root.pending)):
            files = dict(_files_left(self.root, [self.root.pending[place] for place in chosen]))
            yield {path: file.part(1) for path, file in files.items()}
            yield {path: file.part(0) for path, file in files.items()}


def _files_left(directory: Directory, changes: Sequence[Change], above: str = "") -> Iterator[tuple[str, File]]:
    names = dict(directory.durable)
    for change in changes:
        for changed, name, node in change:
            if changed is directory:
                set_name(names, name, node)
    for name, node in names.items():
        if isinstance(node, Directory):
            yield from _files_left(node, changes, f"{above}{name}/")
        else:
            yield f"{above}{name}", node


def cuts(
    suite: Suite[Transition, Baseline], recorded: Recorded[Transition, Baseline], root: Path
) -> Iterator[tuple[int, Tree, bool]]:
    """What a power cut may leave after each call of a save."""
    trees = [_tree_before(suite, recorded, ordinal, root) for ordinal in range(len(recorded.calls) + 1)]
    disk = SaveDisk(recorded.template)
    for ordinal, call in enumerate(recorded.calls):
        effect = effect_of(call)
        if effect is None or effect.kind == "rmdir":
            continue
        disk.take(below(effect, recorded.recorded_in), trees[ordinal + 1])
        for tree in disk.cuts():
            yield ordinal, tree, False


def _tree_before(
    suite: Suite[Transition, Baseline], recorded: Recorded[Transition, Baseline], ordinal: int, root: Path
) -> dict[str, bytes]:
    """What the directory holds before a call: the save is killed there."""
    here = root / "tree"
    directory = suite.copy(recorded.template, here)
    inject = None
    if ordinal < len(recorded.calls):
        inject = injection(recorded.calls[ordinal], "signal=KILL:when={k}")
    traced(lambda: suite.perform(recorded.transition, directory), root / "trace", inject)
    found = files_below(directory)
    shutil.rmtree(here)
    return found
