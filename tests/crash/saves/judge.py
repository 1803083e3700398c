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

FORGIVEN = {"hub-bin": "", "hfshard-full": "generation_config.json"}
"""Readers that may meet an error (with this word) between old and new, never a mixture. huggingface_hub's `safe=False`
takes the one `*.safetensors` of a directory before any pickle, and names come one at a time; its default reads no
pickle at all. The checksum of generation_config.json is wrong between the rename that commits and its own."""

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
    verdicts = read_all(transition.readers, directory, transition.contents)
    found.readers = {label: str(verdict) for label, verdict in verdicts.items()}
    found.notes += [f"{label}: {verdict.note}" for label, verdict in verdicts.items() if verdict.note]
    quiet = _judge_readers(transition, baseline, verdicts, found)
    if spoiled := touched(baseline.snapshot, left, transition.bystanders):
        found.problems.append(("wrong", f"bystanders touched: {spoiled}"))
    left_over = litter(directory, transition)
    _judge_next_saves(transition, baseline, directory, target, found)
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
    elif is_old and not is_new and changes and not _is_only_swept(transition, changes):
        found.problems.append(("unrestored", f"an error before the commit left changes: {changes}"))
    elif not is_old and told not in ("CommitUnfinishedError", "KeyboardInterrupt"):
        found.notes.append(f"after the commit, {told} was raised")
    return found.settle(seen.quiet)


def _judge_readers(
    transition: Transition, baseline: Baseline, verdicts: Mapping[str, Verdict], found: Judgement
) -> str:
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


def _is_only_swept(transition: Transition, changes: str) -> bool:
    """Whether a directory that held a killed save's wreck has lost some of it: a save may sweep it, and then fail."""
    has_wreck = any(save.killed_at is not None for save in transition.before)
    return has_wreck and all(change.startswith("-") for change in changes.split())


def _judge_next_saves(
    transition: Transition, baseline: Baseline, directory: Path, target: Target, found: Judgement
) -> None:
    """The stopped save once more on a copy, and another one: both must succeed, load and leave no litter."""
    again = directory.with_name("again")
    if directory.exists():
        shutil.copytree(directory, again, symlinks=True)
    for save, place, word in (
        (transition.new, again, "the same save again"),
        (transition.next, directory, "the next save"),
    ):
        _judge_save(transition, baseline, save, place, target, word, found)


def _judge_save(
    transition: Transition, baseline: Baseline, save: Save, place: Path, target: Target, word: str, found: Judgement
) -> None:
    try:
        perform(save, place, target)
    except Exception as error:
        found.problems.append(("unloadable", f"{word} failed: {type(error).__name__}: {error}"))
        return
    for label, verdict in read_all(transition.readers, place, transition.contents).items():
        want = baseline.after[label]
        if want.kind == "whole" and want.generation == transition.new.content.generation:
            want = replace(want, generation=save.content.generation)
        if not same(verdict, want):
            category = "unloadable" if verdict.kind == "error" else "wrong"
            found.problems.append((category, f"after {word}, {label}: {verdict}, not {want}"))
        if verdict.note:
            found.problems.append(("wrong", f"after {word}, {label}: {verdict.note}"))
    if left_over := litter(place, transition):
        found.problems.append(("litter", f"after {word}: {left_over}"))
    if spoiled := touched(baseline.snapshot, snapshot(place), transition.bystanders):
        found.problems.append(("wrong", f"after {word}, bystanders touched: {spoiled}"))
