"""Writes the checkpoints of one run: locks its directory, writes, renames, and removes old checkpoints."""

from __future__ import annotations

import logging
import os
import shutil
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from hfshard._util.progress import bytes_bar
from hfshard.saving.writing import ShardWriter
from hfshard.storage.disk.fsops import make_directories
from hfshard.storage.disk.hub_place import refuse_hub
from hfshard.training.collecting import SavePayload
from hfshard.training.pushing.pusher import BackgroundPusher
from hfshard.training.run.background import Background
from hfshard.training.run.directory import (
    RunCheckpoint,
    checkpoints_in,
    clean_up_run,
    has_changed,
    put_in_place,
    remove_checkpoint,
    writing_path,
)
from hfshard.training.run.host_copy import HostCopies
from hfshard.training.run.lock import RunLock
from hfshard.training.run.manifest import CheckpointManifest
from hfshard.training.run.root import removed, saving_into
from hfshard.training.run.rotation import Rotation
from hfshard.training.run.turns import StepsInUse, Turns
from hfshard.training.run.writing import ReusableShards, write_checkpoint

logger = logging.getLogger(__name__)


class RunWriter:
    """The only writer of a run directory, which it locks at the first save."""

    def __init__(self, root: str, rotation: Rotation, pusher: BackgroundPusher | None, progress: bool | None) -> None:
        self.root = root
        self._rotation = rotation
        self._pusher = pusher
        self._progress = progress
        self._lock: RunLock | None = None
        self._turns = Turns()
        self._background = Background()
        self.host_copies = HostCopies()
        self._is_clean = False
        """Whether nothing is left of saves that failed or were killed; Ctrl-C may end one anywhere."""
        self._save_number = 0
        """The highest number that was seen: a manifest that can't be read for a moment has one, too."""
        self._in_use = StepsInUse()
        """What callers push."""

    def turn(self, changing: str = "") -> AbstractContextManager[None]:
        """Keep other threads out while the block runs; see `Turns.taken`."""
        return self._turns.taken(changing)

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Keep other threads out, and wait for a save that is under way; raises its error, once."""
        with self._turns.taken():
            self._background.wait()
            yield

    @contextmanager
    def kept(self, choose: Callable[[], list[RunCheckpoint]]) -> Iterator[list[RunCheckpoint]]:
        """Choose checkpoints that stay as they are while the block runs, though other threads save meanwhile."""
        self.wait_for_all()
        with ExitStack() as use:
            use.callback(self._rotate_again)
            with self.settled():
                found = choose()
                use.enter_context(self._in_use.used(one.step for one in found))
            yield found

    def save(
        self, step: int, payload: SavePayload, metrics: dict[str, float], files: dict[str, bytes], *, blocking: bool
    ) -> None:
        """Write a checkpoint; if it does not block, from a copy in a thread.

        The caller has the turn, and no other save is under way.

        Raises:
            SaveDirectoryError, AccessDeniedError, RunRemovedError: As in `saving_into`.
        """
        self.begin()
        if not blocking:
            payload = self.host_copies.copy_of(payload)

        def work() -> None:
            self.push_saved(self.write(step, payload, metrics, files, blocking=blocking), blocking=blocking)

        if blocking:
            work()
        else:
            self.start(step, work)

    def begin(self) -> None:
        """Lock the run's directory, and make it where it is missing.

        Raises:
            As `save`.
        """
        with saving_into(self.root, self._is_there):
            self._begin()

    def write(
        self,
        step: int,
        payload: SavePayload,
        metrics: dict[str, float],
        files: dict[str, bytes],
        *,
        blocking: bool,
        writer: ShardWriter | None = None,
    ) -> RunCheckpoint:
        """Write a checkpoint, after `begin`; it is to be pushed by `push_saved`.

        Args:
            step, payload, metrics, files: Of the checkpoint.
            blocking: Whether the caller waits for it.
            writer: Writes the shards, where other ranks take part; None: this process does.

        Raises:
            As `save`.
        """
        with saving_into(self.root, self._is_there):
            return self._write(step, payload, metrics, files, writer, blocking=blocking)

    def push_saved(self, saved: RunCheckpoint, *, blocking: bool) -> None:
        """Push a checkpoint that was just written, if each one is to be."""
        if self._pusher is not None:
            self._pusher.push(saved, blocking=blocking)

    def start(self, step: int, work: Callable[[], object]) -> None:
        """Do the work of a save in a thread; the next call waits for it, and raises its error."""
        self._background.start(work, f"Saving the checkpoint of step {step} into '{self.root}'")

    def join(self) -> None:
        """Wait for a save that is under way; its error is left to `wait`."""
        with self._turns.taken():
            self._background.join()

    def wait(self) -> None:
        """Wait for a save that is under way, and raise its error, once."""
        with self.settled():
            pass

    def wait_for_all(self) -> None:
        """Wait for a save and a push that are under way, and raise the save's error, once."""
        try:
            self.wait()
        finally:
            if self._pusher is not None:
                self._pusher.join()  # without the turn: other threads may save meanwhile
                self._rotate_again()

    def wait_until_finished(self) -> None:
        """Wait as `wait_for_all` does, and raise the last push's error, once."""
        self.wait_for_all()
        if self._pusher is not None:
            self._pusher.wait()

    def close(self) -> None:
        """Wait as `wait_until_finished` does, and release the lock."""
        with self._turns.taken("close()"):
            try:
                self.wait_until_finished()
            finally:
                if not self._background.is_running:  # Ctrl-C ends the wait, and the save goes on
                    self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _is_there(self) -> bool:
        """Whether the run's directory is the one that was locked; if not, the next save locks another one."""
        is_there = self._lock is None or not self._lock.is_held or self._lock.is_of_the_run
        if not is_there:
            self._unlock()
        return is_there

    def _begin(self) -> None:
        """At the first save: create the directory, lock it, and remove what killed saves left."""
        if not self._is_there():
            raise removed(self.root)
        if self._lock is None or not self._lock.is_held:  # a forked process needs a lock of its own
            refuse_hub(self.root)
            make_directories(self.root)
            self._lock = RunLock(self.root)
            weakref.finalize(self, self._lock.release)
            self._is_clean = False
        if not self._is_clean:
            clean_up_run(self.root)
            self._save_number = _highest(checkpoints_in(self.root), self._save_number)
            self._is_clean = True

    def _write(
        self,
        step: int,
        payload: SavePayload,
        metrics: dict[str, float],
        files: dict[str, bytes],
        writer: ShardWriter | None,
        *,
        blocking: bool,
    ) -> RunCheckpoint:
        found = checkpoints_in(self.root)
        newest = next((one for one in found if one.manifest is not None), None)
        save_number = _highest(found, self._save_number) + 1
        reusable = ReusableShards.of(newest.path, newest.manifest) if newest and newest.manifest else ReusableShards()
        directory = writing_path(self.root, step)
        self._is_clean = False
        try:
            os.mkdir(directory)
            with bytes_bar("Saving", payload.nbytes, self._progress if blocking else False) as progress_callback:
                manifest = CheckpointManifest(step, save_number, metrics)
                manifest = write_checkpoint(directory, payload, manifest, files, reusable, progress_callback, writer)
            self._save_number = save_number
            self._wait_for_pushes_of(step)
            if writer is not None:
                writer.confirm()
            path = put_in_place(directory, self.root, step)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)  # the next save tries again
            raise
        logger.info("Saved the checkpoint of step %d, %d bytes of tensors, as '%s'.", step, payload.nbytes, path)
        saved = RunCheckpoint(path, step, manifest)
        self._rotate([one for one in found if one.step != step] + [saved])
        self._is_clean = True
        return saved

    def _wait_for_pushes_of(self, step: int) -> None:
        """Wait until no other thread is reading the checkpoint that is to be replaced."""
        if self._pusher is not None and step in self._pusher.steps_in_use:
            self._pusher.join()
        self._in_use.wait_for(step)

    def _rotate_again(self) -> None:
        """Remove what had to stay while it was pushed; a save that is under way does so itself."""
        with self._turns.taken():
            if self._lock is not None and self._lock.is_held and not self._background.is_running:
                self._rotate(checkpoints_in(self.root))

    def _rotate(self, found: list[RunCheckpoint]) -> None:
        own = [one for one in found if one.is_own]
        steps = self._rotation.steps_to_remove([one.manifest for one in own if one.manifest is not None])
        in_use = self._in_use.steps
        if self._pusher is not None:
            in_use |= self._pusher.steps_in_use
        for one in own:
            if one.step in steps and one.step not in in_use and not has_changed(one):
                remove_checkpoint(one, self.root)


def _highest(found: list[RunCheckpoint], known: int) -> int:
    return max([known, *(one.manifest.save_number for one in found if one.manifest is not None)])
