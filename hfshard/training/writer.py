"""Writes the checkpoints of one run: the directory's lock, the way to the one rename, and what goes after it."""

from __future__ import annotations

import logging
import os
import shutil
import weakref

from hfshard._util.progress import bytes_bar
from hfshard.storage.disk.fsops import make_directories
from hfshard.training.collecting import SavePayload
from hfshard.training.pushing.pusher import BackgroundPusher
from hfshard.training.run.background import Background
from hfshard.training.run.directory import RunCheckpoint, found_in, put_in_place, remove, sweep, writing_path
from hfshard.training.run.host_copy import HostCopies
from hfshard.training.run.lock import RunLock
from hfshard.training.run.manifest import CheckpointManifest
from hfshard.training.run.rotation import Rotation
from hfshard.training.run.writing import ReusableShards, write_checkpoint

logger = logging.getLogger(__name__)


class RunWriter:
    """The one writer of a run directory, which it locks from the first save on."""

    def __init__(
        self, root: str, rotation: Rotation, publisher: BackgroundPusher | None, progress: bool | None
    ) -> None:
        self.root = root
        self._rotation, self._publisher, self._progress = rotation, publisher, progress
        self._lock: RunLock | None = None
        self._background = Background()
        self._snapshots = HostCopies()
        self._is_swept = False
        """Whether nothing is left of saves that were killed or failed; Ctrl-C may end one anywhere."""
        self._sequence = 0
        """The highest of the run, as far as it was seen: a manifest that can't be read for a moment has one, too."""

    def save(
        self, step: int, collected: SavePayload, metrics: dict[str, float], files: dict[str, bytes], *, blocking: bool
    ) -> None:
        """Write a checkpoint; where it does not block, of a copy, by a thread. None may be under way."""
        self._begin()
        if blocking:
            self._write(step, collected, metrics, files, self._progress, blocking=True)
        else:
            copied = self._snapshots.copy_of(collected)
            what = f"Saving the checkpoint of step {step} into '{self.root}'"
            self._background.start(lambda: self._write(step, copied, metrics, files, False, blocking=False), what)

    def wait(self) -> None:
        """Wait for a save that is under way, and raise its error, once."""
        self._background.wait()

    def wait_for_all(self) -> None:
        """Wait for a save and a push that are under way, and raise the save's error, once."""
        try:
            self._background.wait()
        finally:
            if self._publisher is not None:
                self._publisher.join()
                if self._lock is not None and self._lock.is_held:
                    self._rotate(found_in(self.root))  # what was being pushed stayed

    def wait_until_finished(self) -> None:
        """As `wait_for_all`, and raise the last push's error, once."""
        self.wait_for_all()
        if self._publisher is not None:
            self._publisher.wait()

    def close(self) -> None:
        """As `wait_until_finished`, and give the lock back."""
        try:
            self.wait_until_finished()
        finally:
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def _begin(self) -> None:
        """At the first save: make the directory, lock it, remove what killed saves left."""
        if self._lock is None or not self._lock.is_held:  # a forked process has to ask for itself
            make_directories(self.root)
            self._lock = RunLock(self.root)
            weakref.finalize(self, self._lock.release)
            self._is_swept = False
        if not self._is_swept:
            sweep(self.root)
            self._sequence = _highest(found_in(self.root), self._sequence)
            self._is_swept = True

    def _write(
        self,
        step: int,
        collected: SavePayload,
        metrics: dict[str, float],
        files: dict[str, bytes],
        progress: bool | None,
        *,
        blocking: bool,
    ) -> None:
        found = found_in(self.root)
        newest = next((one for one in found if one.manifest is not None), None)
        sequence = _highest(found, self._sequence) + 1
        linkable = ReusableShards.of(newest.path, newest.manifest) if newest and newest.manifest else ReusableShards()
        directory = writing_path(self.root, step)
        self._is_swept = False
        try:
            os.mkdir(directory)
            with bytes_bar("Saving", collected.nbytes, progress) as progress_callback:
                manifest = CheckpointManifest(step, sequence, metrics)
                manifest = write_checkpoint(directory, collected, manifest, files, linkable, progress_callback)
            self._sequence = sequence
            path = put_in_place(directory, self.root, step)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)  # the next save tries again
            raise
        logger.info("Saved the checkpoint of step %d, %d bytes of tensors, as '%s'.", step, collected.nbytes, path)
        saved = RunCheckpoint(path, step, manifest)
        self._rotate([one for one in found if one.step != step] + [saved])
        self._is_swept = True
        if self._publisher is not None:
            self._publisher.publish(saved, blocking=blocking)

    def _rotate(self, found: list[RunCheckpoint]) -> None:
        steps = self._rotation.steps_to_remove([one.manifest for one in found if one.manifest is not None])
        in_use = self._publisher.steps_in_use if self._publisher is not None else set()
        for one in found:
            if one.manifest is not None and one.step in steps and one.step not in in_use:
                remove(one, self.root)


def _highest(found: list[RunCheckpoint], known: int) -> int:
    return max([known, *(one.manifest.sequence for one in found if one.manifest is not None)])
