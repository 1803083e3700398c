"""The verdict on one stopped save: what each reader loads, and whether the next save tidies up."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.crash.saves.readers import Verdict, read_all
from tests.crash.saves.states import Snapshot, difference, litter, perform, snapshot, touched
from tests.crash.saves.targets import Target
from tests.crash.saves.transitions import Save, Transition
from tests.crash.tracer import Run

FAILURES = ("wrong", "unloadable", "litter", "unrestored", "silent", "hung", "missed")
"""Categories that fail the sweep, the worst first."""

FORGIVEN = {"hub-bin": "", "hub-mixin": "", "hfshard-full": "generation_config.json"}
"""Readers that may meet an error (with this word) between old and new, never a mixture. huggingface_hub's `safe=False`
takes the one `*.safetensors` of a directory before any pickle, and names come one at a time; its default reads no
pickle at all. Its mixin looks for two files by their names, which no rename switches together. The checksum of
generation_config.json is wrong between the rename that commits and its own."""

FINE = ("ok-old", "ok-new", "ok-split", "clear-error")
"""Categories that do not: all readers find the old checkpoint, the new one, some this and some that, or there was none
before and an error says so."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a transition looks like when nothing is stopped.

    Attributes:
        before: Each reader's verdict on the directory before the save.
        after: The same after the whole save.
        snapshot: The files before.
    """

    before: Mapping[str, Verdict]
    after: Mapping[str, Verdict]
    snapshot: Snapshot


@dataclass(slots=True)
class Judgement:
    """What was found at one point.

    Attributes:
        category: One of `FINE` or `FAILURES`.
        problems: (category, sentence) of each failure.
        notes: Seen, and no failure.
        readers: Label -> verdict, in words.
        listing: Files and directories as the stopped save left them.
    """

    category: str = "missed"
    problems: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    readers: dict[str, str] = field(default_factory=dict)
    listing: list[str] = field(default_factory=list)

    def settle(self, quiet: str) -> Judgement:
        """Take the worst problem as the category, or `quiet` when there is none."""
        found = {category for category, _ in self.problems}
        self.category = next((category for category in FAILURES if category in found), quiet)
        return self


def same(one: Verdict, other: Verdict) -> bool:
    """Whether two verdicts are the same generation, both errors, or the same mixture (upstream's, from before)."""
    if one.kind == other.kind == "mixed":
        return one.detail == other.detail
    return one.kind == other.kind and one.generation == other.generation


Files = frozenset[tuple[str, str]]
"""A snapshot that can be looked up."""

_known: dict[tuple[str, Files], Mapping[str, Verdict]] = {}
"""(transition, files) -> verdicts of directories that every reader loads: all saves that succeed leave the same few."""


def read(transition: Transition, directory: Path) -> Mapping[str, Verdict]:
    """What readers load; the same files are read once, unless a reader fails, whose error names the directory."""
    key = (transition.name, frozenset(snapshot(directory).items()))
    if key in _known:
        return _known[key]
    verdicts = read_all(transition.readers, directory, transition.contents)
    if all(verdict.kind == "whole" for verdict in verdicts.values()):
        _known[key] = verdicts
    return verdicts


@dataclass(frozen=True, slots=True)
class Examination:
    """What a directory turned out to hold, whatever way it came about.

    Attributes:
        left: Its files.
        verdicts: What each reader loads.
        quiet: The category if nothing is wrong.
        judgement: What was found.
        left_over: Its litter.
    """

    left: Snapshot
    verdicts: Mapping[str, Verdict]
    quiet: str
    judgement: Judgement
    left_over: str


def examine(transition: Transition, baseline: Baseline, directory: Path, target: Target) -> Examination:
    """Read a directory that a stopped save left; it is used up by the next saves."""
    found = Judgement()
    left = snapshot(directory)
    found.listing = sorted(left)
    verdicts = read(transition, directory)
    found.readers = {label: str(verdict) for label, verdict in verdicts.items()}
    found.notes += [f"{label}: {verdict.note}" for label, verdict in verdicts.items() if verdict.note]
    quiet = judge_readers(transition, baseline, verdicts, found)
    if spoiled := touched(baseline.snapshot, left, transition.bystanders):
        found.problems.append(("wrong", f"bystanders touched: {spoiled}"))
    left_over = litter(directory, transition)
    NextSaves(transition, baseline, target).judge(directory, found)
    return Examination(left, verdicts, quiet, found, left_over)


def judge(transition: Transition, baseline: Baseline, seen: Examination, run: Run, kind: str) -> Judgement:
    """Judge what was found after a save that ended as `run` tells."""
    found = deepcopy(seen.judgement)
    if kind in ("kill", "power"):
        return found.settle(seen.quiet)
    is_new = all(same(verdict, baseline.after[label]) for label, verdict in seen.verdicts.items())
    is_old = all(same(verdict, baseline.before[label]) for label, verdict in seen.verdicts.items())
    changes = difference(baseline.snapshot, seen.left)
    told = re.split("[: ]", run.report, maxsplit=1)[0]
    if run.status == "hung":
        found.problems.append(("hung", "the save did not end"))
    elif run.status == "saved":
        if not run.report or kind == "int":
            found.problems.append(("silent", f"the save returned as if nothing had happened; {run.report!r}"))
        if not is_new:
            found.problems.append(("wrong", "the save returned, and the new checkpoint is not there for all readers"))
        if seen.left_over:
            found.notes.append(f"left by a save that returned: {seen.left_over}")
    elif transition.new.by == "regroup":
        pass  # an error leaves the groups that were committed before it, by design
    elif is_old and not is_new and changes and not _is_only_cleaned_up(transition, changes):
        found.problems.append(("unrestored", f"an error before the commit left changes: {changes}"))
    elif not is_old and told not in ("CommitUnfinishedError", "KeyboardInterrupt"):
        found.notes.append(f"after the commit, {told} was raised")
    return found.settle(seen.quiet)


def judge_readers(transition: Transition, baseline: Baseline, verdicts: Mapping[str, Verdict], found: Judgement) -> str:
    """Hold every verdict against before and after; return the category if nothing is wrong."""
    sides = set()
    for label, verdict in verdicts.items():
        old, new = baseline.before[label], baseline.after[label]
        if verdict.kind == "error" and old.kind == "error":
            if not verdict.is_clear:
                found.problems.append(("unloadable", f"{label}: unclear {verdict}"))
            sides.add("clear-error" if not transition.before else "ok-old")
        elif same(verdict, new):
            sides.add("ok-new" if not same(old, new) else "either")
        elif same(verdict, old):
            sides.add("ok-old")
        elif verdict.kind == "error" and label in FORGIVEN and FORGIVEN[label] in verdict.detail:
            found.notes.append(f"{label}: an error between old and new")
        else:
            category = "unloadable" if verdict.kind == "error" else "wrong"
            found.problems.append((category, f"{label}: {verdict}, before {old}, after {new}"))
    sides = sides - {"either"} if sides != {"either"} else {"ok-new"}
    return sides.pop() if len(sides) == 1 else "ok-split"


def _is_only_cleaned_up(transition: Transition, changes: str) -> bool:
    """Whether a directory with a killed save's wreck has only lost some of it: a save cleans up before it fails."""
    has_wreck = any(save.killed_at is not None for save in transition.before)
    return has_wreck and all(change.startswith("-") for change in changes.split())


@dataclass(frozen=True, slots=True)
class NextSaves:
    """The saves after a stopped one: each must succeed, load and leave no litter.

    Attributes:
        transition: That was stopped.
        baseline: What it looks like when nothing is stopped.
        target: Who saves.
    """

    transition: Transition
    baseline: Baseline
    target: Target

    def judge(self, directory: Path, found: Judgement) -> None:
        """Carry out the stopped save once more in a copy, and another one in the directory."""
        again = directory.with_name("again")
        if directory.exists():
            shutil.copytree(directory, again, symlinks=True)
        self._judge(self.transition.new, again, "the same save again", found)
        self._judge(self.transition.next, directory, "the next save", found)

    def _judge(self, save: Save, place: Path, word: str, found: Judgement) -> None:
        transition = self.transition
        try:
            perform(save, place, self.target)
        except Exception as error:
            found.problems.append(("unloadable", f"{word} failed: {type(error).__name__}: {error}"))
            return
        left = snapshot(place)
        for label, verdict in read(transition, place).items():
            want = self._wanted(label, save)
            if not same(verdict, want):
                category = "unloadable" if verdict.kind == "error" else "wrong"
                found.problems.append((category, f"after {word}, {label}: {verdict}, not {want}"))
            if verdict.note:
                found.problems.append(("wrong", f"after {word}, {label}: {verdict.note}"))
        if left_over := litter(place, transition):
            found.problems.append(("litter", f"after {word}: {left_over}"))
        if spoiled := touched(self.baseline.snapshot, left, transition.bystanders):
            found.problems.append(("wrong", f"after {word}, bystanders touched: {spoiled}"))

    def _wanted(self, label: str, save: Save) -> Verdict:
        want = self.baseline.after[label]
        if want.kind == "whole" and want.generation == self.transition.new.content.generation:
            return replace(want, generation=save.content.generation)
        return want
