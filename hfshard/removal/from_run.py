"""Remove a checkpoint of a run in a directory, or the leftovers of killed saves, under the run's lock."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from hfshard.constants import SAFETENSORS_SUFFIX, SIGNATURE_NAME
from hfshard.errors import FileError, HfshardError
from hfshard.format.file_names import INDEX_FILE
from hfshard.removal.from_directory import find_files, shown_names, unlink_in_order
from hfshard.removal.removal_plan import NOT_ITS_OWN, SMALL_FILES, FoundFile, Removal, RemovalPlan, in_phases
from hfshard.training.run.manifest import CHECKPOINT, MANIFEST, TRAINING_STATE, RunCheckpoint, read_manifest
from hfshard.training.run.run_directory import RunLock, clean_up_run, leftovers_in, remove_step_directory


def remove_from_run(directory: str) -> Removal:
    """Plan the removal of one training checkpoint: the files that its manifest names, the manifest and the signature.

    In a run, a folder without other files goes by one rename, as in a rotation. Otherwise the files go one by one, and
    other files stay in the folder. The manifest goes last, so that every reader finds the checkpoint damaged until it
    is gone.
    """
    make_plan = partial(_plan_step, directory)
    plan = make_plan()

    def carry_out() -> None:
        with _locked(directory):
            now = make_plan()
            plan.check_same(now)
            if now.kept or not _is_in_run(directory):
                unlink_in_order(now)
            else:
                _remove_folder(directory)
            if not now.kept and os.path.isdir(directory):
                os.rmdir(directory)

    return Removal(plan.report(), carry_out)


def remove_leftovers_from_run(root: str) -> Removal:
    """Plan the removal of the hidden folders that killed saves have left in a run."""
    make_plan = partial(_plan_leftovers, root)
    plan = make_plan()

    def carry_out() -> None:
        if not plan.found:
            return
        with _run_lock(root):
            plan.check_same(make_plan())
            clean_up_run(root)

    return Removal(plan.report(), carry_out)


def _plan_step(directory: str) -> RemovalPlan:
    listed = shown_names(directory)
    own = {name for name in listed if name in _own_names(directory, set(listed)) and listed[name] == name}
    kept = {shown: NOT_ITS_OWN for name, shown in listed.items() if name not in own}
    return RemovalPlan(directory, in_phases(own, _phase_of), find_files(directory, own), kept)


def _own_names(directory: str, listed: set[str]) -> set[str]:
    """Find the files of a checkpoint by its manifest; without a valid one, by the names that saves use."""
    try:
        return {*read_manifest(directory).files, MANIFEST, SIGNATURE_NAME}
    except HfshardError:
        usual = {MANIFEST, TRAINING_STATE, *SMALL_FILES}
        return {name for name in listed if name in usual or name.endswith(SAFETENSORS_SUFFIX) or _is_index(name)}


def _is_index(name: str) -> bool:
    return INDEX_FILE.fullmatch(name) is not None


def _phase_of(name: str) -> int:
    """Return the phase of a file: weights first, while indexes and the manifest name them, an error for readers."""
    if name in (TRAINING_STATE, MANIFEST):
        return 2 if name == TRAINING_STATE else 3
    return 1 if _is_index(name) else 0


def _remove_folder(directory: str) -> None:
    root, name = os.path.split(directory)
    step = int(name.rpartition("-")[2])
    remove_step_directory(RunCheckpoint(directory, step).read(), root)
    if os.path.lexists(directory):
        raise FileError(
            f"'{directory}' could not be removed: see the warning. Check the permissions of the directory above it.",
            path=directory,
        )


def _plan_leftovers(root: str) -> RemovalPlan:
    left, put_back = leftovers_in(root)
    found: dict[str, FoundFile] = {}
    phases = []
    for name in left:
        below = {os.path.join(name, path): one for path, one in _files_below(os.path.join(root, name))}
        found |= below
        phases.append(sorted(below))
    kept = {shown: "not a leftover of a save" for name, shown in shown_names(root).items() if name not in left}
    kept |= {f"{name}/": "a checkpoint that a killed save was replacing: it is restored" for name in put_back}
    return RemovalPlan(root, phases, found, kept)


def _files_below(folder: str) -> Iterator[tuple[str, FoundFile]]:
    """Yield the files in a folder, or the file in its place; "" is the folder itself, of no size."""
    status = os.lstat(folder)
    yield "", FoundFile(0, (status.st_dev, status.st_ino))
    if stat.S_ISDIR(status.st_mode):
        for above, _, names in os.walk(folder):
            for name in names:
                path = os.path.relpath(os.path.join(above, name), folder)
                yield path, find_files(folder, [path])[path]


@contextmanager
def _locked(directory: str) -> Iterator[None]:
    """Hold the lock of a checkpoint's run, or of the checkpoint itself if it is a copy outside a run."""
    with _run_lock(os.path.dirname(directory) if _is_in_run(directory) else directory):
        yield


def _is_in_run(directory: str) -> bool:
    return CHECKPOINT.fullmatch(os.path.basename(directory)) is not None


@contextmanager
def _run_lock(root: str) -> Iterator[None]:
    lock = RunLock(root)
    try:
        yield
    finally:
        lock.release()
