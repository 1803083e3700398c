"""Carry out a commit step by step: rolled back on an error before the commit, carried through after it."""

from __future__ import annotations

import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from hfshard._util.threads import deferred_interrupt
from hfshard.constants import CONFIG_NAME, STAGING_DIRECTORY
from hfshard.disk.fsops import (
    Unflushed,
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
)
from hfshard.disk.safe_open import open_folder
from hfshard.errors import CommitUndoneError, CommitUnfinishedError, HfshardError, SaveDirectoryError
from hfshard.format.file_names import WeightNames
from hfshard.format.index import FileDigest
from hfshard.shards.write_shards import writer_threads
from hfshard.storage.commit.directory_state import DirectoryState, read_state
from hfshard.storage.commit.pending_deletes import note_pending_deletes
from hfshard.storage.commit.rollback import Rollback
from hfshard.storage.commit.steps import CommitPlan, CommitStep
from hfshard.storage.disk.hub_place import refuse_hub
from hfshard.storage.stale_signature import SignatureWatch

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
    drops_signature: bool = False
    """Whether a `model.sig` that no longer holds is removed."""
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
        """Stage the small files and what brings back those that they replace; then carry out the steps of a plan.

        Raises:
            CommitUndoneError: A step before the commit failed; the directory is as it was.
            CommitUnfinishedError: A step after the commit failed, and every reader loads the new checkpoint; or one
                before it could not be taken back, and the message says who loads which.
            OSError: They could not be staged; the directory is as it was.
            KeyboardInterrupt: Ctrl-C was pressed: the directory is as it was, or, after the commit, all steps are done.
        """
        to_commit = plan.to_commit
        rollback = Rollback(self.directory, self.staging)
        with Unflushed() as unflushed:
            self._stage_small_files(plan, unflushed)
            rollback.prepare(to_commit, unflushed)
            for made in self.made:
                unflushed.add_directory(os.path.dirname(made))
            unflushed.flush(writer_threads())
        decisive = next(step.source for step in reversed(to_commit) if step.kind == "rename")
        self._note_pending_deletes(plan.steps, decisive)
        with deferred_interrupt() as was_interrupted:
            self._run_to_commit(to_commit, rollback, was_interrupted)
            self.is_committed = True
            self._run_after_commit(plan.steps[len(to_commit) :])

    def _stage_small_files(self, plan: CommitPlan, unflushed: Unflushed) -> None:
        targets = {step.source: step.target for step in plan.steps if step.kind == "rename"}
        weights = self.replaced
        for staged, content in plan.small_files.items():
            like = self.like(targets[staged]) or weights
            unflushed.write_file(os.path.join(self.staging, staged), content, like=like)

    def _note_pending_deletes(self, steps: list[CommitStep], decisive: str) -> None:
        """Note the shards to delete that hfshard did not write: its own are recognized when no index names them.

        Args:
            steps: All steps of the commit.
            decisive: The staged file of the last rename up to the commit, after which no index names them.
        """
        ours = self.state.index.files if self.state.index is not None else {}
        removed = [step.target for step in steps if step.kind == "remove" and self.state.names.is_shard(step.target)]
        if foreign := [name for name in removed if name not in ours]:
            note_pending_deletes(self.directory, foreign, decisive)

    def _run_to_commit(self, steps: list[CommitStep], rollback: Rollback, was_interrupted: Callable[[], bool]) -> None:
        """Carry out the steps up to the commit; on an error all of them are rolled back."""
        step = steps[0]
        try:
            for step in steps:
                if was_interrupted():
                    raise KeyboardInterrupt
                rollback.begin(step)
                self._execute(step)
        except BaseException as error:
            moved = rollback.run()
            self.is_unfinished = bool(moved)
            if moved or isinstance(error, OSError):
                raise self._failure(step, error, moved) from error
            raise

    def _failure(self, step: CommitStep, error: BaseException, moved: list[str]) -> HfshardError:
        """Make the error that says which checkpoint loads, and for whom."""
        failed = f"failed at '{step.kind} {step.target}': {error or type(error).__name__}"
        if moved:
            return CommitUnfinishedError(
                f"Saving into '{self.directory}' {failed}, and could not be taken back. {' and '.join(moved)} load the "
                "new checkpoint, other readers the old one. Save again to finish.",
                path=self.directory,
            )
        todo = "Save again, or into another directory."
        if step.kind == "remove":
            todo = f"Make it possible to remove '{step.target}', or save into another directory."
        return CommitUndoneError(
            f"Saving into '{self.directory}' {failed}. It was taken back, and the directory is as it was: what was "
            f"there before loads. {todo}",
            path=os.path.join(self.directory, step.target),
            error_number=error.errno if isinstance(error, OSError) else None,
        )

    def _run_after_commit(self, steps: list[CommitStep]) -> None:
        for number, step in enumerate(steps):
            try:
                self._execute(step)
            except OSError as error:
                self.is_unfinished = True
                self._remove_old_shards(steps[number + 1 :])
                raise CommitUnfinishedError(
                    f"The new checkpoint in '{self.directory}' is saved, and every reader loads it; but cleaning up "
                    f"failed at '{step.kind} {step.target}': {error}. Save again to finish.",
                    path=self.directory,
                ) from error

    def _remove_old_shards(self, steps: list[CommitStep]) -> None:
        """Remove the old shards, which no reader looks at, though a step before failed: the disk holds no third set."""
        for step in steps:
            if step.kind == "remove" and self.state.names.is_shard(step.target):
                try:
                    self._execute(step)
                except OSError as error:
                    logger.warning("'%s' in '%s' could not be removed: %s", step.target, self.directory, error)

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
                _refuse_directory(self.directory, name)
        for name in places:
            with open_folder(self.directory, os.path.dirname(name), self.made):
                continue


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
        SaveDirectoryError: It is a file, or lies in a directory hub; or a directory in it has the name of the
            config, of the single file of weights, or of the index.
        DirectoryLockedError: Another process is saving there.
    """
    refuse_hub(directory)
    made = _make(directory)
    try:
        with locked_directory(directory, wait_seconds=wait_seconds):
            refuse_odd_directories(directory, STAGING_DIRECTORY)
            for name in (CONFIG_NAME, names.single, names.index):
                _refuse_directory(directory, name)
            state = read_state(directory, names)
            if state.leftovers:
                _clean_up(directory, state.leftovers)
                state = read_state(directory, names)
            session = SaveSession(directory, state, made)
            watch = SignatureWatch(directory)
            try:
                clear_staging(directory)
                os.makedirs(session.staging)
                yield session
                watch.after_save(partial(_recorded, directory, names), is_dropped=session.drops_signature)
            finally:
                if not session.is_unfinished:
                    clear_staging(directory)
    except BaseException:
        remove_empty_directories(made)
        raise


def _recorded(directory: str, names: WeightNames) -> dict[str, FileDigest]:
    """What the index in a directory says of the files."""
    index = read_state(directory, names).index
    return {} if index is None else index.files


def _refuse_directory(directory: str, name: str) -> None:
    path = os.path.join(directory, name)
    if os.path.isdir(path) and not os.path.islink(path):
        raise SaveDirectoryError(
            f"'{path}' is a directory, and a file of this name is to be written or removed. Remove or rename it, or "
            "choose another directory.",
            path=path,
        )


def _make(directory: str) -> list[str]:
    if os.path.lexists(directory) and not os.path.isdir(directory):
        what = "a broken link" if os.path.islink(directory) else "a file"
        raise SaveDirectoryError(
            f"save_directory must be a directory, and '{directory}' is {what}. Pass another save_directory.",
            path=directory,
        )
    try:
        return make_directories(directory, flush=False)  # before the first step
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


def clear_staging(directory: str) -> None:
    """Remove the staging directory, and the folders above it that are then empty; the caller holds the lock."""
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
