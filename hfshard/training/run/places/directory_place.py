"""A run in a directory: locked while a manager lives, each checkpoint a folder that appears by one rename."""

from __future__ import annotations

import os
import shutil
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

from hfshard.checkpoint.open_checkpoint import OpenCheckpoint, open_checkpoint
from hfshard.commit.hub_marker import refuse_hub
from hfshard.constants import MAX_INDEX_BYTES
from hfshard.disk.byte_source import ByteSource, FileSource
from hfshard.disk.fsops import make_directories
from hfshard.disk.safe_open import read_small
from hfshard.errors import DamagedCheckpointError
from hfshard.shards.shard import SafetensorsShard
from hfshard.shards.shard_file import SafetensorsFile
from hfshard.training.run.directory import (
    checkpoints_in,
    clean_up_run,
    put_in_place,
    remove_checkpoint,
    writing_path,
)
from hfshard.training.run.lock import RunLock
from hfshard.training.run.manifest import MANIFEST, CheckpointManifest, check_files, read_checkpoint_manifest
from hfshard.training.run.places.protocols import CheckpointOrder
from hfshard.training.run.root import names_in, removed, saving_into
from hfshard.training.run.run_checkpoint import RunCheckpoint, read_run_checkpoint
from hfshard.training.run.writing import ReusableShards, write_checkpoint


class DirectoryCheckpoint:
    """The files of a checkpoint in a directory."""

    is_compared_when_read = False

    def __init__(self, path: str) -> None:
        self.path = path

    def is_there(self) -> bool:
        """Whether it is a directory."""
        return os.path.isdir(self.path)

    def has(self, name: str) -> bool:
        """Whether the directory has such a name."""
        return os.path.lexists(os.path.join(self.path, name))

    def names(self) -> list[str]:
        """List the directory."""
        return names_in(self.path)

    def size(self, name: str) -> int:
        """As the file system says."""
        return os.stat(os.path.join(self.path, name)).st_size

    def saved_at(self) -> datetime | None:
        """As the file system says."""
        return datetime.fromtimestamp(os.stat(os.path.join(self.path, MANIFEST)).st_mtime, UTC)

    def manifest(self) -> CheckpointManifest:
        """Read its manifest."""
        return read_checkpoint_manifest(self.path)

    def check(
        self,
        manifest: CheckpointManifest,
        *,
        is_full: bool,
        progress_callback: Callable[[int], object] | None = None,
        on_problem: Callable[[DamagedCheckpointError], object] | None = None,
    ) -> None:
        """Compare every file with the manifest, several at once."""
        check_files(self.path, manifest, is_full=is_full, progress_callback=progress_callback, on_problem=on_problem)

    def read_small(self, name: str) -> bytes:
        """Read a small file, through no link that leads elsewhere."""
        return read_small(os.path.join(self.path, name), self.path, MAX_INDEX_BYTES)[0]

    def open_shard(self, name: str) -> SafetensorsShard:
        """Open it, through no link that leads elsewhere."""
        return SafetensorsFile(os.path.join(self.path, name), self.path)

    def source(self, name: str, sha256: str | None) -> ByteSource:
        """Read it when it is asked for."""
        path = os.path.join(self.path, name)
        return FileSource(path, os.stat(path).st_size, sha256)

    def open_part(self, base: str, entry: str) -> AbstractContextManager[OpenCheckpoint]:
        """Open its files, or map them."""
        return open_checkpoint(self.path, use_safetensors=True, base=base, weights_name=entry)


class DirectoryPlace:
    """A run in a directory."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._lock: RunLock | None = None
        self._save_number = 0
        """The highest number that was seen: a manifest that can't be read for a moment has one, too."""

    def known_checkpoints(self) -> list[RunCheckpoint]:
        """List the folders and read their manifests."""
        return self.checkpoints()

    def checkpoints(self) -> list[RunCheckpoint]:
        """List the folders and read their manifests."""
        return checkpoints_in(self.root)

    def saving(self) -> AbstractContextManager[None]:
        """See `saving_into`.

        Raises:
            SaveDirectoryError, AccessDeniedError, RunRemovedError: As there.
        """
        return saving_into(self.root, self._is_there)

    @property
    def is_taken(self) -> bool:
        """Whether this process holds the lock."""
        return self._lock is not None and self._lock.is_held

    def take(self) -> bool:
        """Make the directory where it is missing, and lock it.

        Raises:
            DirectoryLockedError: Another manager, in this process or another one, holds the lock.
            RunRemovedError: The directory that was locked is not there any more.
        """
        if not self._is_there():
            raise removed(self.root)
        if self.is_taken:
            return False
        refuse_hub(self.root)
        make_directories(self.root)
        self._lock = RunLock(self.root)  # a forked process needs one of its own
        weakref.finalize(self, self._lock.release)
        return True

    def release(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def clean_up(self) -> None:
        """See `clean_up_run`."""
        clean_up_run(self.root)

    def write(self, order: CheckpointOrder) -> RunCheckpoint:
        """Write it into a hidden folder and flush that to the disk; one rename makes it the checkpoint."""
        step = order.manifest.step
        found = self.checkpoints()
        order = order.over(next((one for one in found if one.step == step and one.is_own), None))
        save_number = max([self._save_number, *(one.save_number for one in found)]) + 1
        newest = next((one for one in found if one.manifest is not None), None)
        reusable = ReusableShards.of(newest.path, newest.manifest) if newest and newest.manifest else ReusableShards()
        directory = writing_path(self.root, step)
        try:
            os.mkdir(directory)
            manifest = write_checkpoint(
                directory,
                order.payload,
                replace(order.manifest, save_number=save_number),
                order.files,
                reusable,
                order.progress_callback,
                order.writer,
            )
            self._save_number = save_number
            order.before_commit()
            path = put_in_place(directory, self.root, step)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)  # the next save tries again
            raise
        return RunCheckpoint.of(path, manifest)

    def remove(self, checkpoints: Sequence[RunCheckpoint]) -> None:
        """Remove each: first by one rename, then its files."""
        for one in checkpoints:
            if _is_current(one):
                remove_checkpoint(one, self.root)

    def _is_there(self) -> bool:
        """Whether the directory is the one that was locked; if not, the next save locks another one."""
        is_there = self._lock is None or not self._lock.is_held or self._lock.is_of_the_run
        if not is_there:
            self.release()
        return is_there


def _is_current(checkpoint: RunCheckpoint) -> bool:
    """Whether a checkpoint is where it was found, and is not another one by now."""
    found = read_run_checkpoint(checkpoint.path, checkpoint.step, partial(read_checkpoint_manifest, checkpoint.path))
    was, now = checkpoint.manifest, found.manifest
    if was is None or now is None:
        return was is now and os.path.isdir(checkpoint.path)
    return (now.save_number, now.files) == (was.save_number, was.files)
