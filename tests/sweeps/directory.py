"""The sweep of saves: each reader loads wholly the old or wholly the new checkpoint, and the next save succeeds."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from safetensors.torch import save_file

from hfshard.errors import SaveDirectoryError
from tests.foreign import like_deepspeed
from tests.foreign.dcp_files import save_dcp
from tests.sweeps.child import Aside, Run, traced
from tests.sweeps.directory_models import (
    TARGETS,
    Content,
    Target,
    aligned_limit_of,
    build_model,
    expected,
    model_class,
    prepare_libraries,
)
from tests.sweeps.directory_readers import READERS, Reader, Verdict, read_all
from tests.sweeps.directory_transitions import FROM_ELSEWHERE, Save, Transition, all_transitions
from tests.sweeps.engine import (
    INJECTIONS,
    Judgement,
    Point,
    Recorded,
    TracedSuite,
    Tree,
    files_below,
    injection,
    write_files,
)
from tests.sweeps.power import SaveDisk, below, cuts, effect_of

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


Snapshot = Mapping[str, str]
"""Relative path -> kind, mode and digest."""


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


class SavesSuite(TracedSuite[Transition, Baseline]):
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
        self._aside = Aside()

    def transitions(self) -> tuple[Transition, ...]:
        """Every transition; those of another writer are judged by stock readers."""
        is_stock = self.target != "hfshard"
        made = (replace(one, stock_only=is_stock) for one in all_transitions())
        return tuple(one for one in made if not (is_stock and one.needs_shards_of_a_plain_module))

    def warm(self, place: Path) -> None:
        """Save every kind of content once, and read it in every way: no fork has to compile or to import."""
        super().warm(place)
        prepare_libraries()
        for content in self.warmed:
            for layout in ("single", "three", "single"):
                plain = Save(content, layout)
                for save in (plain, replace(plain, bare=True), replace(plain, variant="fp16")):
                    perform(save, place / f"warm-{content.arch}-{save.bare}", self.writer)
            read_all([Reader(name) for name in READERS], place / f"warm-{content.arch}-False", [content])

    def build(self, transition: Transition, root: Path) -> Path:
        """Save all that was there before, beside the bystanders; build what is saved and expected."""
        directory = root / self.inside
        for save in (*transition.before, transition.new, transition.next):
            if save.by in FROM_ELSEWHERE and not _source_of(save, root.parent).exists():
                _make_source(save, root, self.writer)
        if transition.before or transition.is_made:
            directory.mkdir()
            write_files(
                {name: f"{name} does not belong to the save\n".encode() for name in transition.bystanders}, directory
            )
        self.perform_before(transition.before, partial(perform, target=self.writer), directory)
        for content in transition.contents:
            self.writer.model(content)
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

    def judge(self, point: Point[Transition, Baseline], run: Run, directory: Path) -> Judgement:
        """Ask every reader, then save twice more: aside, and once for the same files, as most errors are undone."""
        transition, baseline = point.recorded.transition, point.recorded.baseline
        key = (transition.name, frozenset(snapshot(directory).items()))
        seen = self._aside.remember(key, examine, transition, baseline, directory, self.writer)
        return judge(transition, baseline, seen, run, point.kind)

    def cuts(self, recorded: Recorded[Transition, Baseline], root: Path) -> Iterator[tuple[int, Tree, bool]]:
        """What a power cut may leave after each call: the bytes of each moment, and any of the names."""
        trees = [self._tree_before(recorded, ordinal, root) for ordinal in range(len(recorded.calls) + 1)]
        effects = [effect_of(call) for call in recorded.calls]
        seen = [None if one is None or one.kind == "rmdir" else below(one, recorded.recorded_in) for one in effects]
        for ordinal, tree, _ in cuts(SaveDisk(recorded.template), seen, lambda ordinal: trees[ordinal + 1]):
            yield ordinal, tree, False

    def _tree_before(self, recorded: Recorded[Transition, Baseline], ordinal: int, root: Path) -> dict[str, bytes]:
        """What the directory holds before a call: the save is killed there."""
        here = root / "tree"
        directory = self.copy(recorded.template, here)
        inject = None
        if ordinal < len(recorded.calls):
            inject = injection(recorded.calls[ordinal], INJECTIONS["kill"])
        traced(lambda: self.perform(recorded.transition, directory), root / "trace", inject)
        found = files_below(directory)
        shutil.rmtree(here)
        return found


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


def same(one: Verdict, other: Verdict) -> bool:
    """Whether two verdicts are the same generation, both errors, or the same mixture (upstream's, from before)."""
    if one.kind == other.kind == "mixed":
        return one.detail == other.detail
    return one.kind == other.kind and one.generation == other.generation


_known: dict[tuple[str, frozenset[tuple[str, str]]], Mapping[str, Verdict]] = {}
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

    def excuse(label: str, verdict: Verdict) -> str:
        is_forgiven = verdict.kind == "error" and label in FORGIVEN and FORGIVEN[label] in verdict.detail
        if is_forgiven:
            found.notes.append(f"{label}: an error between old and new")
        return "either" if is_forgiven else ""

    sides = judge_readers(transition, baseline, verdicts, found, excuse)
    quiet = sides.pop() if len(sides) == 1 else "ok-split"
    if spoiled := touched(baseline.snapshot, left, transition.bystanders):
        found.add("wrong", f"bystanders touched: {spoiled}")
    left_over = litter(directory, transition)
    again = directory.with_name("again")
    if directory.exists():
        shutil.copytree(directory, again, symlinks=True)
    _judge_next(transition, baseline, target, transition.new, again, "the same save again", found)
    _judge_next(transition, baseline, target, transition.next, directory, "the next save", found)
    return Examination(left, verdicts, quiet, found, left_over)


def judge(transition: Transition, baseline: Baseline, seen: Examination, run: Run, kind: str) -> Judgement:
    """Judge what was found after a save that ended as `run` tells."""
    found = deepcopy(seen.judgement)
    if kind in ("kill", "power"):
        return found.settle(FAILURES, seen.quiet)
    is_new = all(same(verdict, baseline.after[label]) for label, verdict in seen.verdicts.items())
    is_old = all(same(verdict, baseline.before[label]) for label, verdict in seen.verdicts.items())
    changes = difference(baseline.snapshot, seen.left)
    told = re.split("[: ]", run.report, maxsplit=1)[0]
    if run.status == "hung":
        found.add("hung", "the save did not end")
    elif run.status == "saved":
        if not run.report or kind == "int":
            found.add("silent", f"the save returned as if nothing had happened; {run.report!r}")
        if not is_new:
            found.add("wrong", "the save returned, and the new checkpoint is not there for all readers")
        if seen.left_over:
            found.notes.append(f"left by a save that returned: {seen.left_over}")
    elif transition.new.by == "regroup":
        pass  # an error leaves the groups that were committed before it, by design
    elif is_old and not is_new and changes and not _is_only_cleaned_up(transition, changes):
        found.add("unrestored", f"an error before the commit left changes: {changes}")
    elif not is_old and told not in ("CommitUnfinishedError", "KeyboardInterrupt"):
        found.notes.append(f"after the commit, {told} was raised")
    return found.settle(FAILURES, seen.quiet)


def judge_readers(
    transition: Transition,
    baseline: Baseline,
    verdicts: Mapping[str, Verdict],
    found: Judgement,
    excuse: Callable[[str, Verdict], str],
) -> set[str]:
    """Hold every verdict against before and after.

    Args:
        transition: That was stopped.
        baseline: What it looks like when nothing is stopped.
        verdicts: What each reader loads now.
        found: Takes what is wrong.
        excuse: Gives the category of what a reader may find beside the old and the new; "either": it does not count;
            empty: it is wrong.

    Returns:
        The categories if nothing is wrong.
    """
    sides = set()
    for label, verdict in verdicts.items():
        old, new = baseline.before[label], baseline.after[label]
        if verdict.kind == old.kind == "error":
            if not verdict.is_clear:
                found.add("unloadable", f"{label}: unclear {verdict}")
            sides.add("clear-error" if not transition.before else "ok-old")
        elif same(verdict, new):
            sides.add("ok-new" if not same(old, new) else "either")
        elif same(verdict, old):
            sides.add("ok-old")
        elif side := excuse(label, verdict):
            sides.add(side)
        else:
            category = "unloadable" if verdict.kind == "error" else "wrong"
            found.add(category, f"{label}: {verdict}, before {old}, after {new}")
    return sides - {"either"} if sides != {"either"} else {"ok-new"}


def _is_only_cleaned_up(transition: Transition, changes: str) -> bool:
    """Whether a directory with a killed save's wreck has only lost some of it: a save cleans up before it fails."""
    has_wreck = any(save.killed_at is not None for save in transition.before)
    return has_wreck and all(change.startswith("-") for change in changes.split())


def _judge_next(
    transition: Transition, baseline: Baseline, target: Target, save: Save, place: Path, word: str, found: Judgement
) -> None:
    """Carry out a save after the stopped one: it must succeed, load and leave no litter."""
    try:
        perform(save, place, target)
    except Exception as error:
        found.add("unloadable", f"{word} failed: {type(error).__name__}: {error}")
        return
    left = snapshot(place)
    for label, verdict in read(transition, place).items():
        want = baseline.after[label]
        if want.kind == "whole" and want.generation == transition.new.content.generation:
            want = replace(want, generation=save.content.generation)
        if not same(verdict, want):
            found.add(
                "unloadable" if verdict.kind == "error" else "wrong", f"after {word}, {label}: {verdict}, not {want}"
            )
        if verdict.note:
            found.add("wrong", f"after {word}, {label}: {verdict.note}")
    if left_over := litter(place, transition):
        found.add("litter", f"after {word}: {left_over}")
    if spoiled := touched(baseline.snapshot, left, transition.bystanders):
        found.add("wrong", f"after {word}, bystanders touched: {spoiled}")


def perform(save: Save, directory: Path, target: Target) -> None:
    """Save once, from beginning to end."""
    with _no_links() if save.without_links else nullcontext():
        _perform(save, directory, target)


@contextmanager
def _no_links() -> Iterator[None]:
    """Refuse hard links, as some file systems do."""
    kept = os.link

    def refuse(source: str, target: str) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), source, None, target)

    os.link = refuse  # type: ignore[assignment]
    try:
        yield
    finally:
        os.link = kept


def _perform(save: Save, directory: Path, target: Target) -> None:
    if save.by == "bin":
        _save_bin(save, directory)
    elif save.by == "stock-killed":
        _leave_strays(save, directory)
    elif save.by in ("reshard", "regroup", *FROM_ELSEWHERE):
        _transfer(save, directory)
    elif save.bare:
        target.save_weights(save.content, directory, save.layout)
    else:
        writer = target if save.by == "target" else TARGETS[save.by]
        writer.save(save.content, directory, save.layout, save.variant)


def _leave_strays(save: Save, directory: Path) -> None:
    """Leave two shards of nine, under names that the checkpoint there does not use, and no index."""
    want = expected(save.content)
    names = sorted(want.stored)
    for number in (1, 2):
        tensors = {name: want.full[name].clone() for name in names[number::9]}
        save_file(tensors, directory / f"model-{number:05d}-of-00009.safetensors", metadata={"format": "pt"})


def _transfer(save: Save, directory: Path) -> None:
    """Re-shard the weights that lie there, or in the directory that `build` made for it; or pull from that one."""
    import hfshard

    places = [_source_of(save, above) for above in directory.parents] if save.by in FROM_ELSEWHERE else [directory]
    source = next(place for place in places if place.exists())
    if save.by == "pull":
        try:
            hfshard.pull_checkpoint(source, directory)
        except SaveDirectoryError:
            if [*directory.glob("*.safetensors*")]:
                raise
            # Before its weights, the config of a killed pull is anyone's; the error says what to do.
            hfshard.pull_checkpoint(source, directory, overwrite=True)
        return
    limit = aligned_limit_of(save.content, save.layout)
    only_pickles = False if save.by.startswith("convert-") else None  # as `hfshard convert` does
    hfshard.reshard_checkpoint(source, directory, limit, low_disk=save.by == "regroup", use_safetensors=only_pickles)


def _make_source(save: Save, root: Path, target: Target) -> None:
    """Make the directory that is read from, for all transitions; another process may make it at the same time."""
    import hfshard

    made = _source_of(save, root)
    if save.by == "reshard-from":
        perform(replace(save, by="target", layout="two"), made, target)
    elif save.by == "pull":
        pushed = root / "pushed"
        perform(replace(save, by="target", killed_at=None), pushed, target)
        hfshard.push_checkpoint(pushed, made)
        shutil.rmtree(pushed)
    else:
        _save_in_parts(save, made)
    with suppress(OSError):  # the other process was faster
        made.rename(_source_of(save, root.parent))


def _source_of(save: Save, place: Path) -> Path:
    content = save.content
    return place / f"source-{save.by}-{save.layout}-{content.arch}-{content.generation}"


def _save_in_parts(save: Save, directory: Path) -> None:
    """Save as torch.distributed.checkpoint or DeepSpeed does, with the config that Trainer puts there."""
    build_model(save.content, model_class(save.content.arch)).config.save_pretrained(directory)
    want = expected(save.content)
    weights = {name: want.full[name] for name in sorted(want.stored)}
    if save.by == "convert-dcp":
        save_dcp(directory, {f"model.{name}": tensor for name, tensor in weights.items()})
        return
    files = like_deepspeed.zero_partitions(2, 2, [weights])
    files["mp_rank_00_model_states.pt"] = like_deepspeed.state_of_model(
        [weights], {name: tensor.bfloat16() for name, tensor in weights.items()}, buffer_names=[], shared_params={}
    )
    like_deepspeed.write(directory / "global_step1", files)
    (directory / "latest").write_text("global_step1")


def _save_bin(save: Save, directory: Path) -> None:
    """Save as was done before safetensors: torch.save, in one file or in several with an index."""
    from tests.saving.helpers import write_bins  # and hypothesis, which no other save needs

    want = expected(save.content)
    build_model(save.content, model_class(save.content.arch)).config.save_pretrained(directory)
    tensors = {name: want.full[name] for name in sorted(want.stored)}
    write_bins(directory, tensors, files={"single": 1, "two": 2, "three": 3}[save.layout])


def snapshot(directory: Path) -> Snapshot:
    """Every file and directory below, with mode and digest; empty where there is no directory."""
    found = {}
    for base, directories, files in os.walk(directory):
        for name in directories:
            found[os.path.relpath(os.path.join(base, name), directory) + "/"] = "directory"
        for name in files:
            path = os.path.join(base, name)
            mode = stat.filemode(os.lstat(path).st_mode)
            digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
            found[os.path.relpath(path, directory)] = f"{mode} {digest[:16]}"
    return found


def difference(before: Snapshot, after: Snapshot) -> str:
    """What was added, lost and changed, in words; empty when nothing."""
    parts = [f"+{name}" for name in sorted(after.keys() - before.keys())]
    parts += [f"-{name}" for name in sorted(before.keys() - after.keys())]
    parts += [f"~{name}" for name in sorted(before.keys() & after.keys()) if before[name] != after[name]]
    return " ".join(parts)


def litter(directory: Path, transition: Transition) -> str:
    """What lies in a directory beyond, or lacks from, the exact listing after a whole save; empty when nothing."""
    here = snapshot(directory)
    want = _directories(transition.bystanders if transition.before or transition.is_made else ())
    saves = (*transition.before, transition.new)
    want |= companions(transition)
    for variant in dict.fromkeys(save.variant for save in saves):
        infix = f".{variant}" if variant else ""
        index = f"model.safetensors.index{infix}.json"
        if index in here:
            want |= {index, *_weight_map(directory / index).values()}
        else:
            want.add(f"model{infix}.safetensors")
    parts = [f"+{name}" for name in sorted(here.keys() - want)] + [f"-{name}" for name in sorted(want - here.keys())]
    return " ".join(parts)


def companions(transition: Transition) -> set[str]:
    """The files that belong to a model beside its weights."""
    wanted = set()
    if not (transition.new.bare or transition.new.content.no_config):
        wanted.add("config.json")
    if transition.new.content.arch == "gpt2":
        wanted.add("generation_config.json")
    if transition.new.content.arch == "net":
        wanted.add("README.md")
    return wanted


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor -> file; nothing of an index that is cut off."""
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
    except ValueError:
        return {}
    return dict(weight_map)


def _directories(names: tuple[str, ...]) -> set[str]:
    """The bystanders and the directories that they lie in."""
    found = set(names)
    for name in names:
        found |= {f"{parent}/" for parent in Path(name).parents if str(parent) != "."}
    return found


def touched(before: Snapshot, after: Snapshot, names: tuple[str, ...]) -> str:
    """Bystanders that a save changed or lost; empty when none."""
    return " ".join(name for name in names if before.get(name) != after.get(name))
