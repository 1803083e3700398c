"""A run directory: one directory for each step, which appears by one rename and disappears by another."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from hfshard.errors import DamagedCheckpointError, HfshardError
from hfshard.storage.disk.fsops import sync_directory
from hfshard.training.run.manifest import MANIFEST, CheckpointManifest, read_checkpoint_manifest
from hfshard.training.run.root import names_in

logger = logging.getLogger(__name__)

_CHECKPOINT: Final = re.compile(r"checkpoint-(\d{1,18})")
_WRITING: Final = re.compile(r"\.tmp-(\d+)-(\d+)")
_REPLACED: Final = re.compile(r"\.replaced-(\d+)-(\d+)")
"""A checkpoint that another save of the same step is replacing; it counts until the new one is in place."""
_REMOVED: Final = re.compile(r"\.removed-(\d+)-(\d+)")

_LOOKS: Final = 100
"""How often a run is listed again, at most, while another process saves into it."""


@dataclass(frozen=True, slots=True)
class RunCheckpoint:
    """A directory that looks like a checkpoint."""

    path: str
    step: int
    manifest: CheckpointManifest | None
    problem: HfshardError | None = None
    """Why its manifest can't be read; None where it can."""

    @property
    def is_own(self) -> bool:
        """Whether a save has made it under this name; a copy that a user has made is never removed."""
        return self.manifest is not None and _is_own_name(os.path.basename(self.path), self.step)


def checkpoint_path(root: str, step: int) -> str:
    """The path of the checkpoint of a step."""
    return os.path.join(root, f"checkpoint-{step:08d}")


def writing_path(root: str, step: int) -> str:
    """The path where a checkpoint is written until it is complete."""
    return os.path.join(root, f".tmp-{step}-{os.getpid()}")


def checkpoints_in(root: str) -> list[RunCheckpoint]:
    """List every checkpoint in a run directory, damaged ones too; the one that was saved last comes first.

    Checkpoints whose manifest can't be read come before all others: nothing says when they were saved, and they must
    not be passed over silently.
    """
    names: list[str] = []
    found: list[RunCheckpoint] = []
    for _ in range(_LOOKS):
        names = _names_in(root)
        found = [read_run_checkpoint(os.path.join(root, name), step) for name, step in _step_directories(root, names)]
        if _names_in(root) == names:
            break
    return sorted(found, key=_age, reverse=True)


def has_changed(checkpoint: RunCheckpoint) -> bool:
    """Whether a checkpoint is no longer where it was found, or is another one: a run that saves has removed it."""
    now = read_run_checkpoint(checkpoint.path, checkpoint.step).manifest
    if now is None or checkpoint.manifest is None:
        return now is not checkpoint.manifest or not os.path.isdir(checkpoint.path)
    return (now.save_number, now.files) != (checkpoint.manifest.save_number, checkpoint.manifest.files)


def _names_in(root: str) -> list[str]:
    return sorted(name for name in names_in(root) if _CHECKPOINT.fullmatch(name) or _REPLACED.fullmatch(name))


def _step_directories(root: str, names: list[str]) -> Iterator[tuple[str, int]]:
    """The name and step of each directory among some names that is a checkpoint.

    Those that were moved aside count where nothing has replaced them, and those of other names, such as a user's copy
    `checkpoint-4`, where the step has no other and they have a manifest: without one, they are another tool's.
    """
    steps: set[int] = set()
    for name in names:
        match = _CHECKPOINT.fullmatch(name)
        if match is not None and _is_own_name(name, step := int(match[1])):
            steps.add(step)
            if os.path.isdir(os.path.join(root, name)):
                yield name, step
    for name in names:
        match = _REPLACED.fullmatch(name)
        if match is not None and (step := int(match[1])) not in steps and os.path.isdir(os.path.join(root, name)):
            yield name, step
    for name in names:
        match = _CHECKPOINT.fullmatch(name)
        if match is None or (step := int(match[1])) in steps:
            continue
        if os.path.lexists(os.path.join(root, name, MANIFEST)):
            steps.add(step)
            yield name, step


def _is_own_name(name: str, step: int) -> bool:
    return name == os.path.basename(checkpoint_path("", step))


def _age(one: RunCheckpoint) -> tuple[bool, int, int]:
    return one.manifest is None, one.manifest.save_number if one.manifest else 0, one.step


def read_run_checkpoint(path: str, step: int) -> RunCheckpoint:
    """Read the manifest of one checkpoint, which must be of the step in the directory's name."""
    try:
        manifest = read_checkpoint_manifest(path)
        if manifest.step != step:
            raise DamagedCheckpointError(
                f"'{path}' holds the checkpoint of step {manifest.step}. Rename it to "
                f"'{os.path.basename(checkpoint_path('', manifest.step))}', or move it elsewhere.",
                path=path,
                expected=step,
                actual=manifest.step,
            )
    except HfshardError as error:
        return RunCheckpoint(path, step, None, error)
    return RunCheckpoint(path, step, manifest)


def clean_up_run(root: str) -> None:
    """Remove what killed saves left, and put back what they had moved aside; the caller holds the run's lock."""
    for one in checkpoints_in(root):  # of several of one step, the one that was saved last
        target = checkpoint_path(root, one.step)
        if _REPLACED.fullmatch(os.path.basename(one.path)) and not os.path.lexists(target):
            logger.info("Putting '%s' back, which a killed save was about to replace.", target)
            os.rename(one.path, target)
            sync_directory(root)
    for name in sorted(os.listdir(root)):
        if any(pattern.fullmatch(name) for pattern in (_WRITING, _REPLACED, _REMOVED)):
            path = os.path.join(root, name)
            logger.info("Removing '%s', left by a save that was killed.", path)
            if (
                replaced := _REPLACED.fullmatch(name)
            ) is not None:  # it must not come back when its successor is removed
                _remove(path, root, int(replaced[1]))
            else:
                _remove_tree(path)


def put_in_place(written: str, root: str, step: int) -> str:
    """Make a written checkpoint the one of its step, by one rename; then remove the one that was there before.

    Returns:
        The path of the checkpoint.
    """
    target = checkpoint_path(root, step)
    aside: str | None = None
    try:
        if os.path.lexists(target):
            aside = _free_name(root, "replaced", step)
            os.rename(target, aside)
            sync_directory(root)
        os.rename(written, target)
    except BaseException:
        if aside is not None and os.path.lexists(aside) and not os.path.lexists(target):
            os.rename(aside, target)
        raise
    sync_directory(root)
    if aside is not None:
        _remove(aside, root, step)
    return target


def remove_checkpoint(checkpoint: RunCheckpoint, root: str) -> None:
    """Remove a checkpoint: first by one rename, then its files. What can't be removed is logged as a warning."""
    for name in _names_in(root):  # what it replaced must not come back in its place
        replaced = _REPLACED.fullmatch(name)
        if replaced is not None and int(replaced[1]) == checkpoint.step:
            _remove(os.path.join(root, name), root, checkpoint.step)
    _remove(checkpoint.path, root, checkpoint.step)


def _remove(path: str, root: str, step: int) -> None:
    aside = _free_name(root, "removed", step)
    try:
        os.rename(path, aside)
        sync_directory(root)  # or a power cut could leave it in place with half of its files
    except OSError as error:
        logger.warning("'%s' can't be removed (%s); the next save tries again.", path, error)
        return
    _remove_tree(aside)


def _free_name(root: str, what: str, step: int) -> str:
    """A name that is free: what could not be removed before may still be there."""
    number = os.getpid()
    while os.path.lexists(path := os.path.join(root, f".{what}-{step}-{number}")):
        number += 1
    return path


def _remove_tree(path: str) -> None:
    try:
        if os.path.islink(path) or not os.path.isdir(path):
            os.unlink(path)
        else:
            shutil.rmtree(path)
    except OSError as error:
        logger.warning("'%s' can't be removed (%s); the next run tries again.", path, error)
