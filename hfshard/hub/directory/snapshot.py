"""The files of one commit of a directory hub: built by links and copies, and compared byte by byte."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from hfshard._util.progress import ProgressCallback, byte_progress
from hfshard.constants import COPY_BYTES
from hfshard.disk.byte_source import ByteSource, FileSource, clone_blocks, hash_all, sha256_of_source
from hfshard.disk.fsops import NO_LINKS, UNSUPPORTED, rename, require_space, sync, sync_directory, write_all
from hfshard.errors import DamagedCheckpointError, IntegrityError, MissingShardError
from hfshard.hub.directory import commit_graph
from hfshard.hub.repo import RemoteFile

logger = logging.getLogger(__name__)

_WRITE_BITS: Final = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH


@dataclass
class StagedSnapshot:
    """A snapshot that is being built."""

    root: str
    """The hub's directory."""
    folder: str
    """An empty directory for the files."""
    progress_callback: ProgressCallback | None = None
    """Called with the size of every block of new contents."""
    copied_bytes: int = 0
    """Bytes of new contents that were written."""
    _known: dict[str, list[str]] | None = field(default=None)
    _folders: set[str] = field(default_factory=set)

    def put(
        self, kept: Mapping[str, RemoteFile], commit: str | None, adds: Mapping[str, ByteSource]
    ) -> dict[str, RemoteFile]:
        """Stage all files, and flush them.

        Args:
            kept: The files to take over from `commit`.
            commit: A commit of the hub; None if nothing is kept.
            adds: Path -> new contents.

        Returns:
            Path -> size and sha256 of all files.

        Raises:
            NotEnoughSpaceError: The disk is too full; nothing was written.
            IntegrityError: Contents do not have their recorded sha256 or size.
            DamagedCheckpointError: A file to keep is missing or has another size.
        """
        self._folders.add(self.folder)
        copies: list[tuple[str, ByteSource, RemoteFile | None]] = []
        if commit is not None:
            copies += self._keep(kept, commit)
        files = dict(kept)
        for path, content in adds.items():
            if content.sha256 is not None and self._link_known(content.sha256, content.size, self._target(path)):
                files[path] = RemoteFile(content.size, content.sha256)
                self._tell(content.size)
            else:
                copies.append((path, content, None))
        require_space(
            self.root,
            sum(content.size for _, content, _ in copies),
            doing=f"A push to '{self.root}'",
            todo=". Nothing was pushed. Delete revisions and prune the hub, or free some space.",
        )
        for path, content, file in copies:
            files[path] = self._copy(path, content, is_new=file is None)
        for made in sorted(self._folders, key=len, reverse=True):  # deeper folders first
            sync_directory(made)
        return files

    def _keep(self, kept: Mapping[str, RemoteFile], commit: str) -> Iterator[tuple[str, ByteSource, RemoteFile | None]]:
        """Link the files of another commit, and yield those that can't be linked, to be copied."""
        source = commit_graph.snapshot_path(self.root, commit)
        found = check_snapshot(source, kept)
        for path, file in kept.items():
            old = os.path.join(source, path)
            if not link_or_clone(old, self._target(path), found[path]):
                yield path, FileSource(old, file.size, file.sha256), file

    def _target(self, path: str) -> str:
        """Return the staged file for a path of the repo, and create the folders above it."""
        target = os.path.join(self.folder, path)
        above = os.path.dirname(target)
        os.makedirs(above, exist_ok=True)
        while above not in self._folders:
            self._folders.add(above)
            above = os.path.dirname(above)
        return target

    def _link_known(self, sha256: str, size: int, target: str) -> bool:
        """Link a file of any commit that has these contents; it is read first, because it may be damaged."""
        tried: set[tuple[int, int]] = set()  # most commits have the same few files
        for candidate in self._candidates(sha256):
            try:
                status = os.lstat(candidate)
                key = (status.st_dev, status.st_ino)
                if key in tried or not stat.S_ISREG(status.st_mode) or status.st_size != size:
                    continue
                tried.add(key)
                is_same = sha256_of_source(FileSource(candidate, size)) == sha256
            except OSError as error:
                logger.info("'%s' could not be linked: %s", candidate, error)
                continue
            if is_same and link_or_clone(candidate, target, status):
                return True
        return False

    def _candidates(self, sha256: str) -> list[str]:
        if self._known is None:
            self._known = {}
            for commit in commit_graph.commit_ids(self.root):
                try:
                    files = commit_graph.read_commit_manifest(self.root, commit).files
                except DamagedCheckpointError as error:
                    logger.warning("Skipping commit %s: %s", commit, error)
                    continue
                for path, file in files.items():
                    where = os.path.join(commit_graph.snapshot_path(self.root, commit), path)
                    self._known.setdefault(str(file.sha256), []).append(where)
        return self._known.get(sha256, [])

    def _copy(self, path: str, content: ByteSource, *, is_new: bool) -> RemoteFile:
        target = self._target(path)
        hasher, size = hashlib.sha256(), 0
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            with content.open() as reader:
                while block := reader.read(COPY_BYTES):
                    hasher.update(block)
                    write_all(fd, block)
                    size += len(block)
                    if is_new:
                        self._tell(len(block))
            _make_read_only(fd)
            sync(fd, target)
        finally:
            os.close(fd)
        actual = hasher.hexdigest()
        if size != content.size or actual != (content.sha256 or actual):
            self._refuse(path, content, size, actual)
        if is_new:
            self.copied_bytes += size
            if content.sha256 is None:
                self._link_instead(actual, size, target)
        return RemoteFile(size, actual)

    def _link_instead(self, sha256: str, size: int, target: str) -> None:
        """Replace a copy by a link if the hub has the contents already: their hash was not known before the copy."""
        second = f"{self.folder}.second-name"
        if self._link_known(sha256, size, second):
            rename(second, target)

    def _refuse(self, path: str, content: ByteSource, size: int, actual: str) -> None:
        where = content.path if isinstance(content, FileSource) else path
        expected = content.sha256 if size == content.size else content.size
        found = actual if size == content.size else size
        raise IntegrityError(
            f"'{where}' changed after it was saved: {'sha256' if size == content.size else 'bytes'} must be "
            f"{expected}, got {found}. Nothing was pushed. Save the checkpoint again, or check it with 'hfshard "
            "verify'.",
            path=where,
            expected=expected,
            actual=found,
        )

    def _tell(self, count: int) -> None:
        if self.progress_callback is not None:
            self.progress_callback(count)


def link_or_clone(source: str, target: str, status: os.stat_result) -> bool:
    """Give a file's contents a second name without copying them: a hard link, or a file that shares its blocks.

    Returns:
        False if the file system can do neither.
    """
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
    else:
        return True
    return status.st_size > 0 and _clone(source, target)


def _clone(source: str, target: str) -> bool:
    with open(source, "rb") as reading:
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            is_cloned = clone_blocks(reading.fileno(), fd)
            if is_cloned:
                _make_read_only(fd)
                sync(fd, target)
        finally:
            os.close(fd)
    if not is_cloned:
        os.unlink(target)
    return is_cloned


def _make_read_only(fd: int) -> None:
    """Make a file read-only: an editor that writes into a linked file would change it in every commit."""
    try:
        os.fchmod(fd, stat.S_IMODE(os.fstat(fd).st_mode) & ~_WRITE_BITS)
    except OSError as error:
        if error.errno not in UNSUPPORTED | {errno.EPERM}:
            raise
        logger.debug("The file system does not support modes: %s", error)


# Comparison of a snapshot's files with its commit: names, sizes, and every byte.


_TODO = "Restore it from a backup, or delete the commit and push again."


def check_snapshot(folder: str, files: Mapping[str, RemoteFile]) -> dict[str, os.stat_result]:
    """Check that the files of a snapshot exist, are regular and have the right size; no link is followed.

    Returns:
        Path -> status of every file in the directory, including those that are not in `files`.

    Raises:
        MissingShardError: A file is missing, is a link, or is below one.
        IntegrityError: A file has another size.
    """
    found = dict(_walk(folder))
    for path, file in files.items():
        check_size(folder, path, file, found)
    return found


def check_size(folder: str, path: str, file: RemoteFile, found: Mapping[str, os.stat_result]) -> None:
    """Check one file against those that were found in a snapshot, with the errors of `check_snapshot`."""
    where = os.path.join(folder, path)
    if path not in found:
        raise MissingShardError(
            f"'{where}' is missing or is not a regular file, although its commit was complete. {_TODO}", path=where
        )
    if found[path].st_size != file.size:
        raise IntegrityError(
            f"'{where}' is damaged: it must have {file.size} bytes, but has {found[path].st_size}. {_TODO}",
            path=where,
            expected=file.size,
            actual=found[path].st_size,
        )


def reject_unexpected_files(folder: str, files: Mapping[str, RemoteFile], found: Mapping[str, os.stat_result]) -> None:
    """Check that a snapshot has no other files.

    Raises:
        IntegrityError: It has one.
    """
    if extra := sorted(set(found) - set(files)):
        where = os.path.join(folder, extra[0])
        raise IntegrityError(f"'{where}' is in the snapshot, but was not pushed. Remove it.", path=where)


def check_hashes(folder: str, files: Mapping[str, RemoteFile], progress: bool | None) -> None:
    """Read files of a snapshot, several at once, and compare their sha256.

    Raises:
        IntegrityError: One has another sha256; of several, the first in the order of `files`.
    """
    for error in hash_errors(folder, files, progress):
        raise error


def hash_errors(folder: str, files: Mapping[str, RemoteFile], progress: bool | None) -> list[IntegrityError]:
    """Read files of a snapshot like `check_hashes`, and return the errors instead of raising one."""
    contents = {path: FileSource(os.path.join(folder, path), file.size) for path, file in files.items()}
    with byte_progress("Verifying", sum(file.size for file in files.values()), progress) as progress_callback:
        found = hash_all(contents, progress_callback)
    return [
        IntegrityError(
            f"'{contents[path].path}' is damaged: its sha256 must be {file.sha256}, but is {found[path]}. {_TODO}",
            path=contents[path].path,
            expected=file.sha256,
            actual=found[path],
        )
        for path, file in files.items()
        if found[path] != file.sha256
    ]


def _walk(folder: str, below: str = "") -> Iterator[tuple[str, os.stat_result]]:
    """Yield path and status of the regular files in and below a directory; links are skipped."""
    if below == "" and (os.path.islink(folder) or not os.path.isdir(folder)):
        return
    with os.scandir(os.path.join(folder, below)) as entries:
        for entry in entries:
            path = f"{below}/{entry.name}" if below else entry.name
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(folder, path)
            elif entry.is_file(follow_symlinks=False):
                yield path, entry.stat(follow_symlinks=False)
