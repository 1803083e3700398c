"""The sweep of saves: each reader loads wholly the old or wholly the new checkpoint, and the next save succeeds."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from tests.crash.forks import Aside
from tests.crash.points import Outcome, Point, Recorded
from tests.crash.saves.generations import Content, expected
from tests.crash.saves.judge import FAILURES, FINE, Baseline, Examination, Files, Judgement, examine, judge, read, same
from tests.crash.saves.power import cuts
from tests.crash.saves.readers import READERS, Reader, Verdict, read_all
from tests.crash.saves.states import build, litter, perform, snapshot
from tests.crash.saves.targets import TARGETS
from tests.crash.saves.transitions import Save, Transition, all_transitions
from tests.crash.suite import Suite, Tree
from tests.crash.tracer import Run


def prepare_process() -> None:
    """Import everything, and have one thread write: with more, calls come in another order each time."""
    os.environ.setdefault("HFSHARD_WRITERS", "1")
    os.environ.setdefault("HFSHARD_DIRECT", "1")  # the path of large files, for the small ones here too
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()


class SavesSuite(Suite[Transition, Baseline]):
    """Saves of models and state dicts, by hfshard or by transformers."""

    name = "saves"
    kinds: ClassVar[tuple[str, ...]] = ("kill", "int", "enospc", "eio", "full", "power")
    fine = FINE
    failures: ClassVar[tuple[str, ...]] = FAILURES
    inside = "out"
    warmed: ClassVar[tuple[Content, ...]] = (Content(1), Content(1, arch="gpt2"), Content(1, arch="net"))

    def __init__(self, target: str = "hfshard") -> None:
        super().__init__(target)
        self.writer = TARGETS[target]
        self._examined: dict[tuple[str, Files], Examination] = {}
        self._aside = Aside()

    def transitions(self) -> tuple[Transition, ...]:
        """Every transition; those of another writer are judged by stock readers."""
        is_stock = self.target != "hfshard"
        made = (replace(one, stock_only=is_stock) for one in all_transitions())
        return tuple(one for one in made if not (is_stock and one.needs_shards_of_a_plain_module))

    def warm(self, place: Path) -> None:
        """Save every kind of content once, and read it in every way: no fork has to compile or to import."""
        prepare_process()
        for content in self.warmed:
            for layout in ("single", "three", "single"):
                plain = Save(content, layout)
                for save in (plain, replace(plain, bare=True), replace(plain, variant="fp16")):
                    perform(save, place / f"warm-{content.arch}-{save.bare}", self.writer)
            read_all([Reader(name) for name in READERS], place / f"warm-{content.arch}-False", [content])

    def build(self, transition: Transition, root: Path) -> Path:
        """Save all that was there before."""
        directory = root / self.inside

        def perform_killed(save: Save) -> None:
            self.perform_killed(lambda path: perform(save, path, self.writer), directory, root, save.killed_at or 0)

        build(transition, directory, self.writer, perform_killed)
        for content in transition.contents:
            self.writer.warm(content)
            expected(content)
        return directory

    def perform(self, transition: Transition, directory: Path) -> None:
        """The new save."""
        perform(transition.new, directory, self.writer)

    def baseline(self, transition: Transition, before: Path, after: Path, run: Run) -> tuple[Baseline, tuple[str, ...]]:
        """What each reader loads."""
        old = self._aside.call(read, transition, before)
        new = self._aside.call(read, transition, after)
        problems = [*_check_before(transition, old), *_check_after(transition, old, new)]
        if left := litter(after, transition):
            problems.append(f"litter after the whole save: {left}")
        wanted = {label: _wanted(transition, label, old) for label in new}
        return Baseline(old, wanted, snapshot(before)), tuple(problems)

    def judge(self, point: Point[Transition, Baseline], run: Run, directory: Path) -> Outcome:
        """Ask every reader, then save twice more."""
        recorded = point.recorded
        seen = self._examine(recorded, directory)
        return _outcome(point, judge(recorded.transition, recorded.baseline, seen, run, point.kind))

    def cuts(self, recorded: Recorded[Transition, Baseline], root: Path) -> Iterator[tuple[int, Tree, bool]]:
        """What a power cut may leave after each call."""
        return cuts(self, recorded, root)

    def judge_cut(self, point: Point[Transition, Baseline], directory: Path, *, is_last: bool) -> Outcome:
        """Judge it like a killed save."""
        outcome = self.judge(point, Run("cut", "", (), ""), directory)
        outcome.status = "cut"
        return outcome

    def _examine(self, recorded: Recorded[Transition, Baseline], directory: Path) -> Examination:
        """Examine aside, or remember a directory with the same files: most errors are undone, and leave those."""
        key = (recorded.transition.name, frozenset(snapshot(directory).items()))
        if key not in self._examined:
            self._examined[key] = self._aside.call(
                examine, recorded.transition, recorded.baseline, directory, self.writer
            )
        return self._examined[key]


def _outcome(point: Point[Transition, Baseline], judgement: Judgement) -> Outcome:
    problems = [f"{category}: {words}" for category, words in judgement.problems]
    return Outcome(point, judgement.category, problems, judgement.notes, judgement.readers, judgement.listing)


def _wanted(transition: Transition, label: str, before: Mapping[str, Verdict]) -> Verdict:
    """What a reader must say after the save: the new generation, or as before where it asks for another variant."""
    reader = next(reader for reader in transition.readers if reader.label == label)
    if reader.name == "hub-mixin" and transition.new.layout != "single":
        return Verdict("error")
    if reader.variant == transition.new.variant:
        return Verdict("whole", transition.new.content.generation)
    return before[label]


def _check_before(transition: Transition, before: Mapping[str, Verdict]) -> Iterator[str]:
    """A test that starts from a directory which nobody can read would test nothing."""
    hopeless = all(verdict.kind == "error" for verdict in before.values())
    if transition.before and hopeless and not any(save.killed_at for save in transition.before):
        yield f"nobody loads the directory before the save: {[str(verdict) for verdict in before.values()]}"
    is_stock = all(save.by == "transformers" for save in transition.before)
    for label, verdict in before.items():
        if verdict.kind == "mixed" and not is_stock:
            yield f"before the save, {label}: {verdict}"


def _check_after(transition: Transition, before: Mapping[str, Verdict], after: Mapping[str, Verdict]) -> Iterator[str]:
    for label, verdict in after.items():
        if not same(verdict, _wanted(transition, label, before)):
            yield f"after the whole save, {label}: {verdict}"
