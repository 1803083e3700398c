"""Compares the files of a snapshot with what its commit says about them: names, sizes, and every byte."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping

from hfshard._util.progress import bytes_bar
from hfshard._util.threads import cancellable, in_threads
from hfshard.constants import COPY_BYTES, FILES_AT_ONCE
from hfshard.errors import IntegrityError, MissingShardError
from hfshard.hub.repo_tree import RemoteFile

_TODO = "Restore it from a backup, or delete the commit and push again."


def check_snapshot(folder: str, files: Mapping[str, RemoteFile]) -> dict[str, os.stat_result]:
    """Check that the files of a snapshot are there, regular and of the right size; no link is followed.

    Returns:
        Path -> status of every file in the directory, including those that are not in `files`.

    Raises:
        MissingShardError: A file is missing, is a link, or lies below one.
        IntegrityError: A file has another size.
    """
    found = dict(_walk(folder))
    for path, file in files.items():
        check_size(folder, path, file, found)
    return found


def check_size(folder: str, path: str, file: RemoteFile, found: Mapping[str, os.stat_result]) -> None:
    """Check one file of those that were found in a snapshot; raises like `check_snapshot`."""
    where = os.path.join(folder, path)
    if path not in found:
        raise MissingShardError(
            f"'{where}' is missing, or is not a regular file, though its commit was complete. {_TODO}", path=where
        )
    if found[path].st_size != file.size:
        raise IntegrityError(
            f"'{where}' is damaged: it must have {file.size} bytes, and has {found[path].st_size}. {_TODO}",
            path=where,
            expected=file.size,
            actual=found[path].st_size,
        )


def check_no_strays(folder: str, files: Mapping[str, RemoteFile], found: Mapping[str, os.stat_result]) -> None:
    """Check that a snapshot holds nothing else.

    Raises:
        IntegrityError: It does.
    """
    if extra := sorted(set(found) - set(files)):
        where = os.path.join(folder, extra[0])
        raise IntegrityError(f"'{where}' was not pushed, and lies in the snapshot. Remove it.", path=where)


def check_hashes(folder: str, files: Mapping[str, RemoteFile], progress: bool | None) -> None:
    """Read files of a snapshot, several at once, and compare their sha256.

    Raises:
        IntegrityError: One has another sha256; of several, the first in the order of `files`.
    """
    for error in hash_errors(folder, files, progress):
        raise error


def hash_errors(folder: str, files: Mapping[str, RemoteFile], progress: bool | None) -> list[IntegrityError]:
    """Read files of a snapshot like `check_hashes`, and return what is wrong instead of raising it."""
    sizes = sum(file.size for file in files.values())
    with bytes_bar("Verifying", sizes, progress) as progress_callback:

        def check(item: tuple[str, RemoteFile], cancelled: threading.Event) -> IntegrityError | None:
            path, file = item
            try:
                check_hash(os.path.join(folder, path), str(file.sha256), cancellable(progress_callback, cancelled))
            except IntegrityError as error:
                return error
            return None

        return [error for error in in_threads(check, files.items(), FILES_AT_ONCE) if error is not None]


def check_hash(path: str, sha256: str, tell: Callable[[int], object] = lambda _: None) -> None:
    """Read a file of a snapshot, and compare its sha256.

    Raises:
        IntegrityError: It has another one.
    """
    if (actual := hash_file(path, tell)) != sha256:
        raise IntegrityError(
            f"'{path}' is damaged: it must have sha256 {sha256}, and has {actual}. {_TODO}",
            path=path,
            expected=sha256,
            actual=actual,
        )


def hash_file(path: str, tell: Callable[[int], object] = lambda _: None) -> str:
    """The sha256 of a file, in hex; `tell` is called with the size of every block."""
    hasher = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(COPY_BYTES):
            hasher.update(block)
            tell(len(block))
    return hasher.hexdigest()


def _walk(folder: str, below: str = "") -> Iterator[tuple[str, os.stat_result]]:
    """Path -> status of the regular files in and below a directory; of a link, none."""
    if below == "" and (os.path.islink(folder) or not os.path.isdir(folder)):
        return
    with os.scandir(os.path.join(folder, below)) as entries:
        for entry in entries:
            path = f"{below}/{entry.name}" if below else entry.name
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(folder, path)
            elif entry.is_file(follow_symlinks=False):
                yield path, entry.stat(follow_symlinks=False)
