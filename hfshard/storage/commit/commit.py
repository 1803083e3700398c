"""Carry out a commit step by step: rolled back on an error before the commit, carried through after it."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Final

from hfshard.constants import MAX_CONFIG_BYTES, STAGING_DIRECTORY
from hfshard.errors import CommitUnfinishedError, SaveDirectoryError
from hfshard.storage.commit.directory_state import DirectoryState, read_state
from hfshard.storage.commit.pending_deletes import note_pending_deletes
from hfshard.storage.commit.steps import CommitPlan, CommitStep
from hfshard.storage.disk.folders import open_folder
from hfshard.storage.disk.fsops import (
    can_link,
    locked_directory,
    make_directories,
    refuse_odd_directories,
    remove_empty_directories,
    rename,
    require_space,
    sync,
    sync_directory,
    unlink_if_there,
    write_file,
)
from hfshard.storage.disk.hub_place import refuse_hub
from hfshard.storage.format.names import WeightNames

logger = logging.getLogger(__name__)

LOCK_WAIT_SECONDS: Final = 600.0
"""How long a save waits for another one in the same directory: as long as 1 TB takes on a slow disk."""


@dataclass
class SaveSession:
    """A locked save directory with an empty staging directory in it."""

    directory: str
    state: DirectoryState
    """What was there when the session began, without the leftovers of killed saves."""
    made: list[str] = field(default_factory=list)
    """Directories that the session made, deepest last."""
    changed_folders: set[str] = field(default_factory=set)
    """Folders below the directory in which files were renamed since they were flushed."""
    is_committed: bool = False
    is_unfinished: bool = False
    """Cleaning up failed: the staging directory stays, because it tells the next save what to remove."""

    @property
    def staging(self) -> str:
        """Where files are written before the commit."""
        return os.path.join(self.directory, STAGING_DIRECTORY)

    def status_of(self, name: str) -> os.stat_result | None:
        """The status of a file in the directory, of a link its own, or None if there is none."""
        try:
            return os.lstat(os.path.join(self.directory, name))
        except FileNotFoundError:
            return None

    def like(self, name: str) -> os.stat_result | None:
        """The status of the regular file whose mode and group a new one gets; None where there is none.

        What a link leads to is not replaced, and often read-only for everybody.
        """
        status = self.status_of(name)
        return status if status is not None and stat.S_ISREG(status.st_mode) else None

    @property
    def replaced(self) -> os.stat_result | None:
        """The status of the old weights (the single file, or any shard), whose mode and group new files get."""
        names = self.state.names
        shards = [name for name in sorted(self.state.owned) if names.is_shard(name)]
        for name in [names.single, *shards, names.bin_single]:
            if (status := self.like(name)) is not None:
                return status
        return None

    def check_space(self, need_bytes: int) -> None:
        """Check that the space suffices, before the first byte is written.

        Raises:
            NotEnoughSpaceError: The file system has less free space.
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
        logger.warning(
            "'%s' has no hard links: the checkpoint is written as shards instead of one file.", self.directory
        )
        return False

    def empty_staging(self) -> None:
        """Remove what was staged, so that something else can be."""
        for name in os.listdir(self.staging):
            os.unlink(os.path.join(self.staging, name))

    def commit(self, plan: CommitPlan) -> None:
        """Stage the small files, then carry out the steps of a plan.

        Raises:
            OSError: A step before the commit failed; the directory is as it was.
            CommitUnfinishedError: A step after the commit failed; the new checkpoint loads.
            KeyboardInterrupt: Ctrl-C was pressed: the directory is as it was, or, after the commit, all steps are done.
        """
        targets = {step.source: step.target for step in plan.steps if step.kind == "rename"}
        weights = self.replaced
        for staged, content in plan.small_files.items():
            like = self.like(targets[staged]) or weights
            write_file(os.path.join(self.staging, staged), content, like=like)
        self._note_pending_deletes(plan.steps)
        with _deferred_interrupt() as was_interrupted:
            done = self._run_to_commit(plan.steps, was_interrupted)
            self.is_committed = True
            self._run_after_commit(plan.steps[done:])

    def _note_pending_deletes(self, steps: list[CommitStep]) -> None:
        """Note the shards to delete that hfshard did not write: its own are recognized when no index names them."""
        ours = self.state.index.files if self.state.index is not None else {}
        removed = [step.target for step in steps if step.kind == "remove" and self.state.names.is_shard(step.target)]
        if foreign := [name for name in removed if name not in ours]:
            note_pending_deletes(self.directory, foreign, next(step.source for step in steps if step.is_commit))

    def _run_to_commit(self, steps: list[CommitStep], was_interrupted: Callable[[], bool]) -> int:
        """Carry out the steps up to the commit, and return how many; on an error all of them are rolled back."""
        rollbacks: list[Callable[[], None]] = []
        end = next(position for position, step in enumerate(steps) if step.is_commit) + 1
        try:
            for step in steps[:end]:
                if was_interrupted():
                    raise KeyboardInterrupt
                rollbacks.append(self._rollback_for(step))
                self._execute(step)
        except BaseException:
            for roll_back in reversed(rollbacks):
                try:
                    roll_back()
                except OSError as error:
                    logger.error("A step of a failed save into '%s' could not be undone: %s", self.directory, error)
            raise
        return end

    def _run_after_commit(self, steps: list[CommitStep]) -> None:
        for step in steps:
            try:
                self._execute(step)
            except OSError as error:
                self.is_unfinished = True
                raise CommitUnfinishedError(
                    f"The new checkpoint in '{self.directory}' is saved and loads, but cleaning up failed at "
                    f"'{step.kind} {step.target}': {error}. Save again to finish.",
                    path=self.directory,
                ) from error

    def _execute(self, step: CommitStep) -> None:
        target = os.path.join(self.directory, step.target)
        if step.kind == "rename":
            self._place(os.path.join(self.staging, step.source), step.target)
        elif step.kind == "link":
            second = os.path.join(self.staging, "second-name")
            os.link(os.path.join(self.directory, step.source), second)
            rename(second, target)
        elif step.kind == "remove":
            unlink_if_there(target)
        else:
            for folder in sorted(self.changed_folders):
                with open_folder(self.directory, folder) as fd:
                    sync(fd, os.path.join(self.directory, folder))
            self.changed_folders.clear()
            sync_directory(self.directory)

    def _place(self, source: str, name: str) -> None:
        """Rename a staged file into place; into a folder below the directory through no link."""
        folder = os.path.dirname(name)
        target = os.path.join(self.directory, name)
        if not folder:
            rename(source, target)
            return
        with open_folder(self.directory, folder) as fd:
            self.changed_folders.add(folder)
            rename(source, target, fd)

    def make_folders(self, names: Iterable[str]) -> None:
        """Make the folders of files that will lie below the directory; they go again if the session fails.

        Raises:
            SaveDirectoryError: A link or a file has the name of a folder, or a folder that of a file.
        """
        places = sorted(names)
        for name in places:
            with suppress(FileNotFoundError), open_folder(self.directory, os.path.dirname(name)):
                if os.path.isdir(path := os.path.join(self.directory, name)) and not os.path.islink(path):
                    raise SaveDirectoryError(
                        f"'{path}' is a directory, and a file of this name is to be written. Remove or rename it, or "
                        "choose another directory.",
                        path=path,
                    )
        for name in places:
            with open_folder(self.directory, os.path.dirname(name), self.made):
                continue

    def _rollback_for(self, step: CommitStep) -> Callable[[], None]:
        """A function that takes one step before the commit back, to be made before the step.

        It may be called whether the step was done or not.
        """
        if step.kind != "rename":
            return lambda: None
        target = os.path.join(self.directory, step.target)
        staged = os.path.join(self.staging, step.source)
        status = self.status_of(step.target)
        if status is None:
            return lambda: None if os.path.exists(staged) else unlink_if_there(target)
        if stat.S_ISLNK(status.st_mode):
            return partial(_link_again, os.readlink(target), staged, target)
        if not stat.S_ISREG(status.st_mode):
            return lambda: None  # a FIFO holds nothing to restore
        if status.st_size > MAX_CONFIG_BYTES or step.target.endswith(".safetensors"):
            return lambda: None  # a shard that replaces another is the same, byte for byte
        with open(target, "rb") as file:
            old = file.read()

        def restore() -> None:
            if not os.path.exists(staged):
                write_file(staged, old, like=status)
                self._place(staged, step.target)

        return restore


def _link_again(leads_to: str, staged: str, target: str) -> None:
    """Put a link back that a staged file has replaced, if it has."""
    if not os.path.exists(staged):
        os.symlink(leads_to, staged)
        rename(staged, target)


@contextmanager
def save_session(
    directory: str, names: WeightNames, *, wait_seconds: float = LOCK_WAIT_SECONDS
) -> Iterator[SaveSession]:
    """Make and lock the save directory, clean up after killed saves, and make an empty staging directory.

    Args:
        directory: Made if it is missing, with its parents.
        names: The checkpoint's file names.
        wait_seconds: How long to wait for another save there.

    Raises:
        SaveDirectoryError: It is a file, or lies in a directory hub.
        DirectoryLockedError: Another process is saving there.
    """
    refuse_hub(directory)
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
        what = "a broken link" if os.path.islink(directory) else "a file"
        raise SaveDirectoryError(
            f"save_directory must be a directory, and '{directory}' is {what}. Pass another save_directory.",
            path=directory,
        )
    try:
        return make_directories(directory)
    except (NotADirectoryError, FileExistsError) as error:
        raise SaveDirectoryError(
            f"The directory '{directory}' can't be made: something above it is a file. Pass another save_directory.",
            path=directory,
        ) from error


def _clean_up(directory: str, leftovers: tuple[str, ...]) -> None:
    for name in leftovers:
        logger.info("Removing '%s' from '%s', left by a save that was killed.", name, directory)
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
            if os.path.lexists(above) and not os.listdir(above):  # it may be missing after Ctrl-C or an error
                os.rmdir(above)
    except OSError as error:
        logger.warning(
            "The staging directory '%s' could not be removed (%s). The next save tries again.", staging, error
        )


@contextmanager
def _deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Hold Ctrl-C back while the steps of a commit run, which takes milliseconds; yield whether it was pressed."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    interrupts: list[FrameType | None] = []
    before = signal.getsignal(signal.SIGINT)
    if before is None:  # not installed from Python: it could not be restored
        yield lambda: False
        return
    signal.signal(signal.SIGINT, lambda _signum, frame: interrupts.append(frame))
    try:
        yield lambda: bool(interrupts) and before is signal.default_int_handler
    except KeyboardInterrupt:
        interrupts.clear()
        raise
    finally:
        signal.signal(signal.SIGINT, before)
        if interrupts and callable(before):
            before(signal.SIGINT, interrupts[0])
