"""Change a directory hub: under its lock, after removing leftovers, each change by one rename or one unlink.

A push holds the lock of the root directory's own descriptor: the lock ends with the process, and leaves no file.
It stages the snapshot, flushes it, and renames into place the snapshot, then the manifest, and last the ref, which is
the commit. While the ref is staged as `.staging/new-commit`, its commit is unfinished, and the next push removes it.
A commit is removed by moving its manifest to `deleted/` and then deleting its snapshot. A snapshot with no manifest in
`commits/` or `deleted/` has lost it, and is left alone.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from hfshard.disk.fsops import (
    UNSUPPORTED,
    locked_directory,
    make_directories,
    reject_linked_directories,
    rename,
    sync_directory,
    unlink_if_exists,
    write_file,
)
from hfshard.errors import CommitUnfinishedError, DamagedCheckpointError
from hfshard.hub.directory import commit_graph
from hfshard.hub.directory.snapshot import check_snapshot

logger = logging.getLogger(__name__)

_STAGED_REF: Final = "ref"
"""Like `NEW_COMMIT`, for a commit that existed before: only the ref is unfinished."""
_REPLACED: Final = "replaced-"
"""Prefix, before its id, of a damaged snapshot in the staging directory: put back if no intact one took its place."""
_STAGED_FILES: Final = "files"
_STAGED_MANIFEST: Final = "manifest.json"
_FOLDERS: Final = (
    commit_graph.COMMITS,
    commit_graph.SNAPSHOTS,
    commit_graph.DELETED,
    "refs",
    "refs/heads",
    "refs/tags",
    "refs/pr",
)


@contextmanager
def lock_hub(root: str, *, wait_seconds: float) -> Iterator[HubWriter]:
    """Hold the hub's lock for one change, and remove leftovers before and after it.

    Raises:
        DirectoryLockedError: Another process held the lock for all of `wait_seconds`.
        SaveDirectoryError: One of the hub's own folders is a link or a file.
    """
    with locked_directory(root, wait_seconds=wait_seconds):
        for folder in (commit_graph.STAGING, *_FOLDERS):
            reject_linked_directories(root, folder)
        writer = HubWriter(root)
        writer.clean_up()
        try:
            yield writer
        finally:
            try:
                writer.clean_up()
                writer.drop_name_notes()
            except (OSError, DamagedCheckpointError) as error:
                logger.warning("'%s' could not be cleaned up (%s); the next push will retry.", root, error)


class HubWriter:
    """Writer of a hub whose lock is held."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.staging = os.path.join(root, commit_graph.STAGING)

    @property
    def staged_files(self) -> str:
        """The directory that becomes the snapshot."""
        return os.path.join(self.staging, _STAGED_FILES)

    def make_staging(self) -> None:
        """Create the staging directory if it is missing."""
        if not os.path.isdir(self.staging):
            os.mkdir(self.staging)

    def commit_staged(self, manifest: commit_graph.CommitManifest, ref: str) -> str:
        """Turn the staged files into a commit, and point the ref to it.

        Returns:
            The commit's id.

        Raises:
            OSError: Nothing was committed; the files that were written are removed when the lock is released.
            CommitUnfinishedError: It was committed, but a power cut may undo it.
        """
        raw = manifest.to_json()
        commit = commit_graph.commit_id(raw)
        if self._is_whole(commit):
            self.set_ref(ref, commit)
            return commit
        path = commit_graph.manifest_path(self.root, commit)
        staged_ref = _STAGED_REF if os.path.lexists(path) else commit_graph.NEW_COMMIT
        write_file(self._staged(_STAGED_MANIFEST), raw)
        write_file(self._staged(staged_ref), f"{commit}\n".encode())
        sync_directory(self.staging)
        sync_directory(self.root)  # from here on, leftovers of a new commit are known to be unfinished
        target = commit_graph.snapshot_path(self.root, commit)
        make_directories(os.path.dirname(target))
        self._move_snapshot(commit, _REPLACED)  # a damaged one
        move_directory(self.staged_files, target)
        sync_directory(os.path.dirname(target))
        make_directories(os.path.dirname(path))
        rename(self._staged(_STAGED_MANIFEST), path)
        sync_directory(os.path.dirname(path))
        self._place_ref(staged_ref, ref)
        return commit

    def set_ref(self, ref: str, commit: str) -> None:
        """Point a ref to an existing commit."""
        self.make_staging()
        write_file(self._staged(_STAGED_REF), f"{commit}\n".encode())
        self._place_ref(_STAGED_REF, ref)

    def remove_ref(self, ref: str) -> None:
        """Remove a branch, tag or pull request, and record the commits that may be removed: those only it led to.

        Raises:
            CommitUnfinishedError: It was removed, but a power cut may undo it.
        """
        path = commit_graph.ref_path(self.root, ref)
        commit = str(commit_graph.read_ref(self.root, ref))
        others = {name: target for name, target in commit_graph.all_refs(self.root).items() if name != ref}
        try:
            going = commit_graph.reachable_from(self.root, [commit]) - commit_graph.reachable(self.root, others)
        except DamagedCheckpointError as error:
            logger.warning("It is unknown which commits the other names of '%s' lead to: %s", self.root, error)
            going = {commit}
        self._note([commit_graph.unnamed_path(self.root, one) for one in going])
        os.unlink(path)
        self._flush_ref(ref)

    def remove_commits(self, commits: Iterable[str]) -> int:
        """Remove commits that no ref points to: move their manifests to the deleted ones, then delete their files.

        Returns:
            Bytes that were freed on disk; a file that another commit shares frees none.
        """
        doomed = list(commits)
        make_directories(os.path.join(self.root, commit_graph.DELETED))
        for commit in doomed:
            try:
                rename(commit_graph.manifest_path(self.root, commit), commit_graph.deleted_path(self.root, commit))
            except FileNotFoundError:  # it was lost
                self._note([commit_graph.deleted_path(self.root, commit)])
        if doomed:
            self._sync_folders(commit_graph.DELETED, commit_graph.COMMITS)
        free_bytes = exclusive_bytes(commit_graph.snapshot_path(self.root, commit) for commit in doomed)
        for commit in doomed:
            self._remove_snapshot(commit)
        return free_bytes

    def drop_tombstones(self, reached: Collection[str]) -> None:
        """Remove the records of deletions, except of the commits that names reach; no others are left."""
        for commit in commit_graph.unreferenced_commits(self.root):
            unlink_if_exists(commit_graph.unnamed_path(self.root, commit))
        for commit in commit_graph.deleted_commits(self.root):
            if commit not in reached:
                unlink_if_exists(commit_graph.deleted_path(self.root, commit))
        self._sync_folders(commit_graph.DELETED)

    def clean_up(self) -> None:
        """Remove the leftovers of killed changes: everything that is staged, and unfinished commits."""
        if (new := commit_graph.unfinished_commit(self.root)) is not None:
            self._remove_unfinished(new)
        if os.path.lexists(self.staging):
            self._put_back()
            shutil.rmtree(self.staging)
        for commit in commit_graph.deleted_commits(self.root):
            if os.path.lexists(commit_graph.manifest_path(self.root, commit)):  # it was pushed again
                unlink_if_exists(commit_graph.deleted_path(self.root, commit))
            elif os.path.lexists(commit_graph.snapshot_path(self.root, commit)) and not self._is_named(commit):
                self._remove_snapshot(commit)
        for folder in ("refs/heads", "refs/tags"):
            self._remove_empty(os.path.join(self.root, folder))

    def drop_name_notes(self) -> None:
        """Remove the records of commits that names lead to again."""
        if noted := set(commit_graph.unreferenced_commits(self.root)):
            for commit in noted & commit_graph.reachable_from(self.root, commit_graph.all_refs(self.root).values()):
                unlink_if_exists(commit_graph.unnamed_path(self.root, commit))

    def _staged(self, name: str) -> str:
        return os.path.join(self.staging, name)

    def _is_whole(self, commit: str) -> bool:
        """Return whether this commit exists intact: the same files on the same parent with the same message."""
        if commit not in commit_graph.commit_ids(self.root):
            return False
        try:
            check_snapshot(
                commit_graph.snapshot_path(self.root, commit),
                commit_graph.read_commit_manifest(self.root, commit).files,
            )
        except DamagedCheckpointError as error:
            logger.warning("Commit %s is damaged, until it is pushed again: %s", commit, error)
            return False
        return True

    def _place_ref(self, staged: str, ref: str) -> None:
        path = commit_graph.ref_path(self.root, ref)
        make_directories(os.path.dirname(path))
        rename(self._staged(staged), path)  # this commits
        self._flush_ref(ref)

    def _flush_ref(self, ref: str) -> None:
        path = commit_graph.ref_path(self.root, ref)
        try:
            sync_directory(os.path.dirname(path))
        except OSError as error:
            raise CommitUnfinishedError(
                f"'{ref}' of '{self.root}' was changed, but could not be flushed to disk ({error}): a power cut "
                "may undo the change. Check the disk.",
                path=path,
            ) from error

    def _note(self, paths: Iterable[str]) -> None:
        """Create empty files among the records of deletions, durably."""
        make_directories(os.path.join(self.root, commit_graph.DELETED))
        for path in paths:
            if not os.path.lexists(path):
                write_file(path, b"")
        self._sync_folders(commit_graph.DELETED)

    def _is_named(self, commit: str) -> bool:
        """Return whether a ref points to a commit, or may do so because one can't be read."""
        try:
            return commit in commit_graph.all_refs(self.root).values()
        except DamagedCheckpointError as error:
            logger.warning("%s", error)
            return True

    def _remove_unfinished(self, commit: str) -> None:
        """Remove a staged commit, unless it was finished since, as is possible in the copy of a hub that was in use."""
        if commit in commit_graph.all_refs(self.root).values() or self._has_children(commit):
            return
        logger.info("Removing commit %s in '%s', which was not finished.", commit, self.root)
        unlink_if_exists(commit_graph.manifest_path(self.root, commit))
        self._sync_folders(commit_graph.COMMITS)
        self._remove_snapshot(commit)

    def _has_children(self, commit: str) -> bool:
        """Return whether a commit was made on this one, or may have been because a manifest can't be read."""
        try:
            return any(
                commit in commit_graph.read_commit_manifest(self.root, one).parents
                for one in commit_graph.commit_ids(self.root)
            )
        except DamagedCheckpointError as error:
            logger.warning("Keeping commit %s: %s", commit, error)
            return True

    def _sync_folders(self, *folders: str) -> None:
        for folder in folders:
            if os.path.isdir(path := os.path.join(self.root, folder)):
                sync_directory(path)

    def _put_back(self) -> None:
        """Put back damaged snapshots that were to be replaced, where no intact ones took their place."""
        for name in os.listdir(self.staging):
            commit = name.removeprefix(_REPLACED)
            if commit != name and not self._is_whole(commit):
                merge_tree(self._staged(name), commit_graph.snapshot_path(self.root, commit))

    def _remove_snapshot(self, commit: str) -> None:
        if (removed := self._move_snapshot(commit, "removed-")) is not None:
            shutil.rmtree(removed)

    def _move_snapshot(self, commit: str, prefix: str) -> str | None:
        """Move a snapshot into the staging directory, so that a reader finds all of it or nothing.

        Returns:
            Its path now; None if there was none.
        """
        path = commit_graph.snapshot_path(self.root, commit)
        if os.path.islink(path) or not os.path.isdir(path):
            return None
        self.make_staging()
        moved = self._staged(f"{prefix}{commit}")
        try:
            os.rename(path, moved)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            if prefix != _REPLACED:
                return path  # without a manifest it is not a commit any more
            move_directory(path, moved)
            shutil.rmtree(path)
        return moved

    def _remove_empty(self, folder: str) -> None:
        """Remove the folders of branches that are gone."""
        for base, folders, files in os.walk(folder, topdown=False):
            if base != folder and not folders and not files:
                os.rmdir(base)


# Moves of snapshot folders, also on file systems that can't rename folders, and the disk space that they take.


_BLOCK_BYTES: Final = 512
"""The unit of st_blocks, whatever the file system's own blocks are."""


def move_directory(source: str, target: str) -> None:
    """Move a folder; if folders can't be renamed, move it file by file, durably."""
    try:
        os.rename(source, target)
        return
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        logger.warning(
            "'%s' cannot rename folders (%s): the snapshot is moved file by file.", os.path.dirname(target), error
        )
    _move_files(source, target, is_new=True)


def merge_tree(source: str, target: str) -> None:
    """Move what the target lacks: all, or, if folders can't be renamed, the files that were not moved yet."""
    if not os.path.lexists(target):
        move_directory(source, target)
        sync_directory(os.path.dirname(target))
    else:
        _move_files(source, target, is_new=False)


def _move_files(source: str, target: str, *, is_new: bool) -> None:
    """Move the files that the target lacks, durably; a new one must not exist, not even as a link."""
    for base, _, files in os.walk(source):
        into = os.path.normpath(os.path.join(target, os.path.relpath(base, source)))
        os.makedirs(into, exist_ok=not is_new)
        for name in files:
            if not os.path.lexists(os.path.join(into, name)):
                rename(os.path.join(base, name), os.path.join(into, name))
        sync_directory(into)


def exclusive_bytes(folders: Iterable[str]) -> int:
    """Count the bytes on disk of the files that have no names outside these directories."""
    seen: dict[tuple[int, int], tuple[int, os.stat_result]] = {}
    for folder in folders:
        for base, _, names in os.walk(folder):
            for name in names:
                status = os.lstat(os.path.join(base, name))
                if stat.S_ISREG(status.st_mode):
                    key = (status.st_dev, status.st_ino)
                    seen[key] = (seen.get(key, (0, status))[0] + 1, status)
    return sum(status.st_blocks * _BLOCK_BYTES for count, status in seen.values() if count == status.st_nlink)
