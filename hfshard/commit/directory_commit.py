"""Carry out a commit step by step: rolled back on an error before the commit, carried through after it."""

from __future__ import annotations

import base64
import json
import logging
import os
import shutil
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, NamedTuple, NoReturn

from hfshard._util.progress import ProgressCallback, byte_progress
from hfshard._util.threads import delay_interrupt
from hfshard.checkpoint.companion_files import copy_companion
from hfshard.commit.commit_plan import (
    CommitPlan,
    CommitStep,
    StagedCheckpoint,
    content_digest,
    needs_hard_links,
    plan_commit,
)
from hfshard.commit.directory_state import (
    DirectoryState,
    note_pending_deletes,
    read_directory_state,
    reject_hub_directory,
)
from hfshard.commit.transaction import JobsOf, NamesTakenError, NewCheckpoint, ShardWriter
from hfshard.constants import (
    CONFIG_NAME,
    MAX_CONFIG_BYTES,
    README,
    SAFETENSORS_SUFFIX,
    SIGNATURE_NAME,
    STAGING_DIRECTORY,
)
from hfshard.disk import fsops
from hfshard.disk.safe_open import Identity, identity_of, open_folder, read_small
from hfshard.errors import (
    CommitUndoneError,
    CommitUnfinishedError,
    DamagedCheckpointError,
    HfshardError,
    SaveDirectoryError,
)
from hfshard.format.file_names import WeightNames
from hfshard.format.index import CheckpointIndex, FileDigest, sha256_of
from hfshard.shards.shard_plan import ShardPlan, with_one_more_shard
from hfshard.shards.write_shards import WriteJob, writer_threads

logger = logging.getLogger(__name__)

LOCK_WAIT_SECONDS: Final = 600.0
"""Time that a save waits for another one in the same directory: as long as 1 TB takes on a slow disk."""


@dataclass
class DirectorySession:
    """A locked save directory with an empty staging directory in it."""

    directory: str
    state: DirectoryState
    """The directory when the session began, without the leftovers of killed saves."""
    made: list[str] = field(default_factory=list)
    """Directories that the session created, deepest last."""
    changed_folders: set[str] = field(default_factory=set)
    """Folders below the directory in which files were renamed since they were flushed."""
    is_committed: bool = False
    drops_signature: bool = False
    """Remove a stale `model.sig`."""
    is_unfinished: bool = False
    """Rollback or cleanup failed: the staging directory stays, because it records what the next save must remove."""

    @property
    def staging(self) -> str:
        """Path of the staging directory, where files are written before the commit."""
        return os.path.join(self.directory, STAGING_DIRECTORY)

    def status_of(self, name: str) -> os.stat_result | None:
        """Return the status of a file in the directory, or None if there is none; links are not followed."""
        try:
            return os.lstat(os.path.join(self.directory, name))
        except FileNotFoundError:
            return None

    def like(self, name: str) -> os.stat_result | None:
        """Return the status of the regular file whose mode and group a new one gets; None if there is none.

        A link counts as none: its target is not replaced, and is often read-only.
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
        """Check that there is enough space before the first byte is written.

        Raises:
            NotEnoughSpaceError: The file system has less free space.
        """
        fsops.require_space(
            self.directory,
            need_bytes,
            doing=f"Saving into '{self.directory}'",
            todo=" (the old checkpoint stays until the new one is complete). Free some space, or save elsewhere.",
        )

    def reject_damaged_config(self) -> None:
        """Check the config.json of a directory whose next checkpoint keeps it.

        Raises:
            DamagedCheckpointError: It is damaged, so that it is unknown which weights it names.
        """
        if self.state.config == b"":
            path = os.path.join(self.directory, CONFIG_NAME)
            raise DamagedCheckpointError(
                f"'{path}' is damaged, and a save of tensors alone keeps it. Nothing was written. Delete it, or save "
                "the model, which writes a new one.",
                path=path,
            )

    def can_link(self, staged: str) -> bool:
        """Return whether a file in the staging directory can get a second name."""
        if fsops.can_link(self.staging, os.path.join(self.staging, staged)):
            return True
        logger.warning(
            "'%s' does not support hard links: the checkpoint is written as shards instead of one file.", self.directory
        )
        return False

    def empty_staging(self) -> None:
        """Remove the staged files, so that others can be staged."""
        for name in os.listdir(self.staging):
            os.unlink(os.path.join(self.staging, name))

    def commit(self, plan: CommitPlan) -> None:
        """Stage the small files and copies of those that they replace; then carry out the steps of a plan.

        Raises:
            CommitUndoneError: A step before the commit failed; the directory is as it was.
            CommitUnfinishedError: A step after the commit failed, and every reader loads the new checkpoint; or one
                before it could not be rolled back, and the message says which readers load which checkpoint.
            OSError: The files could not be staged; the directory is as it was.
            KeyboardInterrupt: Ctrl-C was pressed: the directory is as it was, or, after the commit, all steps are done.
        """
        to_commit = plan.to_commit
        rollback = Rollback(self.directory, self.staging)
        with fsops.FlushBatch() as unflushed:
            self._stage_small_files(plan, unflushed)
            rollback.prepare(to_commit, unflushed)
            for made in self.made:
                unflushed.add_directory(os.path.dirname(made))
            unflushed.flush(writer_threads())
        self._note_pending_deletes(to_commit, plan.steps[len(to_commit) :])
        with delay_interrupt() as was_interrupted:
            self._run_to_commit(to_commit, rollback, was_interrupted)
            self.is_committed = True
            rollback.discard()
            self._run_after_commit(plan.steps[len(to_commit) :])

    def _stage_small_files(self, plan: CommitPlan, unflushed: fsops.FlushBatch) -> None:
        targets = {step.source: step.target for step in plan.steps if step.kind == "rename"}
        weights = self.replaced
        for staged, content in plan.small_files.items():
            like = self.like(targets[staged]) or weights
            unflushed.write_file(os.path.join(self.staging, staged), content, like=like)

    def _note_pending_deletes(self, to_commit: list[CommitStep], after: list[CommitStep]) -> None:
        """Note the shards to delete, whatever their names, that hfshard did not write; its own are recognized.

        Args:
            to_commit: The steps up to the commit. Once the last rename before a removal is done, no index names a file.
            after: The other steps.
        """
        ours = {self.state.names.single, *(self.state.index.files if self.state.index is not None else ())}
        foreign: dict[str, str] = {}
        decisive = ""
        for step in (*to_commit, *(step for step in after if step.kind == "remove")):
            if step.kind == "rename":
                decisive = step.source
            elif step.kind == "remove" and step.target.endswith(SAFETENSORS_SUFFIX) and step.target not in ours:
                foreign.setdefault(step.target, decisive)
        note_pending_deletes(self.directory, foreign)

    def _run_to_commit(self, steps: list[CommitStep], rollback: Rollback, was_interrupted: Callable[[], bool]) -> None:
        """Carry out the steps up to the commit; roll all of them back on an error."""
        step = steps[0]
        try:
            for step in steps:
                if was_interrupted():
                    raise KeyboardInterrupt
                rollback.begin()
                self._execute(step)
        except BaseException as error:
            moved = rollback.run()
            self.is_unfinished = bool(moved)
            if moved or isinstance(error, OSError):
                raise self._failure(step, error, moved) from error
            raise

    def _failure(self, step: CommitStep, error: BaseException, moved: list[str]) -> HfshardError:
        """Build the error that says which checkpoint loads for which readers."""
        failed = f"failed at '{step.kind} {step.target}': {error or type(error).__name__}"
        if moved:
            return CommitUnfinishedError(
                f"Saving into '{self.directory}' {failed}, and could not be rolled back. {' and '.join(moved)} load "
                "the new checkpoint, other readers the old one. Save again to finish.",
                path=self.directory,
            )
        todo = "Save again, or into another directory."
        if step.kind == "remove":
            todo = f"Make '{step.target}' removable, or save into another directory."
        return CommitUndoneError(
            f"Saving into '{self.directory}' {failed}. hfshard rolled back; the previous checkpoint, if "
            f"any, is intact. {todo}",
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
                    f"The new checkpoint in '{self.directory}' was saved and every reader loads it, but cleaning up "
                    f"failed at '{step.kind} {step.target}': {error}. Save again to finish.",
                    path=self.directory,
                ) from error

    def _remove_old_shards(self, steps: list[CommitStep]) -> None:
        """Remove the old shards, which nothing reads, despite the failed step, so that the disk holds no third set."""
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
            fsops.rename(second, target)
        elif step.kind == "remove":
            fsops.unlink_if_exists(target)
        else:
            for folder in sorted(self.changed_folders):
                with open_folder(self.directory, folder) as fd:
                    fsops.sync(fd, os.path.join(self.directory, folder))
            self.changed_folders.clear()
            fsops.sync_directory(self.directory)

    def _place(self, source: str, name: str) -> None:
        """Rename a staged file into place, following no link into a folder below the directory."""
        folder = os.path.dirname(name)
        target = os.path.join(self.directory, name)
        if not folder:
            fsops.rename(source, target)
            return
        with open_folder(self.directory, folder) as fd:
            self.changed_folders.add(folder)
            fsops.rename(source, target, fd)

    def make_folders(self, names: Iterable[str]) -> None:
        """Create the folders of files in subfolders of the directory; they are removed if the session fails.

        Raises:
            SaveDirectoryError: A link or a file has a folder's name, or a folder has a file's name.
        """
        places = sorted(names)
        for name in places:
            with suppress(FileNotFoundError), open_folder(self.directory, os.path.dirname(name)):
                _reject_directory(self.directory, name)
        for name in places:
            with open_folder(self.directory, os.path.dirname(name), self.made):
                continue


@contextmanager
def save_session(
    directory: str, names: WeightNames, *, wait_seconds: float = LOCK_WAIT_SECONDS
) -> Iterator[DirectorySession]:
    """Create and lock the save directory, clean up after killed saves, and create an empty staging directory.

    Args:
        directory: Created if it is missing, with its parents.
        names: The checkpoint's file names.
        wait_seconds: How long to wait for another save there.

    Raises:
        SaveDirectoryError: It is a file, or is in a directory hub; or a directory in it has the name of the config, of
            the single file of weights, or of the index.
        DirectoryLockedError: Another process is saving there.
        CommitUnfinishedError: The save is done, but a signature may be stale, and could not be inspected or removed.
    """
    reject_hub_directory(directory)
    make = partial(_make, directory)
    with fsops.locked_directory(directory, wait_seconds=wait_seconds, make=make) as made:
        fsops.reject_linked_directories(directory, STAGING_DIRECTORY)
        for name in (CONFIG_NAME, names.single, names.index):
            _reject_directory(directory, name)
        state = read_directory_state(directory, names)
        if state.leftovers:
            _clean_up(directory, state.leftovers)
            state = read_directory_state(directory, names)
        session = DirectorySession(directory, state, made)
        watch = SignatureTracker(directory)
        try:
            clear_staging(directory)
            os.makedirs(session.staging)
            yield session
            try:
                watch.after_save(partial(_recorded, directory, names), is_removed=session.drops_signature)
            except OSError as error:
                if not session.is_committed:
                    raise
                raise CommitUnfinishedError(
                    f"The new checkpoint in '{directory}' was saved and every reader loads it, but its "
                    f"'{SIGNATURE_NAME}' may be stale, and could not be inspected or removed: {error}. Sign again, "
                    "or delete that file.",
                    path=directory,
                ) from error
        finally:
            if not session.is_unfinished:
                clear_staging(directory)


def _recorded(directory: str, names: WeightNames) -> dict[str, FileDigest]:
    """Return the digests that the index in a directory records; none without an index."""
    index = read_directory_state(directory, names).index
    return {} if index is None else index.files


def _reject_directory(directory: str, name: str) -> None:
    path = os.path.join(directory, name)
    if os.path.isdir(path) and not os.path.islink(path):
        raise SaveDirectoryError(
            f"'{path}' is a directory, but a file of this name must be written or removed. Remove or rename it, or "
            "choose another directory.",
            path=path,
        )


def _make(directory: str) -> list[str]:
    if os.path.lexists(directory) and not os.path.isdir(directory):
        what = "a broken link" if os.path.islink(directory) else "a file"
        raise SaveDirectoryError(
            f"save_directory must be a directory, but '{directory}' is {what}. Pass another path.",
            path=directory,
        )
    try:
        return fsops.make_directories(directory, flush=False)  # before the first step
    except (NotADirectoryError, FileExistsError) as error:
        raise SaveDirectoryError(
            f"Cannot create the directory '{directory}': a path above it is a file. Pass another path.",
            path=directory,
        ) from error


def _clean_up(directory: str, leftovers: tuple[str, ...]) -> None:
    for name in leftovers:
        logger.info("Removing '%s' from '%s', left by a killed save.", name, directory)
        fsops.unlink_if_exists(os.path.join(directory, name))
    fsops.sync_directory(directory)


def clear_staging(directory: str) -> None:
    """Remove the staging directory, and the folders above it that are then empty; the caller must hold the lock."""
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
        logger.warning("The staging directory '%s' could not be deleted (%s); the next save will.", staging, error)


# The directory as the sink of the one save.


@contextmanager
def directory_transaction(directory: str, new: NewCheckpoint, writer: ShardWriter) -> Iterator[DirectoryTransaction]:
    """Lock a directory for a save, and undo what was not committed at the end of the block.

    The directory's path is absolute; it is created if it is missing, with its parents.

    Raises:
        DamagedCheckpointError: config.json is damaged, and this save keeps it.
        The errors of `save_session`.
    """
    with save_session(directory, new.names) as session:
        if new.config is None and not new.drops_config:
            session.reject_damaged_config()
        session.drops_signature = new.drops_signature
        yield DirectoryTransaction(session, new, writer)


class DirectoryTransaction:
    """`Transaction` of a directory: files are staged in it, and the steps of a plan move them into place."""

    def __init__(self, session: DirectorySession, new: NewCheckpoint, writer: ShardWriter) -> None:
        self._session = session
        self._new = new
        self._writer = writer
        self._may_reuse_names = True
        self._staged: dict[str, str] = {}
        """File of the plan -> its name in the staging directory."""
        self._companions: dict[str, str] = {}
        """Companion file -> its name in the staging directory."""
        self._digests: dict[str, FileDigest] = {}
        self._hides_single: bool | None = None
        self._can_link: bool | None = None

    def prepare(self, plan: ShardPlan, names: WeightNames, jobs_of: JobsOf) -> ShardPlan:
        """Keep the standard names if the directory has none of them, or has files with the same fingerprints.

        Otherwise, the smallest shard is split until no name is taken.
        """
        if plan.is_sharded and not (self._may_reuse_names and self._has_these(plan, jobs_of)):
            taken = self._session.state.listing | self._session.state.referenced
            while not taken.isdisjoint(shard.file for shard in plan.shards):
                plan = with_one_more_shard(plan, names)
        self._session.make_folders({*self._new.companion_files, *self._new.small_files})
        self._session.check_space(plan.total_size + self._companion_bytes)
        return plan

    def write(self, jobs: Mapping[str, WriteJob]) -> dict[str, FileDigest]:
        """Write the files into the staging directory, and copy the companion files there.

        Raises:
            NamesTakenError: A file differs after all from one that looked the same, or a single one needs links.
        """
        total = sum(job.nbytes for job in jobs.values()) + self._companion_bytes
        with byte_progress(self._writer.verb, total, self._new.progress) as progress_callback:
            digests = self._writer.write(self.stage(jobs), self._new.checksum, progress_callback)
            self._digests = dict(zip(jobs, digests, strict=True))
            self._stage_companion_files(progress_callback)
        shards = [file for file in jobs if file != self._new.names.single]
        if any(file in self._session.state.listing and not self._is_same(file) for file in shards):
            self._give_up_names()
        self.reject_single_without_links(jobs)
        return self._digests

    def commit(
        self,
        indexes: Mapping[str, CheckpointIndex],
        index_files: Mapping[str, bytes],
        confirm: Callable[[], None],
    ) -> bool:
        """Carry out the plan from the old checkpoint to the new one."""
        [index] = indexes.values()
        staged = self._new_state(list(index.weight_map), index_files.get(self._new.names.index))
        confirm()
        self._session.commit(plan_commit(self._session.state, staged))
        return True

    def stage(self, jobs: Mapping[str, WriteJob]) -> list[WriteJob]:
        """Give jobs their paths in the staging directory, and the mode and group of the old weights."""
        self._staged = {file: f"{number:05d}.weights" for number, file in enumerate(jobs)}
        like = self._session.replaced
        return [
            replace(job, path=os.path.join(self._session.staging, self._staged[file]), like=like)
            for file, job in jobs.items()
        ]

    def reject_single_without_links(self, jobs: Mapping[str, WriteJob]) -> None:
        """Reject a single staged file that needs a second name during the commit, and can't have one.

        Raises:
            NamesTakenError: The checkpoint must be written as shards.
        """
        if list(jobs) != [self._new.names.single]:
            return
        staged = self._new_state(list(jobs[self._new.names.single].tensors), None)
        if self._can_link is None and needs_hard_links(self._session.state, staged):
            self._can_link = self._session.can_link(*self._staged.values())
        if self._can_link is False:
            self._give_up_names()

    @property
    def _companion_bytes(self) -> int:
        return sum(file.size for file in self._new.companion_files.values())

    def _has_these(self, plan: ShardPlan, jobs_of: JobsOf) -> bool:
        """Return whether the index in the directory lists exactly these files, by their fingerprints."""
        index = self._session.state.index
        if index is None or index.weight_map != plan.weight_map:
            return False
        listed = [index.files.get(shard.file, FileDigest()).fingerprint for shard in plan.shards]
        if None in listed:
            return False
        found = self._writer.fingerprints(list(jobs_of(plan).values()), self._new.checksum)
        return all(one == other for one, other in zip(found, listed, strict=True))

    def _is_same(self, file: str) -> bool:
        """Return whether a written file is the one that the old index records under its name."""
        old, digest = self._session.state.index, self._digests[file]
        return old is not None and old.files.get(file) == digest and digest.is_verifiable

    def _give_up_names(self) -> NoReturn:
        self._session.empty_staging()
        self._may_reuse_names = False
        raise NamesTakenError

    def _new_state(self, keys: Sequence[str], index: bytes | None) -> StagedCheckpoint:
        return StagedCheckpoint(
            shards=self._staged,
            keys=keys,
            index=index,
            config=self._new.config,
            drops_config=self._new.drops_config,
            hides_single=self._can_hide_single(),
            model_files=self._new.model_files,
            digest=content_digest([index if index is not None else repr(self._digests).encode()]),
            companion_files=self._companions,
        )

    def _can_hide_single(self) -> bool:
        """Return whether an old single file is to be hidden, and can have a second name; tried once."""
        if self._hides_single is None:
            session = self._session
            single = os.path.join(session.directory, session.state.names.single)
            is_wanted = self._new.hides_single and session.state.has_single
            self._hides_single = is_wanted and fsops.can_link(session.staging, single)
        return self._hides_single

    def _stage_companion_files(self, progress_callback: ProgressCallback) -> None:
        session = self._session
        self._companions = {}
        for number, (name, file) in enumerate(self._new.companion_files.items()):
            if name == README and name in session.state.listing and not self._new.replaces_readme:
                continue  # the user's own
            self._companions[name] = f"{number:05d}.companion"
            path = os.path.join(session.staging, self._companions[name])
            copy_companion(file, path, session.like(name), progress_callback)


# Rollback of a commit's steps, the last one first, if one of them fails before the commit is done.


class Rollback:
    """The undo of the steps done so far.

    Files that the steps replace are copied into the staging directory before the first step, so that a rollback writes
    nothing: the disk may be full then.
    """

    def __init__(self, directory: str, staging: str) -> None:
        self.directory = directory
        self.staging = staging
        self._prepared: deque[_Undo] = deque()
        self._undo: list[_Undo] = []
        self._linked: list[str] = []

    def prepare(self, steps: Sequence[CommitStep], unflushed: fsops.FlushBatch) -> None:
        """Prepare to roll back all steps that may have to be; the files that they move into place are staged.

        The copies that this adds to `unflushed` must be durable before the first step.

        Raises:
            OSError: A file that a step replaces could not be copied.
        """
        placed: dict[str, str] = {}
        for number, step in enumerate(steps):
            now = placed.get(step.target, os.path.join(self.directory, step.target))
            undo = self._rollback_for(step, now, f"{number:03d}.kept", unflushed)
            self._prepared.append(_Undo(step.moves, step.kind in ("rename", "remove") and os.path.lexists(now), undo))
            if step.kind == "rename":
                placed[step.target] = os.path.join(self.staging, step.source)
            elif step.kind == "remove":
                placed[step.target] = ""  # no file

    def begin(self) -> None:
        """Include the next step in the rollback, whether it will complete or not."""
        self._undo.append(self._prepared.popleft())

    def run(self) -> list[str]:
        """Roll all steps back.

        If a step that moves readers to the new checkpoint can't be undone, or a file can't be restored, the steps
        before it stay done: what stays in its place may need their files.

        Returns:
            The readers that find the new checkpoint; empty if everything is as it was.
        """
        while self._undo:
            last = self._undo[-1]
            moved = [one.moves for one in self._undo if one.moves]
            try:
                last.run()
            except OSError as error:
                logger.error("A step of a failed save into '%s' could not be undone: %s", self.directory, error)
                if moved or last.is_restoring:
                    return moved
            self._undo.pop()
            if last.moves and not self._flush():
                return moved[:-1]  # its target stays, in case a power cut restores the step
        return []

    def discard(self) -> None:
        """Remove the second names of large files, whose space is otherwise not free when the files are removed."""
        for kept in self._linked:
            try:
                fsops.unlink_if_exists(kept)
            except OSError as error:
                logger.warning("'%s' could not be removed (%s); the next save will.", kept, error)

    def _flush(self) -> bool:
        """Make what was undone durable; return False, after logging an error, if the disk fails."""
        try:
            fsops.sync_directory(self.directory)
        except OSError as error:
            logger.error("'%s' could not be flushed after a failed save: %s", self.directory, error)
            return False
        return True

    def _rollback_for(
        self, step: CommitStep, now: str, kept_name: str, unflushed: fsops.FlushBatch
    ) -> Callable[[], object]:
        """Prepare the undo of a step; `now` is the file that will have the target's name then, "" if none."""
        target = os.path.join(self.directory, step.target)
        if step.kind == "link":
            is_new = not os.path.lexists(now)
            return lambda: fsops.unlink_if_exists(target) if is_new else None
        if step.kind == "remove":
            return self._undo_of_removal(target, kept_name)
        if step.kind == "sync":
            return self._flush  # what came before it is undone after what came later
        staged = os.path.join(self.staging, step.source)
        kept = os.path.join(self.staging, kept_name)

        def restore() -> None:
            if not os.path.exists(staged):
                fsops.rename(kept, target)

        try:
            status = os.lstat(now)
        except FileNotFoundError:
            return lambda: None if os.path.exists(staged) else fsops.unlink_if_exists(target)
        if stat.S_ISLNK(status.st_mode):
            os.symlink(os.readlink(now), kept)
            return restore
        if not stat.S_ISREG(status.st_mode):
            return lambda: None  # a FIFO holds nothing to restore
        if status.st_size > MAX_CONFIG_BYTES or step.target.endswith(".safetensors"):
            if not self._link(now, kept) and not step.moves:
                return lambda: None
        else:
            with open(now, "rb") as file:
                old = file.read()
            unflushed.write_file(kept, old, like=status)
        return restore

    def _undo_of_removal(self, target: str, kept_name: str) -> Callable[[], None]:
        kept = os.path.join(self.staging, kept_name)
        if os.path.isfile(target):
            self._link(target, kept)

        def restore() -> None:
            if os.path.lexists(kept) and not os.path.lexists(target):
                fsops.rename(kept, target)

        return restore

    def _link(self, target: str, kept: str) -> bool:
        """Give the old file a second name; return False without hard links: then it cannot be restored."""
        try:
            os.link(target, kept)
        except OSError as error:
            if error.errno not in fsops.NO_LINKS:
                raise
            logger.info("'%s' cannot be hard-linked (%s): it cannot be restored if the save fails.", target, error)
            return False
        self._linked.append(kept)
        return True


class _Undo(NamedTuple):
    """The undo of one step."""

    moves: str
    """As in `CommitStep`."""
    is_restoring: bool
    """True if it restores a file that the step replaces or removes."""
    run: Callable[[], object]


# Stale signatures: a save warns of one, or removes it if that was requested.


_MAX_BYTES: Final = 64 * 1024 * 1024
"""Size of the largest signature that is read for a warning."""

_SMALL_BYTES: Final = 1024 * 1024
"""Size of the largest file that is read for a warning; the sha256 of shards is recorded by the save."""


class SignatureTracker:
    """The files next to a signature, before a save changes them."""

    def __init__(self, directory: str) -> None:
        """Note the existing files; nothing if there is no signature."""
        self._directory = directory
        self._has_signature = os.path.isfile(os.path.join(directory, SIGNATURE_NAME))
        self._before = self._identities() if self._has_signature else {}

    def after_save(self, recorded: Callable[[], Mapping[str, FileDigest]], *, is_removed: bool) -> None:
        """Warn if the signature is stale, given what the index there records; or remove it."""
        path = os.path.join(self._directory, SIGNATURE_NAME)
        now = self._identities() if self._has_signature else {}
        if (
            SIGNATURE_NAME not in now
            or now[SIGNATURE_NAME] != self._before[SIGNATURE_NAME]
            or not self._is_stale(now, recorded)
        ):
            return  # none, or one that belongs to the saved files and came with them
        if is_removed:
            fsops.unlink_if_exists(path)
            fsops.sync_directory(self._directory)
            logger.info("Deleted the stale signature '%s'.", path)
            return
        logger.warning(
            "The signature '%s' is stale: this save replaced the files it covers, so verification will fail. Sign "
            "again (hfshard sign %s --private-key KEY), or delete the file.",
            path,
            self._directory,
        )

    def _is_stale(self, now: dict[str, Identity], recorded: Callable[[], Mapping[str, FileDigest]]) -> bool:
        changed = {name for name, identity in now.items() if self._before.get(name) != identity}
        gone = self._before.keys() - now.keys()
        if not changed and not gone:
            return False
        try:
            signed = _signed_digests(os.path.join(self._directory, SIGNATURE_NAME), self._directory)
            known = {name: digest.sha256 for name, digest in recorded().items()}
            return not gone.isdisjoint(signed) or any(
                signed.get(name, "") != (known.get(name) or self._digest(name)) for name in changed
            )
        except (HfshardError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.debug("Cannot determine what '%s' signs: %s", SIGNATURE_NAME, error)
            return True

    def _digest(self, name: str) -> str | None:
        path = os.path.join(self._directory, name)
        if os.path.getsize(path) > _SMALL_BYTES:
            return None
        with open(path, "rb") as file:
            return sha256_of(file.read())

    def _identities(self) -> dict[str, Identity]:
        found: dict[str, Identity] = {}
        with os.scandir(self._directory) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # another process removed it just now
                    if entry.is_file():
                        found[entry.name] = identity_of(entry.stat())
        return found


def _signed_digests(path: str, directory: str) -> dict[str, Any]:
    """Read the digests in a signature without verifying it; good enough only for a warning."""
    bundle = json.loads(read_small(path, directory, _MAX_BYTES)[0])
    payload = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    return {one["name"]: one["digest"] for one in payload["predicate"]["resources"]}
