"""Record a transition once; stop its save at a point in one way; judge what is left."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.crash.saves.generations import Content
from tests.crash.saves.judge import Baseline, Examination, Judgement, examine, in_fork, judge, same
from tests.crash.saves.readers import Verdict, read_all
from tests.crash.saves.states import build, litter, perform, snapshot
from tests.crash.saves.targets import Target
from tests.crash.saves.transitions import Save, Transition
from tests.crash.tracer import Call, hidden_writes, traced

INJECTIONS = {
    "kill": "signal=KILL:when={k}",
    "int": "signal=INT:when={k}",
    "enospc": "error=ENOSPC:when={k}",
    "eio": "error=EIO:when={k}",
    "full": "error=ENOSPC:when={k}+",
}
"""What happens at a point, in strace's words. `full`: the disk is full from that write on, for good."""

TAKES_SPACE = {"write", "pwrite64", "writev", "pwritev", "pwritev2", "fallocate", "ftruncate", "mkdir", "mkdirat"}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A transition, recorded.

    Attributes:
        transition: Which.
        template: The directory (in a root of its own) that every point starts from a copy of.
        baseline: What readers say when nothing is stopped.
        calls: The file-changing calls of the whole save, in order.
        recorded_in: The save directory of that save, as its calls name it.
        problems: What is wrong with the whole, unstopped save.
    """

    transition: Transition
    template: Path
    baseline: Baseline
    calls: tuple[Call, ...]
    recorded_in: Path
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """One way to stop one save."""

    prepared: Prepared
    ordinal: int
    kind: str

    @property
    def call(self) -> Call:
        """The system call at which it happens."""
        return self.prepared.calls[self.ordinal]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a point."""

    point: Point
    judgement: Judgement
    status: str
    report: str
    is_drifted: bool


def prepare_process() -> None:
    """Make this process fit to be forked: quiet, offline, one thread, everything imported."""
    os.environ.setdefault("HFSHARD_WRITERS", "1")  # with more, calls come in another order each time
    os.environ.setdefault("HFSHARD_DIRECT", "1")  # the path of large files, for the small ones here too
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1", TOKENIZERS_PARALLELISM="false")
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    logging.getLogger("hfshard").addHandler(logging.NullHandler())  # what readers warn of in a wreck is not asked
    gc.disable()


def warm(place: Path, target: Target) -> None:
    """Save every kind of content once, so that no child imports a module in the middle of its save."""
    for content in (Content(1), Content(1, arch="gpt2")):
        for layout in ("single", "three", "single"):
            plain = Save(content, layout)
            for save in (plain, replace(plain, bare=True), replace(plain, variant="fp16")):
                perform(save, place / f"warm-{content.arch}-{save.bare}", target)


def prepare(transition: Transition, place: Path, target: Target) -> Prepared:
    """Build the directory, read it, save over a copy of it under strace, read that."""
    root = Path(tempfile.mkdtemp(prefix="template-", dir=place))
    directory = build(transition, root, target)
    target.warm(transition.new.content)
    before = in_fork(lambda: read_all(transition.readers, directory, transition.contents))
    trial = Path(tempfile.mkdtemp(prefix="trial-", dir=place))
    copy = copy_of(directory, trial)
    run = traced(lambda: perform(transition.new, copy, target), place / f"{trial.name}.trace")
    if run.status != "saved":
        raise RuntimeError(f"{transition.name}: the unstopped save {run.status}: {run.report}")
    if hidden := hidden_writes(run.calls, trial):
        raise RuntimeError(f"{transition.name}: writes that this harness can't stop at: {hidden[:3]}")
    after = in_fork(lambda: read_all(transition.readers, copy, transition.contents))
    problems = [*_check_before(transition, before), *_check_after(transition, before, after)]
    if left := litter(copy, transition):
        problems.append(f"litter after the whole save: {left}")
    calls = tuple(call for call in run.calls if call.changes(trial))
    want = {label: _wanted(transition, label, before) for label in after}
    shutil.rmtree(trial)
    baseline = Baseline(before, want, snapshot(directory))
    return Prepared(transition, directory, baseline, calls, copy, tuple(problems))


def _wanted(transition: Transition, label: str, before: dict[str, Verdict]) -> Verdict:
    """What a reader must say after the save: the new generation, or as before where it asks for another variant."""
    reader = next(reader for reader in transition.readers if reader.label == label)
    if reader.variant == transition.new.variant:
        return Verdict("whole", transition.new.content.generation)
    return before[label]


def _check_before(transition: Transition, before: dict[str, Verdict]) -> Iterator[str]:
    """A test that starts from a directory which nobody can read would test nothing."""
    hopeless = all(verdict.kind == "error" for verdict in before.values())
    if transition.before and hopeless and not any(save.killed_at for save in transition.before):
        yield f"nobody loads the directory before the save: {[str(verdict) for verdict in before.values()]}"
    is_upstreams = all(save.by == "transformers" for save in transition.before)
    for label, verdict in before.items():
        if verdict.kind == "mixed" and not is_upstreams:
            yield f"before the save, {label}: {verdict}"


def _check_after(transition: Transition, before: dict[str, Verdict], after: dict[str, Verdict]) -> Iterator[str]:
    for label, verdict in after.items():
        if not same(verdict, _wanted(transition, label, before)):
            yield f"after the whole save, {label}: {verdict}"


def copy_of(directory: Path, root: Path) -> Path:
    """A copy of a save directory in a root of its own; only a path where it does not exist."""
    copy = root / "out"
    if directory.exists():
        shutil.copytree(directory, copy, symlinks=True)
    return copy


def points_of(prepared: Prepared, kinds: Sequence[str]) -> list[Point]:
    """Every point of a recorded transition."""
    return [
        Point(prepared, ordinal, kind)
        for kind in kinds
        for ordinal, call in enumerate(prepared.calls)
        if kind != "full" or call.name in TAKES_SPACE
    ]


_SEEN: dict[tuple[str, frozenset[tuple[str, str]]], Examination] = {}
"""What this process has examined: most errors are undone, and leave the very same files."""


def examined(prepared: Prepared, directory: Path, target: Target) -> Examination:
    """Examine a directory in a fork, or remember one with the same files."""
    key = (prepared.transition.name, frozenset(snapshot(directory).items()))
    if key not in _SEEN:
        _SEEN[key] = in_fork(lambda: examine(prepared.transition, prepared.baseline, directory, target))
    return _SEEN[key]


def stop(point: Point, place: Path, target: Target) -> Outcome:
    """Save over a fresh copy, let it happen at the point, and judge what is left."""
    root = Path(tempfile.mkdtemp(prefix="point-", dir=place))
    trace = place / f"{root.name}.trace"
    transition = point.prepared.transition
    try:
        copy = copy_of(point.prepared.template, root)
        inject = f"{point.call.name}:{INJECTIONS[point.kind].format(k=point.call.k)}"
        run = traced(lambda: perform(transition.new, copy, target), trace, inject)
        made = [call.name for call in run.calls if call.changes(root)]
        planned = [call.name for call in point.prepared.calls[: point.ordinal + 1]]
        is_drifted = made[: len(planned)] != planned
        marks = ("killed by SIGKILL", "--- SIGINT", "(INJECTED)")
        if not any(mark in run.raw for mark in marks):
            missed = Judgement(problems=[("missed", "the call was not reached")])
            return Outcome(point, missed.settle("missed"), run.status, run.report, is_drifted)
        baseline = point.prepared.baseline
        judgement = judge(transition, baseline, examined(point.prepared, copy, target), run, point.kind)
        return Outcome(point, judgement, run.status, run.report, is_drifted)
    finally:
        shutil.rmtree(root, ignore_errors=True)
        trace.unlink(missing_ok=True)
