"""Directories before a save: built by every kind of writer, listed, compared, and checked for litter."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.crash.saves.generations import build_model, expected, model_class
from tests.crash.saves.targets import ALIGNED_HEADER, TARGETS, Target, limit_of
from tests.crash.saves.transitions import Save, Transition

Snapshot = Mapping[str, str]
"""Relative path -> kind, mode and digest."""


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
    elif save.by in ("reshard", "regroup", "reshard-from"):
        _reshard(save, directory)
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


def _reshard(save: Save, directory: Path) -> None:
    """Re-shard the weights that lie there, or in the directory that `build` made for it."""
    import hfshard

    places = [_source_of(save, above) for above in directory.parents] if save.by == "reshard-from" else [directory]
    source = next(place for place in places if place.exists())
    limit = limit_of(save.content, save.layout) + ALIGNED_HEADER
    hfshard.reshard_checkpoint(source, directory, limit, low_disk=save.by == "regroup")


def _make_source(save: Save, root: Path, target: Target) -> None:
    """Make the directory that is re-sharded, for all transitions; another process may make it at the same time."""
    made = _source_of(save, root)
    perform(replace(save, by="target", layout="two"), made, target)
    with suppress(OSError):  # the other process was faster
        made.rename(_source_of(save, root.parent))


def _source_of(save: Save, place: Path) -> Path:
    content = save.content
    return place / f"source-{content.arch}-{content.generation}"


def _save_bin(save: Save, directory: Path) -> None:
    """Save as was done before safetensors: torch.save, in one file or in several with an index."""
    want = expected(save.content)
    build_model(save.content, model_class(save.content.arch)).config.save_pretrained(directory)
    names = sorted(want.stored)
    if save.layout == "single":
        torch.save({name: want.full[name] for name in names}, directory / "pytorch_model.bin")
        return
    count = {"two": 2, "three": 3}[save.layout]
    weight_map = {}
    for number in range(count):
        file = f"pytorch_model-{number + 1:05d}-of-{count:05d}.bin"
        mine = names[number::count]
        torch.save({name: want.full[name] for name in mine}, directory / file)
        weight_map.update(dict.fromkeys(mine, file))
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def build(transition: Transition, directory: Path, target: Target, perform_killed: Callable[[Save], None]) -> None:
    """Make the directory that a transition starts from.

    Args:
        transition: Which.
        directory: Path of the directory, in a root of its own.
        target: Who saves.
        perform_killed: Carries out a save that is killed.
    """
    root = directory.parent
    for save in (transition.new, transition.next):
        if save.by == "reshard-from" and not _source_of(save, root.parent).exists():
            _make_source(save, root, target)
    if transition.before or transition.is_made:
        directory.mkdir()
    for name in transition.bystanders if directory.exists() else ():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(f"{name} does not belong to the save\n")
    for save in transition.before:
        if save.killed_at is None:
            perform(save, directory, target)
        else:
            perform_killed(save)


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
    if not (transition.new.bare or transition.new.content.no_config):
        want.add("config.json")
    if transition.new.content.arch == "gpt2":
        want.add("generation_config.json")
    if transition.new.content.arch == "net":
        want.add("README.md")
    for variant in dict.fromkeys(save.variant for save in saves):
        infix = f".{variant}" if variant else ""
        index = f"model.safetensors.index{infix}.json"
        if index in here:
            want |= {index, *_weight_map(directory / index).values()}
        else:
            want.add(f"model{infix}.safetensors")
    parts = [f"+{name}" for name in sorted(here.keys() - want)] + [f"-{name}" for name in sorted(want - here.keys())]
    return " ".join(parts)


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
