"""Carries out a commit: stage, check, then step by step; undone before the commit, carried through after it."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Final

from hfshard.constants import MAX_CONFIG_BYTES, STAGING_DIRECTORY
from hfshard.errors import CommitUnfinishedError, SaveDirectoryError
from hfshard.storage.commit.commit_plan import CommitPlan, CommitStep
from hfshard.storage.commit.directory_state import DirectoryState, read_state
from hfshard.storage.commit.pending_deletes import note_pending_deletes
from hfshard.storage.disk.fsops import (
    can_link,
    locked_directory,
    make_directories,
    refuse_odd_directories,
    remove_empty_directories,
    rename,
    require_space,
    sync_directory,
    unlink_if_there,
    write_file,
)
from hfshard.storage.format.names import WeightNames

logger = logging.getLogger(__name__)

LOCK_WAIT_SECONDS: Final = 600.0
"""How long a save waits for another one in the same directory: as long as a save of 1 TB on a slow disk."""


@dataclass
class SaveSession:
    """A locked save directory with an empty staging directory in it."""

    directory: str
    state: DirectoryState
    """As it was when the session began, without the leftovers of killed saves."""
    made: list[str] = field(default_factory=list)
    """Directories that the session made."""
    is_committed: bool = False
    is_unfinished: bool = False
    """Tidying up failed: the staging directory stays, as it tells the next save what to remove."""

    @property
    def staging(self) -> str:
        """Where files are written before the commit."""
        return os.path.join(self.directory, STAGING_DIRECTORY)

    def status_of(self, name: str) -> os.stat_result | None:
        """The status of a file in the directory, or None where there is none."""
        try:
            return os.stat(os.path.join(self.directory, name))
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP):  # ELOOP: a link to itself
                return None
            raise

    @property
    def replaced(self) -> os.stat_result | None:
        """The status of the old weights, whose mode and group new files get: the single file, or any shard."""
        names = self.state.names
        shards = [name for name in sorted(self.state.owned) if names.is_shard(name)]
        for name in [names.single, *shards, names.bin_single]:
            if (status := self.status_of(name)) is not None:
                return status
        return None

    def check_space(self, need_bytes: int) -> None:
        """Tell of a full disk before the first byte is written.

        Raises:
            NotEnoughSpaceError: The file system has less free.
        """
        require_space(
            self.directory,
            need_bytes,
            doing=f"Saving into '{self.directory}'",
            todo=" (the old checkpoint stays until the new one is whole). Free some space, or save elsewhere.",
        )

    def can_link(self, staged: str) -> bool:
        """Whether a file in the staging directory can get a second name."""
        if can_link(self.staging, os.path.join(self.staging, staged)):
            return True
        logger.warning("'%s' has no hard links: shards are written in place of one file.", self.directory)
        return False

    def empty_staging(self) -> None:
        """Remove what was staged, to stage something else."""
        for name in os.listdir(self.staging):
            os.unlink(os.path.join(self.staging, name))

    def commit(self, plan: CommitPlan) -> None:
        """Stage the small files, then carry out the steps.

        Raises:
            OSError: A step before the commit failed; the directory is as it was.
            CommitUnfinishedError: A step after the commit failed; the new checkpoint loads.
            KeyboardInterrupt: Ctrl-C came; before the commit the directory is as it was, after it all is done.
        """
        targets = {step.source: step.target for step in plan.steps if step.kind == "rename"}
        weights = self.replaced
        for staged, content in plan.small_files.items():
            like = self.status_of(targets[staged]) or weights
            write_file(os.path.join(self.staging, staged), content, like=like)
        self._note_pending_deletes(plan.steps)
        with _deferred_interrupt() as was_interrupted:
            done = self._run_to_commit(plan.steps, was_interrupted)
            self.is_committed = True
            self._run_after_commit(plan.steps[done:])

    def _note_pending_deletes(self, steps: list[CommitStep]) -> None:
        """Our own shards are known for ours when nothing names them any more; others have to be noted."""
        ours = self.state.index.files if self.state.index is not None else {}
        doomed = [step.target for step in steps if step.kind == "remove" and self.state.names.is_shard(step.target)]
        if foreign := [name for name in doomed if name not in ours]:
            note_pending_deletes(self.directory, foreign, next(step.source for step in steps if step.is_commit))

    def _run_to_commit(self, steps: list[CommitStep], was_interrupted: Callable[[], bool]) -> int:
        undo: list[Callable[[], None]] = []
        end = next(position for position, step in enumerate(steps) if step.is_commit) + 1
        try:
            for step in steps[:end]:
                if was_interrupted():
                    raise KeyboardInterrupt
                undo.append(self._rollback_for(step))
                self._execute(step)
        except BaseException:
            for undo_step in reversed(undo):
                try:
                    undo_step()
                except OSError as error:
                    logger.error("A step of an unfinished save into '%s' can't be undone: %s", self.directory, error)
            raise
        return end

    def _run_after_commit(self, steps: list[CommitStep]) -> None:
        for step in steps:
            try:
                self._execute(step)
            except OSError as error:
                self.is_unfinished = True
                raise CommitUnfinishedError(
                    f"The new checkpoint in '{self.directory}' is saved and loads, but tidying up failed at "
                    f"'{step.kind} {step.target}': {error}. Save again to finish.",
                    path=self.directory,
                ) from error

    def _execute(self, step: CommitStep) -> None:
        target = os.path.join(self.directory, step.target)
        if step.kind == "rename":
            rename(os.path.join(self.staging, step.source), target)
        elif step.kind == "link":
            second = os.path.join(self.staging, "second-name")
            os.link(os.path.join(self.directory, step.source), second)
            rename(second, target)
        elif step.kind == "remove":
            unlink_if_there(target)
        else:
            sync_directory(self.directory)

    def _rollback_for(self, step: CommitStep) -> Callable[[], None]:
        """What takes a step before the commit back: asked for before the step, right whether it came about or not."""
        if step.kind != "rename":
            return lambda: None
        target, staged = os.path.join(self.directory, step.target), os.path.join(self.staging, step.source)
        status = self.status_of(step.target)
        if status is None:
            return lambda: None if os.path.exists(staged) else unlink_if_there(target)
        if not stat.S_ISREG(status.st_mode):
            return lambda: None  # a FIFO: nothing in it to give back
        if status.st_size > MAX_CONFIG_BYTES or step.target.endswith(".safetensors"):
            return lambda: None  # a shard that is placed over another is the same, byte for byte
        with open(target, "rb") as file:
            old = file.read()

        def restore() -> None:
            if not os.path.exists(staged):
                write_file(staged, old, like=status)
                rename(staged, target)

        return restore


@contextmanager
def save_session(
    directory: str, names: WeightNames, *, wait_seconds: float = LOCK_WAIT_SECONDS
) -> Iterator[SaveSession]:
    """Make and lock the save directory, clean up after killed saves, and give an empty staging directory.

    Args:
        directory: Made when it is missing, with its parents.
        names: The checkpoint's file names.
        wait_seconds: How long to wait for another save there.

    Raises:
        SaveDirectoryError: It is a file.
        DirectoryLockedError: Another process is saving there.
    """
    made = _make(directory)
    try:
        with locked_directory(directory, wait_seconds=wait_seconds):
            refuse_odd_directories(directory, STAGING_DIRECTORY)
            state = read_state(directory, names)
            if state.leftovers:
                _clean_up(directory, state.leftovers)
                state = read_state(directory, names)
            session = SaveSession(directory, state, made)
            try:
                _clear_staging(directory)
                os.makedirs(session.staging)
                yield session
            finally:
                if not session.is_unfinished:
                    _clear_staging(directory)
    except BaseException:
        remove_empty_directories(made)
        raise


def _make(directory: str) -> list[str]:
    if os.path.lexists(directory) and not os.path.isdir(directory):
        what = "a link to nothing" if os.path.islink(directory) else "a file"
        raise SaveDirectoryError(
            f"'{directory}' is {what}, and a checkpoint is saved into a directory. Give another save_directory.",
            path=directory,
        )
    try:
        return make_directories(directory)
    except (NotADirectoryError, FileExistsError) as error:
        raise SaveDirectoryError(
            f"'{directory}' can't be made: something above it is a file. Give another save_directory.", path=directory
        ) from error


def _clean_up(directory: str, leftovers: tuple[str, ...]) -> None:
    for name in leftovers:
        logger.info("Removing '%s' in '%s', left by a save that was killed.", name, directory)
        unlink_if_there(os.path.join(directory, name))
    sync_directory(directory)


def _clear_staging(directory: str) -> None:
    staging = os.path.join(directory, STAGING_DIRECTORY)
    try:
        if os.path.lexists(staging):
            shutil.rmtree(staging)
        parts = STAGING_DIRECTORY.split("/")
        for depth in range(len(parts) - 1, 0, -1):
            above = os.path.join(directory, *parts[:depth])
            if os.path.lexists(above) and not os.listdir(above):  # Ctrl-C or an error may come before it is made
                os.rmdir(above)
    except OSError as error:
        logger.warning("The staging directory '%s' can't be removed (%s); the next save tries again.", staging, error)


@contextmanager
def _deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Hold Ctrl-C back while the steps of a commit run: they take milliseconds, and each is short."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    came: list[FrameType | None] = []
    before = signal.getsignal(signal.SIGINT)
    if before is None:  # not installed from Python: it can't be put back
        yield lambda: False
        return
    signal.signal(signal.SIGINT, lambda _signum, frame: came.append(frame))
    try:
        yield lambda: bool(came) and before is signal.default_int_handler
    except KeyboardInterrupt:
        came.clear()
        raise
    finally:
        signal.signal(signal.SIGINT, before)
        if came and callable(before):
            before(signal.SIGINT, came[0])
