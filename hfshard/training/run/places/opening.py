"""Finds the place of a run, or the files of one checkpoint, by its path."""

from __future__ import annotations

from hfshard._util.addresses import is_address
from hfshard.training.run.places.directory_place import DirectoryCheckpoint, DirectoryPlace
from hfshard.training.run.places.protocols import CheckpointFiles, RunPlace
from hfshard.training.run.places.run_store import StoreCheckpoint, StorePlace
from hfshard.training.run.run_checkpoint import RunCheckpoint, read_run_checkpoint


def run_place(root: str) -> RunPlace:
    """The place of a run; nothing is read or created yet."""
    return StorePlace(root) if is_address(root) else DirectoryPlace(root)


def files_at(path: str) -> CheckpointFiles:
    """The files of the checkpoint at a path; nothing is read yet."""
    return StoreCheckpoint(path) if is_address(path) else DirectoryCheckpoint(path)


def checkpoint_at(path: str, step: int) -> RunCheckpoint:
    """Read the manifest of one checkpoint, which must be of the step in its name."""
    return read_run_checkpoint(path, step, files_at(path).manifest)


def has_changed(checkpoint: RunCheckpoint) -> bool:
    """Whether a checkpoint is no longer where it was found, or is another one: a run that saves has removed it."""
    now = checkpoint_at(checkpoint.path, checkpoint.step).manifest
    if now is None or checkpoint.manifest is None:
        return now is not checkpoint.manifest or not files_at(checkpoint.path).is_there()
    return (now.save_number, now.files) != (checkpoint.manifest.save_number, checkpoint.manifest.files)
