"""Find the checkpoints of a run, and distinguish intact ones from damaged ones."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Final, Literal

from hfshard._util.addresses import is_store_address
from hfshard._util.progress import byte_progress
from hfshard.checkpoint.check_files import ReplacedMeanwhile, check_files, retry_if_replaced
from hfshard.checkpoint.folder import Folder, LocalFolder
from hfshard.errors import (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    HfshardError,
    InvalidArgumentError,
    StoreError,
)
from hfshard.format.file_names import WeightNames
from hfshard.training.run.manifest import (
    CheckpointManifest,
    RunCheckpoint,
    is_still_in,
    read_manifest,
    read_run_checkpoint,
)
from hfshard.training.run.run_directory import RunDirectory
from hfshard.training.run.run_storage import RunStorage
from hfshard.training.run.run_store import RunStore, stored_checkpoint
from hfshard.training.state.collect_state import PARTS

logger = logging.getLogger(__name__)

_RUN_TRAITS: Final = replace(LocalFolder.traits, retries=50)
"""Traits of a reader of a run whose checkpoints are being replaced: it may save constantly and keep only one."""

Level = Literal["structure", "full"]


def manifests_in(storage: RunStorage) -> list[CheckpointManifest]:
    """Return the manifests of all finished checkpoints; the one that was saved last comes first."""
    return [one.manifest for one in storage.checkpoints() if one.manifest is not None]


def checkpoint_of_step(storage: RunStorage, step: int) -> RunCheckpoint:
    """Find the checkpoint of a step, damaged or not.

    Raises:
        CheckpointNotFoundError: There is none of this step.
    """
    found = storage.checkpoints()
    if candidates := [one for one in found if one.step == step]:
        return max(candidates, key=lambda one: one.manifest is not None)  # another tool's directory may exist as well
    steps = ", ".join(str(one.step) for one in found) or "none"
    raise CheckpointNotFoundError(
        f"There is no checkpoint of step {step} in '{storage.root}'. It has: {steps}.", path=storage.root
    )


def check_run_checkpoint(
    checkpoint: RunCheckpoint, verify: Level, progress: bool | None = None, *, is_read_next: bool = False
) -> CheckpointManifest:
    """Check that the files of a checkpoint are those that were saved, and return its manifest.

    Args:
        checkpoint: The checkpoint.
        verify: "structure": sizes, headers and fingerprints; "full": every byte.
        progress: Whether to show a bar with "full".
        is_read_next: Leave to the reader what it compares while it reads.

    Raises:
        DamagedCheckpointError, UnsafePathError: A file is missing, or differs from the saved one.
    """
    if verify not in ("structure", "full"):
        raise InvalidArgumentError(f"verify must be 'structure' or 'full', got {verify!r}.")
    if checkpoint.manifest is None:
        raise checkpoint.problem or RuntimeError(f"'{checkpoint.path}' has no manifest.")
    folder = folder_at(checkpoint.path)
    if is_read_next and folder.traits.verifies_reads:
        return checkpoint.manifest
    total = sum(record.size or 0 for record in checkpoint.manifest.files.values())
    with byte_progress("Verifying", total, progress if verify == "full" else False) as progress_callback:
        check_files(folder, checkpoint.manifest.files, verify, progress_callback=progress_callback)
    return checkpoint.manifest


def newest_intact(
    storage: RunStorage,
    verify: Level,
    progress: bool | None = None,
    *,
    is_read_next: bool = False,
    passed_over: Collection[str] = (),
) -> tuple[RunCheckpoint, CheckpointManifest] | None:
    """Find the intact checkpoint that was saved last; warn of each that is skipped. Return None for an empty run.

    Args:
        storage: The run's.
        verify, progress, is_read_next: As in `check_run_checkpoint`.
        passed_over: Paths of checkpoints that proved damaged when they were read.

    Raises:
        DamagedCheckpointError: All checkpoints are damaged.
        StoreError: The store did not respond, or refused.
    """

    def find() -> tuple[RunCheckpoint, CheckpointManifest] | None:
        found = storage.checkpoints()
        damaged: list[tuple[RunCheckpoint, HfshardError]] = []
        for one in (one for one in found if one.path not in passed_over):
            try:
                manifest = check_run_checkpoint(one, verify, progress, is_read_next=is_read_next)
            except (InvalidArgumentError, StoreError):
                raise  # a failing store says nothing about the checkpoint
            except HfshardError as error:
                if has_changed(one):  # a run that is saving there has removed it, and has a newer one
                    raise ReplacedMeanwhile from error
                damaged.append((one, error))
            else:
                _warn_of(damaged)
                return one, manifest
        _warn_of(damaged)
        if not found:
            return None
        raise DamagedCheckpointError(
            f"None of the {len(found)} checkpoints in '{storage.root}' is intact. The warnings say what is wrong "
            "with each. To train from the beginning, pass the manager another directory.",
            path=storage.root,
        )

    too_often = f"The checkpoints in '{storage.root}' were replaced while they were being read. Retry."
    return retry_if_replaced(find, _RUN_TRAITS, storage.root, too_often)


def _warn_of(damaged: list[tuple[RunCheckpoint, HfshardError]]) -> None:
    for one, error in damaged:
        logger.warning("Skipped the checkpoint '%s': %s", one.path, error)


def checkpoint_problems(
    checkpoint: RunCheckpoint, level: Level, progress_callback: Callable[[int], object] | None = None
) -> list[HfshardError]:
    """List the problems of a checkpoint; `progress_callback` gets the bytes that were hashed."""
    problems: list[HfshardError] = []
    if checkpoint.manifest is not None:
        folder = folder_at(checkpoint.path)
        records = checkpoint.manifest.files
        check_files(folder, records, level, progress_callback=progress_callback, on_problem=problems.append)
        problems += _strays(folder, checkpoint.manifest)
    elif checkpoint.problem is not None:
        problems.append(checkpoint.problem)
    return problems


def live_problems(checkpoint: RunCheckpoint, level: Level) -> list[HfshardError] | None:
    """List the current problems of a checkpoint; None if a run that is saving there has removed it.

    Raises:
        CheckpointChangedError: The checkpoint was replaced on every attempt.
    """
    latest = checkpoint

    def check() -> list[HfshardError] | None:
        nonlocal latest
        problems = checkpoint_problems(latest, level)
        if not problems or not has_changed(latest):
            return problems
        if not folder_at(latest.path).exists():
            return None
        latest = checkpoint_at(latest.path, latest.step)
        raise ReplacedMeanwhile

    too_often = f"'{checkpoint.path}' was replaced while it was being checked. Retry."
    return retry_if_replaced(check, _RUN_TRAITS, checkpoint.path, too_often)


def _strays(folder: Folder, manifest: CheckpointManifest) -> list[HfshardError]:
    """Report files in a checkpoint that other tools would load instead of its own."""
    problems: list[HfshardError] = []
    for base in PARTS:
        names = WeightNames(base=base)
        path = os.path.join(folder.path, names.single)
        if names.single not in manifest.files and folder.has(names.single):
            problems.append(
                DamagedCheckpointError(
                    f"'{path}' does not belong to the checkpoint, but other tools load it instead of the checkpoint's "
                    "own files. Move it elsewhere.",
                    path=path,
                )
            )
    return problems


# Lookup by path: a run, or the files of one checkpoint.


def open_run(root: str) -> RunStorage:
    """Return the storage of a run; nothing is read or created yet."""
    return RunStore(root) if is_store_address(root) else RunDirectory(root)


def folder_at(path: str) -> Folder:
    """Return the folder of the checkpoint at a path; nothing is read yet."""
    return stored_checkpoint(path) if is_store_address(path) else LocalFolder(path)


def checkpoint_at(path: str, step: int) -> RunCheckpoint:
    """Read the manifest of one checkpoint, whose step must be the one in its name."""
    return read_run_checkpoint(path, step, partial(read_manifest, folder_at(path)))


def has_changed(checkpoint: RunCheckpoint) -> bool:
    """Return whether a checkpoint is gone from where it was found, or was replaced, by a run that is saving."""
    return not is_still_in(folder_at(checkpoint.path), checkpoint)
