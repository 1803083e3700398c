"""Changes a directory hub: under its lock, leftovers cleaned up first, each change by one rename or one unlink.

A push holds the lock of the root directory's own descriptor: the lock ends with the process, and leaves no file.
It stages the snapshot, flushes it, and renames into place the snapshot, then the manifest, and last the ref, which is
the commit. As long as the ref is staged as `.staging/new-commit`, its commit was not finished, and the next push
removes it. A commit is removed in the other order, manifest first: a snapshot without a manifest is a leftover.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from hfshard.errors import CommitUnfinishedError, DamagedCheckpointError
from hfshard.hub.directory.manifest import (
    COMMITS,
    SNAPSHOTS,
    CommitManifest,
    commit_id,
    commit_ids,
    manifest_path,
    snapshot_path,
)
from hfshard.hub.directory.refs import all_refs, ref_path
from hfshard.hub.directory.stage import check_snapshot
from hfshard.hub.hub_marker import STAGING
from hfshard.hub.refs import is_commit_id
from hfshard.storage.disk.fsops import (
    UNSUPPORTED,
    locked_directory,
    make_directories,
    refuse_odd_directories,
    rename,
    sync_directory,
    unlink_if_there,
    write_file,
)

logger = logging.getLogger(__name__)

_NEW_COMMIT: Final = "new-commit"
"""Name in the staging directory of the ref for a commit that is new. As long as it is there, that commit is unfinished;
renaming it into place commits."""
_STAGED_REF: Final = "ref"
"""The same for a commit that existed before: nothing but the ref is unfinished."""
_STAGED_FILES: Final = "files"
_STAGED_MANIFEST: Final = "manifest.json"
_BLOCK_BYTES: Final = 512
"""The unit of st_blocks, whatever the file system's own blocks are."""
_FOLDERS: Final = (COMMITS, SNAPSHOTS, "refs", "refs/heads", "refs/tags", "refs/pr")


@contextmanager
def locked_hub(root: str, *, wait_seconds: float) -> Iterator[HubWriter]:
    """Hold the hub's lock for one change, with leftovers cleaned up before and after it.

    Raises:
        DirectoryLockedError: Another process held the lock for all of `wait_seconds`.
        SaveDirectoryError: One of the hub's own folders is a link or a file.
    """
    with locked_directory(root, wait_seconds=wait_seconds):
        for folder in (STAGING, *_FOLDERS):
            refuse_odd_directories(root, folder)
        writer = HubWriter(root)
        writer.clean_up()
        try:
            yield writer
        finally:
            try:
                writer.clean_up()
            except (OSError, DamagedCheckpointError) as error:
                logger.warning("'%s' can't be tidied up (%s); the next push tries again.", root, error)


class HubWriter:
    """Changes a hub whose lock is held."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.staging = os.path.join(root, STAGING)

    @property
    def staged_files(self) -> str:
        """The directory that becomes the snapshot."""
        return os.path.join(self.staging, _STAGED_FILES)

    def make_staging(self) -> None:
        """Make the staging directory."""
        if not os.path.isdir(self.staging):
            os.mkdir(self.staging)

    def commit_staged(self, manifest: CommitManifest, ref: str) -> str:
        """Turn what was staged into a commit, and point the ref to it.

        Returns:
            The commit's id.

        Raises:
            OSError: Nothing was committed; what was written is removed when the lock is released.
            CommitUnfinishedError: It was committed, but a power cut may undo it.
        """
        raw = manifest.to_json()
        commit = commit_id(raw)
        if self._is_whole(commit, manifest):
            self.set_ref(ref, commit)
            return commit
        write_file(self._staged(_STAGED_MANIFEST), raw)
        write_file(self._staged(_NEW_COMMIT), f"{commit}\n".encode())
        sync_directory(self.staging)
        sync_directory(self.root)  # from here on, leftovers of this commit are known to be unfinished
        target = snapshot_path(self.root, commit)
        make_directories(os.path.dirname(target))
        self._remove_snapshot(commit)  # a damaged one
        _move_tree(self.staged_files, target)
        sync_directory(os.path.dirname(target))
        path = manifest_path(self.root, commit)
        make_directories(os.path.dirname(path))
        rename(self._staged(_STAGED_MANIFEST), path)
        sync_directory(os.path.dirname(path))
        self._place_ref(_NEW_COMMIT, ref)
        return commit

    def set_ref(self, ref: str, commit: str) -> None:
        """Point a ref to an existing commit."""
        self.make_staging()
        write_file(self._staged(_STAGED_REF), f"{commit}\n".encode())
        self._place_ref(_STAGED_REF, ref)

    def remove_ref(self, ref: str) -> None:
        """Remove a branch, tag or pull request."""
        path = ref_path(self.root, ref)
        os.unlink(path)
        sync_directory(os.path.dirname(path))

    def remove_commits(self, commits: Iterable[str]) -> int:
        """Remove commits that no ref points to: first their manifests, then their files.

        Returns:
            Bytes that were freed on disk; a file that another commit shares frees none.
        """
        doomed = list(commits)
        for commit in doomed:
            unlink_if_there(manifest_path(self.root, commit))
        if doomed:
            sync_directory(os.path.join(self.root, COMMITS))
        free_bytes = _bytes_only_in(snapshot_path(self.root, commit) for commit in doomed)
        for commit in doomed:
            self._remove_snapshot(commit)
        return free_bytes

    def clean_up(self) -> None:
        """Remove what killed changes left: everything that is staged, and commits that were never finished."""
        if os.path.lexists(new := self._staged(_NEW_COMMIT)):
            self._remove_unfinished(new)
        if os.path.lexists(self.staging):
            shutil.rmtree(self.staging)
        known = set(commit_ids(self.root))
        snapshots = os.path.join(self.root, SNAPSHOTS)
        for name in os.listdir(snapshots) if os.path.isdir(snapshots) else ():
            if is_commit_id(name) and name not in known:
                self._remove_snapshot(name)
        for folder in ("refs/heads", "refs/tags"):
            self._remove_empty(os.path.join(self.root, folder))

    def _staged(self, name: str) -> str:
        return os.path.join(self.staging, name)

    def _is_whole(self, commit: str, manifest: CommitManifest) -> bool:
        """Whether this commit exists already: the same files on the same parent with the same message."""
        if commit not in commit_ids(self.root):
            return False
        try:
            check_snapshot(snapshot_path(self.root, commit), manifest.files)
        except DamagedCheckpointError as error:
            logger.warning("Commit %s was damaged, and is written again: %s", commit, error)
            return False
        return True

    def _place_ref(self, staged: str, ref: str) -> None:
        path = ref_path(self.root, ref)
        make_directories(os.path.dirname(path))
        rename(self._staged(staged), path)  # this commits
        try:
            sync_directory(os.path.dirname(path))
        except OSError as error:
            raise CommitUnfinishedError(
                f"'{ref}' of '{self.root}' was changed, but could not be flushed to disk ({error}): a power cut "
                "may undo the change. Check the disk.",
                path=path,
            ) from error

    def _remove_unfinished(self, new: str) -> None:
        with open(new, "rb") as file:
            commit = file.read(64).decode("ascii", "replace").removesuffix("\n")
        if is_commit_id(commit) and commit not in all_refs(self.root).values():
            logger.info("Removing commit %s in '%s', which was never finished.", commit, self.root)
            unlink_if_there(manifest_path(self.root, commit))
            if os.path.isdir(os.path.join(self.root, COMMITS)):
                sync_directory(os.path.join(self.root, COMMITS))
            self._remove_snapshot(commit)

    def _remove_snapshot(self, commit: str) -> None:
        path = snapshot_path(self.root, commit)
        if os.path.islink(path) or not os.path.isdir(path):
            return
        self.make_staging()
        removed = self._staged(f"removed-{commit}")
        try:
            os.rename(path, removed)  # a reader finds all of it or nothing
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            removed = path  # without a manifest it is not a commit any more
        shutil.rmtree(removed)

    def _remove_empty(self, folder: str) -> None:
        """Remove the folders of branches that are gone."""
        for base, folders, files in os.walk(folder, topdown=False):
            if base != folder and not folders and not files:
                os.rmdir(base)


def _move_tree(source: str, target: str) -> None:
    try:
        os.rename(source, target)
        return
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        logger.warning("'%s' has no rename (%s): a snapshot is copied into place.", os.path.dirname(target), error)
    for base, _, files in os.walk(source):  # as long as it has no manifest, nobody reads it
        into = os.path.normpath(os.path.join(target, os.path.relpath(base, source)))
        os.mkdir(into)
        for name in files:
            rename(os.path.join(base, name), os.path.join(into, name))
        sync_directory(into)


def _bytes_only_in(folders: Iterable[str]) -> int:
    """Bytes on disk of the files that have no names outside these directories."""
    seen: dict[tuple[int, int], tuple[int, os.stat_result]] = {}
    for folder in folders:
        for base, _, names in os.walk(folder):
            for name in names:
                status = os.lstat(os.path.join(base, name))
                if stat.S_ISREG(status.st_mode):
                    key = (status.st_dev, status.st_ino)
                    seen[key] = (seen.get(key, (0, status))[0] + 1, status)
    return sum(status.st_blocks * _BLOCK_BYTES for count, status in seen.values() if count == status.st_nlink)
