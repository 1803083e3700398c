"""A run directory: one directory for each step, which comes by one rename and goes by another."""

from __future__ import annotations

import logging
import os
import re
import shutil
from dataclasses import dataclass
from typing import Final

from hfshard.errors import HfshardError
from hfshard.storage.durable import sync_directory
from hfshard.training.manifest import Manifest, read_manifest

logger = logging.getLogger(__name__)

_CHECKPOINT: Final = re.compile(r"checkpoint-(\d{1,18})")
_WRITING: Final = re.compile(r"\.tmp-(\d+)-(\d+)")
_REPLACED: Final = re.compile(r"\.replaced-(\d+)-(\d+)")
"""A checkpoint that another save of the same step is taking the place of; it counts until that one is there."""
_REMOVED: Final = re.compile(r"\.removed-(\d+)-(\d+)")


@dataclass(frozen=True, slots=True)
class Found:
    """A directory that looks like a checkpoint."""

    path: str
    step: int
    manifest: Manifest | None
    problem: HfshardError | None = None
    """Why its manifest can't be read."""


def checkpoint_path(root: str, step: int) -> str:
    """Where the checkpoint of a step lies."""
    return os.path.join(root, f"checkpoint-{step:08d}")


def writing_path(root: str, step: int) -> str:
    """Where a checkpoint is written before it is whole."""
    return os.path.join(root, f".tmp-{step}-{os.getpid()}")


def found_in(root: str) -> list[Found]:
    """Every checkpoint in a run directory, damaged ones too, the one that was saved last first."""
    found = []
    names = sorted(os.listdir(root)) if os.path.isdir(root) else []
    steps = {int(match[1]) for name in names if (match := _CHECKPOINT.fullmatch(name))}
    for name in names:
        match = _CHECKPOINT.fullmatch(name) or _REPLACED.fullmatch(name)
        path = os.path.join(root, name)
        if match is None or not os.path.isdir(path) or (name.startswith(".") and int(match[1]) in steps):
            continue
        found.append(look_at(path, int(match[1])))
    newest = max((one.manifest.sequence for one in found if one.manifest is not None), default=0)

    def age(one: Found) -> tuple[int, int]:
        # Where the manifest is gone only the step tells: after the checkpoints of lower steps.
        before = [other.manifest.sequence for other in found if other.manifest and other.step <= one.step]
        sequence = one.manifest.sequence if one.manifest else max(before, default=newest)
        return sequence, one.step

    return sorted(found, key=age, reverse=True)


def look_at(path: str, step: int) -> Found:
    """One checkpoint, by its manifest."""
    try:
        manifest = read_manifest(path)
    except HfshardError as error:
        return Found(path, step, None, error)
    return Found(path, manifest.step, manifest)


def sweep(root: str) -> None:
    """Remove what killed saves left, and put back what they had moved aside; the caller has the run's lock."""
    for name in sorted(os.listdir(root)):
        path = os.path.join(root, name)
        replaced = _REPLACED.fullmatch(name)
        if replaced is not None and not os.path.exists(target := checkpoint_path(root, int(replaced[1]))):
            logger.info("Putting '%s' back, which a killed save was about to replace.", target)
            os.rename(path, target)
            sync_directory(root)
        elif replaced is not None or _WRITING.fullmatch(name) or _REMOVED.fullmatch(name):
            logger.info("Removing '%s', left by a save that was killed.", path)
            shutil.rmtree(path)


def put_in_place(written: str, root: str, step: int) -> str:
    """Make a written checkpoint the one of its step, by one rename; what was there before goes then.

    Returns:
        Where it lies.
    """
    target = checkpoint_path(root, step)
    replaced = os.path.join(root, f".replaced-{step}-{os.getpid()}")
    had_one = os.path.lexists(target)
    if had_one:
        os.rename(target, replaced)
        sync_directory(root)
    try:
        os.rename(written, target)
    except BaseException:
        if had_one and not os.path.lexists(target):
            os.rename(replaced, target)
        raise
    sync_directory(root)
    if had_one:
        _remove_tree(replaced)
    return target


def remove(found: Found, root: str) -> None:
    """Remove a checkpoint: it is out of sight at once, and its files go then."""
    aside = os.path.join(root, f".removed-{found.step}-{os.getpid()}")
    os.rename(found.path, aside)
    _remove_tree(aside)


def _remove_tree(path: str) -> None:
    try:
        shutil.rmtree(path)
    except OSError as error:
        logger.warning("'%s' can't be removed (%s); the next run tries again.", path, error)
