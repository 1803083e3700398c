"""A run in a directory: locked while a manager exists; each checkpoint is a folder that appears by one rename."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import stat
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import PurePath
from typing import Final

from hfshard.checkpoint.folder import Folder, LocalFolder
from hfshard.commit.directory_state import reject_hub_directory
from hfshard.commit.transaction import JobsOf, KnownFile
from hfshard.constants import MARKS, SAFETENSORS_SUFFIX
from hfshard.disk.fsops import (
    FlushBatch,
    ForkSafeDescriptor,
    is_still_at,
    lock,
    make_directories,
    require_space,
    sync_directory,
    unlock,
)
from hfshard.errors import AccessDeniedError, DirectoryLockedError, HfshardError, RunRemovedError, SaveDirectoryError
from hfshard.format.file_names import WeightNames
from hfshard.format.index import CheckpointIndex, FileDigest
from hfshard.format.stored_save import split_object_name
from hfshard.shards.shard_plan import ShardPlan
from hfshard.shards.write_shards import WriteJob, synchronize_devices, writer_threads
from hfshard.training.run.manifest import (
    CHECKPOINT,
    MANIFEST,
    CheckpointManifest,
    RunCheckpoint,
    checkpoint_path,
    folder_at,
    is_own_name,
    newest_first,
)
from hfshard.training.run.run_storage import RunSave

logger = logging.getLogger(__name__)

REPLACED: Final = re.compile(r"\.replaced-(\d+)-(\d+)")
"""A checkpoint that another save of the same step is replacing; it counts until the new one is in place."""
_HIDDEN: Final = re.compile(r"\.(?:tmp|replaced|removed)-\d+-\d+")
"""What a save has hidden: what it writes, what it replaces, and what it removes."""

_LOOKS: Final = 100
"""The most times that a run is listed again while another process saves into it."""


def staging_path(root: str, step: int) -> str:
    """Return the path where a checkpoint is written until it is complete."""
    return os.path.join(root, f".tmp-{step}-{os.getpid()}")


def checkpoints_in(root: str) -> list[RunCheckpoint]:
    """List every checkpoint in a run directory, damaged ones too, as `newest_first` sorts them."""
    found: list[RunCheckpoint] = []
    # A relative path is resolved, so that problems are named by absolute ones.
    open_folder: Callable[[str], Folder] = LocalFolder if os.path.isabs(root) else folder_at
    for _ in range(_LOOKS):
        names = _names_in(root)
        gone: list[str] = []
        listed = _step_directories(root, names, gone)
        found = [RunCheckpoint(os.path.join(root, name), step, open_folder=open_folder).read() for name, step in listed]
        if not gone and _names_in(root) == names:
            break
    return newest_first(found)


def _names_in(root: str) -> list[str]:
    return sorted(name for name in list_run_directory(root) if CHECKPOINT.fullmatch(name) or REPLACED.fullmatch(name))


def _step_directories(root: str, names: list[str], gone: list[str]) -> Iterator[tuple[str, int]]:
    """Yield the name and step of each checkpoint directory among some names; add those that vanished to `gone`.

    A vanished name may exist again, as that of the next save, by the time the names are compared.

    Directories that were moved aside count if nothing has replaced them. Those with other names, such as a user's copy
    `checkpoint-4`, count if the step has no other and they have a manifest: without one, they are another tool's.
    """
    steps: set[int] = set()
    for name in names:
        match = CHECKPOINT.fullmatch(name)
        if match is not None and is_own_name(name, step := int(match[1])):
            steps.add(step)
            if _is_directory(root, name, gone):
                yield name, step
    for name in names:
        match = REPLACED.fullmatch(name)
        if match is not None and (step := int(match[1])) not in steps and _is_directory(root, name, gone):
            yield name, step
    for name in names:
        match = CHECKPOINT.fullmatch(name)
        if match is None or (step := int(match[1])) in steps:
            continue
        if os.path.lexists(os.path.join(root, name, MANIFEST)):
            steps.add(step)
            yield name, step


def _is_directory(root: str, name: str, gone: list[str]) -> bool:
    path = os.path.join(root, name)
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except FileNotFoundError:
        if not os.path.islink(path):
            gone.append(name)
    except OSError:
        pass  # it cannot be read, now or later
    return False


def clean_up_run(root: str) -> None:
    """Remove what killed saves left, and restore what they had moved aside; the caller holds the run's lock."""
    for one in _moved_aside(root):
        target = checkpoint_path(root, one.step)
        logger.info("Restoring '%s', which a killed save was about to replace.", target)
        os.rename(one.path, target)
        sync_directory(root)
    for name in leftovers_in(root)[0]:  # looked at again: one that could not be read before must not be lost
        path = os.path.join(root, name)
        logger.info("Removing '%s', left by a killed save.", path)
        if (replaced := REPLACED.fullmatch(name)) is not None:  # it must not come back when its successor is removed
            _remove(path, root, int(replaced[1]))
        else:
            _remove_tree(path)
    _remove_marks(root)


def _remove_marks(root: str) -> None:
    """Remove the save marks of a run that was synced from a store: in a directory nothing reads them."""
    folder = os.path.join(root, MARKS)
    for name in os.listdir(folder) if os.path.isdir(folder) and not os.path.islink(folder) else ():
        split = split_object_name(name)
        if split is not None and CHECKPOINT.fullmatch(split[0]):
            os.unlink(os.path.join(folder, name))
    with suppress(OSError):  # it is missing, or has other files
        os.rmdir(folder)


def leftovers_in(root: str) -> tuple[list[str], list[str]]:
    """Name the leftovers of killed saves in a run: folders that `clean_up_run` removes, and those that it restores."""
    put_back = [os.path.basename(one.path) for one in _moved_aside(root)]
    return [name for name in _hidden_in(root) if name not in put_back], put_back


def _hidden_in(root: str) -> list[str]:
    return [name for name in sorted(os.listdir(root)) if _HIDDEN.fullmatch(name)]


def _moved_aside(root: str) -> list[RunCheckpoint]:
    """Find the checkpoints that nothing has replaced yet; of several of one step, the one that was saved last."""
    aside: dict[int, RunCheckpoint] = {}
    for one in checkpoints_in(root):
        if REPLACED.fullmatch(os.path.basename(one.path)) and not os.path.lexists(checkpoint_path(root, one.step)):
            aside.setdefault(one.step, one)
    return list(aside.values())


def put_in_place(written: str, root: str, step: int) -> str:
    """Make a written checkpoint the one of its step, by one rename; then remove the one that it replaces.

    Returns:
        The path of the checkpoint.
    """
    target = checkpoint_path(root, step)
    aside: str | None = None
    try:
        if os.path.lexists(target):
            aside = _free_name(root, "replaced", step)
            os.rename(target, aside)
            sync_directory(root)
        os.rename(written, target)
    except BaseException:
        if aside is not None and os.path.lexists(aside) and not os.path.lexists(target):
            os.rename(aside, target)
        raise
    sync_directory(root)
    if aside is not None:
        _remove(aside, root, step)
    return target


def remove_step_directory(checkpoint: RunCheckpoint, root: str) -> None:
    """Remove a checkpoint: first by one rename, then its files. What cannot be removed is logged as a warning."""
    for name in _names_in(root):  # what it replaced must not come back in its place
        replaced = REPLACED.fullmatch(name)
        if replaced is not None and int(replaced[1]) == checkpoint.step:
            _remove(os.path.join(root, name), root, checkpoint.step)
    _remove(checkpoint.path, root, checkpoint.step)


def _remove(path: str, root: str, step: int) -> None:
    aside = _free_name(root, "removed", step)
    try:
        os.rename(path, aside)
        sync_directory(root)  # or a power failure could leave it in place with half of its files
    except OSError as error:
        logger.warning("Cannot remove '%s' (%s). The next save retries.", path, error)
        return
    _remove_tree(aside)


def _free_name(root: str, what: str, step: int) -> str:
    """Find a free name: earlier removals may have failed and left files."""
    number = os.getpid()
    while os.path.lexists(path := os.path.join(root, f".{what}-{step}-{number}")):
        number += 1
    return path


def _remove_tree(path: str) -> None:
    try:
        if os.path.islink(path) or not os.path.isdir(path):
            os.unlink(path)
        else:
            shutil.rmtree(path)
    except OSError as error:
        logger.warning("Cannot remove '%s' (%s). The next run retries.", path, error)


# The run as `RunWriter` and readers use it.


class RunDirectory:
    """A run in a directory."""

    keeps_names = True

    def __init__(self, root: str) -> None:
        self.root = root
        self._lock: RunLock | None = None
        self._save_number = 0
        """The highest number seen so far, in case a manifest cannot be read for a moment."""

    def checkpoints(self) -> list[RunCheckpoint]:
        """List the folders and read their manifests."""
        return checkpoints_in(self.root)

    @property
    def is_acquired(self) -> bool:
        """True if this process holds the lock."""
        return self._lock is not None and self._lock.is_held

    def acquire(self) -> bool:
        """Create the directory if it is missing, and lock it.

        Raises:
            DirectoryLockedError: Another manager, in this process or another one, holds the lock.
            Everything that `_change` raises.
        """
        with self._change():
            if not self._is_there():
                raise removed(self.root)
            if self.is_acquired:
                return False
            reject_hub_directory(self.root)
            self._lock = RunLock(self.root, partial(make_directories, self.root))  # a forked process needs its own
            weakref.finalize(self, self._lock.close)
            return True

    def release(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def clean_up(self) -> None:
        """Clean up as `clean_up_run` does."""
        with self._change():
            clean_up_run(self.root)

    @contextmanager
    def transaction(self, save: RunSave) -> Iterator[RunDirectoryTransaction]:
        """Write a checkpoint into a hidden folder and flush it to disk; one rename makes it the checkpoint."""
        with self._change():
            found = self.checkpoints()
            save_number = max([self._save_number, *(one.save_number for one in found)]) + 1
            manifest = CheckpointManifest.begun(save.step, save_number, save.metrics, lambda: found)
            newest = next((one for one in found if one.manifest is not None), None)
            directory = staging_path(self.root, save.step)
            target = RunDirectoryTransaction(self.root, directory, manifest, save, _reusable_shards(newest))
            try:
                os.mkdir(directory)
                yield target
            finally:
                self._save_number = save_number  # also if a flush failed after the rename
                if target.saved is None:
                    shutil.rmtree(directory, ignore_errors=True)  # the next save tries again

    def remove(self, checkpoints: Sequence[RunCheckpoint]) -> None:
        """Remove each checkpoint: first by one rename, then its files."""
        with self._change():
            for one in checkpoints:
                if one.is_current():
                    remove_step_directory(one, self.root)

    def _is_there(self) -> bool:
        """Return whether the directory is the one that was locked; if not, the next save locks another one."""
        is_there = self._lock is None or not self._lock.is_held or self._lock.is_of_the_run
        if not is_there:
            self.release()
        return is_there

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Convert errors of the block, which changes the directory, so that each names it.

        Raises:
            SaveDirectoryError: The directory is a file, or below one.
            AccessDeniedError: It cannot be written.
            RunRemovedError: It was removed during the save.
            OSError: The disk failed.
        """
        try:
            yield
        except HfshardError:
            raise
        except OSError as error:
            if error.errno in _DENIED:
                raise AccessDeniedError(
                    f"Cannot save into '{self.root}' ({error}). Give this user write permission there, or pass the "
                    "CheckpointManager another directory.",
                    path=self.root,
                ) from error
            if not self._is_there():
                raise removed(self.root) from error
            if error.errno in _NO_DIRECTORY and not os.path.isdir(self.root):
                raise _no_directory(self.root) from error
            raise


@dataclass
class RunDirectoryTransaction:
    """`Transaction` of a run in a directory: unchanged shards of the newest checkpoint are linked, others written."""

    _root: str
    _directory: str
    """A hidden directory in the run's, empty at first."""
    _manifest: CheckpointManifest
    """The manifest without files."""
    _save: RunSave
    _known: Mapping[str, KnownFile]
    """Fingerprint -> shard of the newest checkpoint."""
    _records: dict[str, FileDigest] = field(default_factory=dict)
    saved: RunCheckpoint | None = None

    def prepare(self, plan: ShardPlan, names: WeightNames, jobs_of: JobsOf) -> ShardPlan:
        """Keep the standard names: the directory is new."""
        return plan

    def write(self, jobs: Mapping[str, WriteJob]) -> dict[str, FileDigest]:
        """Link unchanged shards, and write all others.

        Raises:
            NotEnoughSpaceError: There is too little space; raised before the first byte is written.
            OSError: The disk failed.
        """
        save = self._save
        checksum = save.new.checksum
        placed = {file: replace(job, path=os.path.join(self._directory, file)) for file, job in jobs.items()}
        synchronize_devices(list(placed.values()))  # a step that runs must not change what is compared and written
        records: dict[str, FileDigest] = {}
        if checksum is not None and self._known:
            linked = save.writer.link(list(placed.values()), self._known, checksum)
            records = {file: record for file, record in zip(placed, linked, strict=True) if record is not None}
        left = {file: job for file, job in placed.items() if file not in records}
        require_space(
            self._directory,
            sum(job.nbytes for job in left.values()),
            doing=f"Saving into '{self._root}'",
            todo=". Free some space, or keep fewer checkpoints with max_to_keep.",
        )
        written = save.writer.write(list(left.values()), checksum, save.progress_callback)
        self._records = records | dict(zip(left, written, strict=True))
        return self._records

    def commit(
        self,
        indexes: Mapping[str, CheckpointIndex],
        index_files: Mapping[str, bytes],
        confirm: Callable[[], None],
    ) -> bool:
        """Write the small files, the manifest last, and rename the directory into place."""
        small = {**self._save.new.small_files, **index_files}
        manifest = self._manifest.with_files(self._records, small)
        folders = {str(folder) for name in small for folder in PurePath(name).parents} - {os.curdir}
        with FlushBatch() as unflushed:
            for folder in sorted(folders):
                os.mkdir(os.path.join(self._directory, folder))
                unflushed.add_directory(os.path.join(self._directory, folder))
            for name, raw in small.items():
                unflushed.write_file(os.path.join(self._directory, name), raw)
            unflushed.write_file(os.path.join(self._directory, MANIFEST), manifest.to_json())
            unflushed.add_directory(self._directory)
            unflushed.flush(writer_threads())
        confirm()
        self.saved = RunCheckpoint.of(put_in_place(self._directory, self._root, manifest.step), manifest)
        return True


def _reusable_shards(checkpoint: RunCheckpoint | None) -> dict[str, KnownFile]:
    """Return the shards of a checkpoint that need not be written again: fingerprint -> file."""
    if checkpoint is None or checkpoint.manifest is None:
        return {}
    return {
        record.fingerprint: KnownFile(os.path.join(checkpoint.path, name), record)
        for name, record in checkpoint.manifest.files.items()
        if name.endswith(SAFETENSORS_SUFFIX) and record.fingerprint is not None and record.is_verifiable
    }


# Errors of a run's own directory, which is a file, was removed, or cannot be written; each names it.


_DENIED: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_NO_DIRECTORY: Final = frozenset({errno.ENOTDIR, errno.EEXIST})


def list_run_directory(root: str) -> list[str]:
    """List a run's directory; return nothing if it does not exist yet.

    Raises:
        SaveDirectoryError: It is a file, or below one, or a link that leads nowhere.
        AccessDeniedError: It cannot be read.
    """
    try:
        return os.listdir(root)
    except FileNotFoundError as error:
        if os.path.islink(root):
            raise _no_directory(root) from error
        return []
    except NotADirectoryError as error:
        raise _no_directory(root) from error
    except PermissionError as error:
        raise AccessDeniedError(
            f"Cannot read '{root}' ({error}), so it is unknown whether it contains checkpoints. Give this user read "
            "permission.",
            path=root,
        ) from error


def removed(root: str) -> RunRemovedError:
    """Build the error of a run whose directory does not exist any more, or is another one."""
    return RunRemovedError(
        f"The run's directory '{root}' was removed or renamed while this run was saving into it. Put it back, or save "
        "again to create a new one.",
        path=root,
    )


def _no_directory(root: str) -> SaveDirectoryError:
    return SaveDirectoryError(
        f"'{root}' cannot be a run's directory: it, or one of its parents, is a file or a broken link. Remove or "
        "rename that, or pass the CheckpointManager another directory.",
        path=root,
    )


# The lock of a run directory: held by one manager while it exists, and never by the processes that it forks.


_WAIT_SECONDS: Final = 5.0
"""The time that a manager waits for another one: a killed process may take that long to disappear."""


class RunLock:
    """The lock of a directory (flock on its descriptor: there is no lock file, and it dies with the process)."""

    def __init__(self, directory: str, make: Callable[[], list[str]] | None = None) -> None:
        """Take the lock; `make` creates the directory if it is missing.

        Raises:
            DirectoryLockedError: Another manager, in this process or another one, holds it.
        """
        self.directory = directory
        self._own = ForkSafeDescriptor()
        try:
            lock(self._own, directory, _WAIT_SECONDS, make)
        except DirectoryLockedError as error:
            self._own.close()
            raise DirectoryLockedError(
                f"Another CheckpointManager is saving into '{directory}': {error.actual}. Stop the other run, or "
                "close() its manager, or pass this one another directory. (A failed notebook cell may hold it: restart "
                "the kernel.)",
                path=directory,
            ) from error
        except BaseException:
            self._own.close()
            raise

    @property
    def is_held(self) -> bool:
        """True if this process holds the lock; a forked one does not."""
        return self._own.is_open

    @property
    def is_of_the_run(self) -> bool:
        """True if the locked directory is still the one at its path: it may have been removed or renamed."""
        return is_still_at(self.directory, self._own.fd)

    def close(self) -> None:
        """Release the lock; a second call does nothing, nor does one in a forked process."""
        if self._own.is_open:
            unlock(self._own.fd, self.directory)
            self._own.close()
