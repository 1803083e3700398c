"""A run directory: one directory for each step, which appears by one rename and disappears by another."""

from __future__ import annotations

import logging
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Final

from hfshard.constants import MARKS
from hfshard.disk.fsops import sync_directory
from hfshard.format.stored_save import split_object_name
from hfshard.training.run.manifest import MANIFEST, read_checkpoint_manifest
from hfshard.training.run.root import names_in
from hfshard.training.run.run_checkpoint import (
    CHECKPOINT,
    RunCheckpoint,
    checkpoint_path,
    is_own_name,
    newest_first,
    read_run_checkpoint,
)

logger = logging.getLogger(__name__)

_WRITING: Final = re.compile(r"\.tmp-(\d+)-(\d+)")
_REPLACED: Final = re.compile(r"\.replaced-(\d+)-(\d+)")
"""A checkpoint that another save of the same step is replacing; it counts until the new one is in place."""
_REMOVED: Final = re.compile(r"\.removed-(\d+)-(\d+)")

_LOOKS: Final = 100
"""How often a run is listed again, at most, while another process saves into it."""


def writing_path(root: str, step: int) -> str:
    """The path where a checkpoint is written until it is complete."""
    return os.path.join(root, f".tmp-{step}-{os.getpid()}")


def checkpoints_in(root: str) -> list[RunCheckpoint]:
    """List every checkpoint in a run directory, damaged ones too, as `newest_first` sorts them."""
    found: list[RunCheckpoint] = []
    for _ in range(_LOOKS):
        names = _names_in(root)
        gone: list[str] = []
        found = [_read(os.path.join(root, name), step) for name, step in _step_directories(root, names, gone)]
        if not gone and _names_in(root) == names:
            break
    return newest_first(found)


def _read(path: str, step: int) -> RunCheckpoint:
    return read_run_checkpoint(path, step, partial(read_checkpoint_manifest, path))


def _names_in(root: str) -> list[str]:
    return sorted(name for name in names_in(root) if CHECKPOINT.fullmatch(name) or _REPLACED.fullmatch(name))


def _step_directories(root: str, names: list[str], gone: list[str]) -> Iterator[tuple[str, int]]:
    """The name and step of each directory among some names that is a checkpoint; those that vanished come to `gone`.

    A name may have a directory again by the time the names are compared, that of the next save.

    Those that were moved aside count where nothing has replaced them, and those of other names, such as a user's copy
    `checkpoint-4`, where the step has no other and they have a manifest: without one, they are another tool's.
    """
    steps: set[int] = set()
    for name in names:
        match = CHECKPOINT.fullmatch(name)
        if match is not None and is_own_name(name, step := int(match[1])):
            steps.add(step)
            if _is_directory(root, name, gone):
                yield name, step
    for name in names:
        match = _REPLACED.fullmatch(name)
        if match is not None and (step := int(match[1])) not in steps and _is_directory(root, name, gone):
            yield name, step
    for name in names:
        match = CHECKPOINT.fullmatch(name)
        if match is None or (step := int(match[1])) in steps:
            continue
        if os.path.lexists(os.path.join(root, name, MANIFEST)):
            steps.add(step)
            yield name, step


def _is_directory(root: str, name: str, gone: list[str]) -> bool:
    path = os.path.join(root, name)
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except FileNotFoundError:
        if not os.path.islink(path):
            gone.append(name)
    except OSError:
        pass  # it is nothing that can be read, now and later
    return False


def clean_up_run(root: str) -> None:
    """Remove what killed saves left, and put back what they had moved aside; the caller holds the run's lock."""
    for one in _moved_aside(root):
        target = checkpoint_path(root, one.step)
        logger.info("Putting '%s' back, which a killed save was about to replace.", target)
        os.rename(one.path, target)
        sync_directory(root)
    for name in leftovers_in(root)[0]:
        path = os.path.join(root, name)
        logger.info("Removing '%s', left by a save that was killed.", path)
        if (replaced := _REPLACED.fullmatch(name)) is not None:  # it must not come back when its successor is removed
            _remove(path, root, int(replaced[1]))
        else:
            _remove_tree(path)
    _remove_marks(root)


def _remove_marks(root: str) -> None:
    """Remove the marks of saves of a run that was synced from a store: in a directory nobody reads them."""
    folder = os.path.join(root, MARKS)
    for name in os.listdir(folder) if os.path.isdir(folder) and not os.path.islink(folder) else ():
        split = split_object_name(name)
        if split is not None and CHECKPOINT.fullmatch(split[0]):
            os.unlink(os.path.join(folder, name))
    with suppress(OSError):  # there is none, or files of others are in it
        os.rmdir(folder)


def leftovers_in(root: str) -> tuple[list[str], list[str]]:
    """Name what killed saves left in a run: the folders that `clean_up_run` removes, and those that it puts back."""
    put_back = [os.path.basename(one.path) for one in _moved_aside(root)]
    patterns = (_WRITING, _REPLACED, _REMOVED)
    left = [name for name in sorted(os.listdir(root)) if any(pattern.fullmatch(name) for pattern in patterns)]
    return [name for name in left if name not in put_back], put_back


def _moved_aside(root: str) -> list[RunCheckpoint]:
    """Find the checkpoints that nothing has replaced yet; of several of one step, the one that was saved last."""
    aside: dict[int, RunCheckpoint] = {}
    for one in checkpoints_in(root):
        if _REPLACED.fullmatch(os.path.basename(one.path)) and not os.path.lexists(checkpoint_path(root, one.step)):
            aside.setdefault(one.step, one)
    return list(aside.values())


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
