"""Downloads files of a commit into the cache: in parallel, resumed, and hashed while they are written."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Collection
from typing import Any, Final

from huggingface_hub import hf_hub_url

from hfshard._util.text import without_url_secrets
from hfshard._util.threads import in_threads
from hfshard.constants import COPY_BYTES
from hfshard.disk.fsops import require_space, sync
from hfshard.errors import IntegrityError, NotEnoughSpaceError
from hfshard.hub.remote.cache import RepoCache
from hfshard.hub.remote.transport import HubReader, TransferCancelledError
from hfshard.hub.repo_tree import RemoteFile

logger = logging.getLogger(__name__)

THREADS: Final = 8
"""Files that are downloaded at once: as many as in huggingface_hub."""


def download(
    reader: HubReader,
    cache: RepoCache,
    paths: Collection[str],
    *,
    force: bool = False,
    progress_callback: Callable[[int], object] | None = None,
) -> None:
    """Download files into the cache; contents that it holds already are only linked.

    Args:
        reader: Reads the files of the commit.
        cache: The repo's cache.
        paths: Paths in the repo.
        force: Download even what the cache holds.
        progress_callback: Called from any thread with the bytes that are done; in all, `bytes_to_download`.

    Raises:
        IntegrityError: The bytes of a file are not those that the Hub lists; the file is not in the cache.
        NotEnoughSpaceError: The disk is too full; nothing was downloaded.
        HubConnectionError, HubAccessError, HubNotFoundError, HubError: See `HubReader.read`.
    """
    commit, files = reader.tree.commit, reader.tree.files
    missing = [path for path in dict.fromkeys(paths) if force or not cache.holds(commit, path, files[path])]
    if not missing:
        return
    cache.prepare()
    paths_of: dict[str, list[str]] = {}
    for path in missing:
        paths_of.setdefault(cache.blob(files[path]), []).append(path)
    todo = {same[0]: same for same in paths_of.values() if force or not cache.has_blob(files[same[0]])}
    _check_space(cache, [files[path] for path in todo])
    reader.prefetch_urls(todo)
    job = _Downloader(reader, cache, force=force, progress_callback=progress_callback)
    for_each_path(lambda path: job.download(todo[path]), todo, reader.cancelled)
    for path in missing:
        if not cache.holds(commit, path, files[path]):
            cache.link(commit, path, files[path])
    if todo:
        cache.sync()


def bytes_to_download(reader: HubReader, cache: RepoCache, paths: Collection[str], *, force: bool = False) -> int:
    """Count the bytes that `download` has to fetch."""
    files = {cache.blob(file): file for path in paths if (file := reader.tree.files[path])}
    return sum(file.size for file in files.values() if force or not cache.has_blob(file))


class _Downloader:
    """One call of `download`."""

    def __init__(
        self, reader: HubReader, cache: RepoCache, *, force: bool, progress_callback: Callable[[int], object] | None
    ) -> None:
        self.reader = reader
        self.cache = cache
        self.force = force
        self.progress_callback = progress_callback or (lambda count: None)

    def download(self, paths: list[str]) -> None:
        """Download one file, under all the names that it has."""
        path = paths[0]
        file = self.reader.tree.files[path]
        with self.cache.lock(file, self.reader.cancelled) as is_held:
            if not is_held:
                raise TransferCancelledError
            if not self.force and self.cache.has_blob(file):
                self.progress_callback(file.size)  # another process downloaded it in the meantime
                return
            partial = self.cache.partial(file)
            fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                self._fill(fd, path, file, partial)
                sync(fd, partial)
            except OSError as error:
                raise _without_space(error, partial) from error
            finally:
                os.close(fd)
            os.replace(partial, self.cache.blob(file))
            for name in paths[1:]:
                self.cache.link(self.reader.tree.commit, name, file)
            self.cache.link(self.reader.tree.commit, path, file, is_new=True)

    def _fill(self, fd: int, path: str, file: RemoteFile, partial: str) -> None:
        for _ in range(2):
            hasher = hasher_for(file)
            before = self._prefix(fd, file, hasher)
            if before:
                logger.info("'%s' is resumed at byte %d of %d.", path, before, file.size)
            self.progress_callback(before)
            at = before
            for block in self.reader.read(path, before, file.size, remedy=lambda at: _kept(at, partial)):
                _write(fd, block, at)
                hasher.update(block)
                at += len(block)
                self.progress_callback(len(block))
            found = hasher.hexdigest()
            if found == file.etag:
                return
            os.ftruncate(fd, 0)
            if not before:
                break
            # What an earlier pull left may have been torn by a power cut: try once more, from the first byte.
            self.progress_callback(-file.size)
        os.unlink(partial)
        url = without_url_secrets(hf_hub_url(self.reader.repo_id, path, revision=self.reader.tree.commit))
        kind = "sha256" if file.sha256 is not None else "git hash"
        raise IntegrityError(
            f"'{path}' of '{self.reader.repo_id}' arrived damaged: its {kind} is {found}, and the Hub lists "
            f"{file.etag} ({url}). Nothing of it was kept. Run it again; if it fails again, the server or something on "
            "the way changes the bytes.",
            path=path,
            expected=file.etag,
            actual=found,
        )

    def _prefix(self, fd: int, file: RemoteFile, hasher: Any) -> int:
        """Hash what an earlier pull left, and return how many bytes that is."""
        if os.fstat(fd).st_size > file.size:
            os.ftruncate(fd, 0)
        at = 0
        while block := os.pread(fd, COPY_BYTES, at):
            hasher.update(block)
            at += len(block)
        return at


def hasher_for(file: RemoteFile) -> Any:
    """Make a hasher for the hash that the Hub lists: sha256, or git's own for a small file (see `git_blob_id`)."""
    if file.sha256 is not None:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)


def _write(fd: int, block: bytes, at: int) -> None:
    view = memoryview(block)
    while view:
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written


def _kept(at: int, partial: str) -> str:
    return f"{at:,} bytes are kept in '{partial}': check the network and run it again, it continues from there."


def _without_space(error: OSError, partial: str) -> OSError:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return error
    return NotEnoughSpaceError(
        f"The disk became full while '{partial}' was written. Free some space and run it again: it continues from "
        "there.",
        path=partial,
    )


def _check_space(cache: RepoCache, files: Collection[RemoteFile]) -> None:
    need = sum(max(0, file.size - _on_disk(cache.partial(file))) for file in files)
    if need:
        require_space(
            cache.folder,
            need,
            doing=f"Pulling into '{cache.root}'",
            todo=". Free some space (hf cache ls shows what is there), or pass another cache_dir.",
        )


def _on_disk(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def for_each_path(work: Callable[[str], None], paths: Collection[str], cancelled: threading.Event) -> None:
    """Do the work for all paths, several at once; the first error is raised when all have ended.

    A damaged file does not stop the others: what is whole is kept. Everything else does.
    """

    def attempt(path: str, _: threading.Event) -> IntegrityError | None:
        try:
            work(path)
        except IntegrityError as error:
            return error
        return None

    for damaged in in_threads(attempt, paths, THREADS, cancelled=cancelled):
        if damaged is not None:
            raise damaged
