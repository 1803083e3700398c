"""Download files of one commit into the cache: in parallel, resumed, and hashed while they are written."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Collection
from typing import Any, Final

from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from hfshard._util.progress import byte_progress
from hfshard._util.text import shorten_list, without_url_secrets
from hfshard._util.threads import run_in_threads
from hfshard.checkpoint.locate import CheckpointQuery
from hfshard.constants import COPY_BYTES, WEIGHTS_SUFFIXES
from hfshard.disk.fsops import require_space, sync
from hfshard.errors import (
    CheckpointNotFoundError,
    HubConnectionError,
    HubNotFoundError,
    IntegrityError,
    NotEnoughSpaceError,
)
from hfshard.format.parts_of_ranks import describe_parts
from hfshard.hub.cache import RepoCache, size_on_disk
from hfshard.hub.http import DOWNLOAD_ATTEMPTS, HubReader, translate_hub_errors, tree_of
from hfshard.hub.repo import RemoteFile, RepoTree, is_commit_id
from hfshard.hub.resolve import (
    ResolvedCheckpoint,
    Resolver,
    companion_files,
    files_to_compare,
    warn_of_idle_patterns,
)
from hfshard.stores.hub_calls import hub_retry, offline_variable, seconds_asked

logger = logging.getLogger(__name__)

THREADS: Final = 8
"""Files that are downloaded at once, as in huggingface_hub."""


def download(
    reader: HubReader,
    cache: RepoCache,
    paths: Collection[str],
    *,
    force: bool = False,
    progress_callback: Callable[[int], object] | None = None,
) -> None:
    """Download files into the cache; contents that it has already are only linked.

    Args:
        reader, cache, paths: The reader of the commit's files, the repo's cache, and paths in the repo.
        force: Download even what the cache has.
        progress_callback: Called from any thread with counts of bytes that are done; in all, `bytes_to_download`.

    Raises:
        IntegrityError: The bytes of a file are not those that the Hub lists; the file is not in the cache.
        NotEnoughSpaceError: The disk is too full; nothing was downloaded.
        HubConnectionError, HubAccessError, HubNotFoundError, HubError: The connection failed repeatedly, or the server
            refused.
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
        """Download one file, and link it under all its names."""
        path = paths[0]
        file = self.reader.tree.files[path]
        with self.cache.lock(file, self.reader.cancelled) as is_held:
            if not is_held:
                raise InterruptedError("another file failed, or Ctrl-C was pressed")
            if not self.force and self.cache.has_blob(file):
                self.progress_callback(file.size)  # another process has downloaded it
                return
            partial = self.cache.partial(file)
            fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                self._fill(fd, path, file, partial)
                sync(fd, partial)
            except OSError as error:
                if (explained := _without_space(error, partial)) is error:
                    raise
                raise explained from error
            finally:
                os.close(fd)
            os.replace(partial, self.cache.blob(file))
            for name in paths[1:]:
                self.cache.link(self.reader.tree.commit, name, file)
            self.cache.link(self.reader.tree.commit, path, file, is_new=True)

    def _fill(self, fd: int, path: str, file: RemoteFile, partial: str) -> None:
        for _ in range(2):
            hasher = file.hasher()
            before = self._prefix(fd, file, hasher)
            if before:
                logger.info("Resuming '%s' at byte %d of %d.", path, before, file.size)
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
            f"'{path}' of '{self.reader.repo_id}' arrived damaged: its {kind} is {found}, but the Hub lists "
            f"{file.etag} ({url}). Nothing of it was kept. Try again; if it fails again, the server or a proxy "
            "changes the bytes.",
            path=path,
            expected=file.etag,
            actual=found,
        )

    def _prefix(self, fd: int, file: RemoteFile, hasher: Any) -> int:
        """Hash the bytes that an earlier pull left, and return their number."""
        if os.fstat(fd).st_size > file.size:
            os.ftruncate(fd, 0)
        at = 0
        while block := os.pread(fd, COPY_BYTES, at):
            hasher.update(block)
            at += len(block)
        return at


def _write(fd: int, block: bytes, at: int) -> None:
    view = memoryview(block)
    while view:
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written


def _kept(at: int, partial: str) -> str:
    return f"{at:,} bytes are kept in '{partial}'. Check the network and try again: the download continues from there."


def _without_space(error: OSError, partial: str) -> OSError:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return error
    return NotEnoughSpaceError(
        f"The disk filled up while '{partial}' was being written. Free some space and try again: the download "
        "continues from there.",
        path=partial,
    )


def _check_space(cache: RepoCache, files: Collection[RemoteFile]) -> None:
    need = sum(max(0, file.size - (size_on_disk(cache.partial(file)) or 0)) for file in files)
    if need:
        require_space(
            cache.folder,
            need,
            doing=f"Pulling into '{cache.root}'",
            todo=". Free some space (hf cache ls lists the cached repos), or pass another cache_dir.",
        )


def for_each_path(work: Callable[[str], None], paths: Collection[str], cancelled: threading.Event) -> None:
    """Do the work for all paths, several at once, and raise the first error when all have ended.

    A damaged file does not stop the others, and intact files are kept. Every other error stops them.
    """

    def attempt(path: str, _: threading.Event) -> IntegrityError | None:
        try:
            work(path)
        except IntegrityError as error:
            return error
        return None

    for damaged in run_in_threads(attempt, paths, THREADS, cancelled=cancelled):
        if damaged is not None:
            raise damaged


# Files of one commit as a pull finds them: those that the Hub lists, or those that the cache has.


_SHOWN: Final = 5
"""Names that an error lists."""


class RemoteFiles:
    """The files of a commit as the Hub lists them."""

    def __init__(self, reader: HubReader, cache: RepoCache, *, force: bool, progress: bool | None) -> None:
        """Store the reader and the cache; with `force`, each file is downloaded once, even if the cache has it."""
        self.commit = reader.tree.commit
        self._files = reader.tree.files
        self._reader = reader
        self._cache = cache
        self._force = force
        self._progress = progress
        self._forced: set[str] = set()

    def has(self, path: str, *, is_needed: bool = True) -> bool:
        """Return whether the commit has a file."""
        return path in self._files

    def download(self, paths: Collection[str]) -> None:
        """Download files into the cache.

        Raises:
            CheckpointNotFoundError: The commit has no such file.
        """
        if lacking := [path for path in paths if path not in self._files]:
            shown = shorten_list(lacking, _SHOWN, quote=True)
            raise CheckpointNotFoundError(
                f"'{self._reader.repo_id}' lacks {shown}, which its index names (commit {self.commit}). Report it to "
                "the repo's owner, or load another revision.",
                path=lacking[0],
            )
        force = self._force
        todo = [path for path in paths if path not in self._forced]
        if force:
            self._forced |= set(todo)
        total = bytes_to_download(self._reader, self._cache, todo, force=force)
        progress = self._progress if total > COPY_BYTES else False  # less is downloaded in no time
        with byte_progress("Pulling", total, progress) as progress_callback:
            download(self._reader, self._cache, todo, force=force, progress_callback=progress_callback)

    def snapshot(self, path: str = "") -> str:
        """Return the local path of a file."""
        return self._cache.snapshot(self.commit, path)

    def code(self) -> list[str]:
        """Return the Python files of the commit."""
        return [path for path in self._files if path.endswith(".py")]

    def description(self) -> tuple[str, str]:
        """Describe for an error message what was searched, and what to do."""
        weights = sorted(path for path in self._files if path.endswith(WEIGHTS_SUFFIXES))
        held = f"It has {shorten_list(weights, _SHOWN, quote=True)}." if weights else "It has no weights at all."
        repo_id = self._reader.repo_id
        return f"'{repo_id}' (commit {self.commit})", f"{held} To list its files, run: hf models ls {repo_id}"

    def parts(self, folder: str) -> str | None:
        """Describe what a folder has in parts, one for each rank, and how to merge them; None if there are none."""
        paths = [path.removeprefix(folder) for path in self._files if path.startswith(folder)]
        return describe_parts(paths, f"{self._reader.repo_id}/{folder}".rstrip("/"), is_directory=False)


class CacheMissError(Exception):
    """Absence of a needed file from the cache, or the cache does not know whether the commit has it."""


class CachedFiles:
    """The files of a commit that the cache has."""

    def __init__(self, cache: RepoCache, commit: str, repo_id: str, *, is_sure: bool, todo: str = "") -> None:
        self.commit = commit
        self._cache = cache
        self._repo_id = repo_id
        self._is_sure = is_sure
        self._todo = todo

    def has(self, path: str, *, is_needed: bool = True) -> bool:
        """Return whether the commit has a file; False if the cache does not know.

        Raises:
            CacheMissError: The cache does not know, the file `is_needed`, and the result must be sure (`is_sure`).
        """
        found = self._cache.has(self.commit, path)
        if found is None and is_needed and self._is_sure:
            raise CacheMissError(f"the cache does not record whether '{self._repo_id}' has '{path}'")
        return bool(found)

    def download(self, paths: Collection[str]) -> None:
        """Check that the cache has files.

        Raises:
            CacheMissError: One is missing.
        """
        if missing := [path for path in paths if not self._cache.has(self.commit, path)]:
            raise CacheMissError(
                f"'{self._repo_id}' (commit {self.commit}) is incomplete in the cache '{self._cache.root}': it lacks "
                f"{shorten_list(missing, _SHOWN, quote=True)}"
            )

    def snapshot(self, path: str = "") -> str:
        """Return the local path of a file."""
        return self._cache.snapshot(self.commit, path)

    def code(self) -> list[str]:
        """Return no files."""
        return []  # the cache does not know all files; transformers asks for what is missing

    def description(self) -> tuple[str, str]:
        """Describe for an error message what was searched, and what to do."""
        return f"The cached part of '{self._repo_id}' (commit {self.commit}) in '{self._cache.root}'", self._todo

    def parts(self, folder: str) -> str | None:
        """Return None, because the cache does not know all files."""
        return None


# Downloads of one commit into the cache: by one request for the list of its files, or from what the cache has.


def fetch(repo_id: str, resolver: Resolver, query: CheckpointQuery, progress: bool | None = None) -> ResolvedCheckpoint:
    """Download the files that a resolver finds into the cache, all of one commit, and what else the query asks for.

    One request returns the commit and its files; none is sent if the revision is a commit and the cache has all files.
    If the Hub can't be reached, the cached files of the revision are used if they are complete.

    Raises:
        Everything that `pull_checkpoint` raises.
    """
    fetcher = Fetcher(repo_id, query, progress)
    if is_offline(query.local_files_only):
        return fetcher.from_cache(resolver)
    needs_list = query.needs_companions or query.needs_signature
    if is_commit_id(query.revision) and not query.force_download and not needs_list:
        try:
            return resolver(CachedFiles(fetcher.cache, str(query.revision), repo_id, is_sure=True))
        except CacheMissError as error:
            logger.debug("%s: asking the Hub.", error)
    return fetcher.from_hub(resolver)


def fetch_tree(
    repo_id: str, revision: str | None, token: str | bool | None = None, *, attempts: int = DOWNLOAD_ATTEMPTS
) -> RepoTree:
    """Fetch the commit of a revision (None: main) and the list of its files, in one request.

    Args:
        repo_id, revision, token: As in huggingface_hub.
        attempts: How often to ask at most, if the Hub can't be reached, or asks to wait.

    Raises:
        HubNotFoundError, HubAccessError, HubConnectionError, HubError: The Hub refused, or could not be reached.
    """
    api = HfApi(token=token, library_name="hfshard")
    retry = hub_retry(attempts=attempts)
    while True:
        try:
            with translate_hub_errors(repo_id, token, revision=revision):
                return tree_of(api, repo_id, revision)
        except HubConnectionError as error:
            if not retry.wait(retry_after=seconds_asked(error.__cause__)):
                raise


def fetch_tree_for_reading(repo_id: str, revision: str | None, token: str | bool | None) -> RepoTree:
    """Check a repo_id that a user passed, and fetch the list of a revision's files.

    Raises:
        HubNotFoundError: It is not a repo_id, or there is no such repo.
        HubConnectionError: Offline mode is on, or the Hub can't be reached.
    """
    check_repo_id(repo_id)
    return fetch_tree(repo_id, revision, token, attempts=1 if constants.is_offline_mode() else DOWNLOAD_ATTEMPTS)


def check_repo_id(repo_id: str) -> None:
    """Check that a name is valid as a repo_id.

    Raises:
        HubNotFoundError: It is not.
    """
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        shown = without_url_secrets(repo_id)
        name, at, revision = shown.partition("@")
        hint = f" Pass revisions separately: '{name}' with revision='{revision}' (--revision {revision})." if at else ""
        raise HubNotFoundError(
            f"'{shown}' is neither a directory nor a repo_id. Pass org/name.{hint} {without_url_secrets(str(error))}",
            path=shown,
        ) from (error if shown == repo_id else None)


class Fetcher:
    """One download of a repo's files into its cache."""

    def __init__(self, repo_id: str, query: CheckpointQuery, progress: bool | None) -> None:
        check_repo_id(repo_id)
        query.check_subfolder()
        self.repo_id = repo_id
        self.query = query
        self.progress = progress
        self.cache = RepoCache(repo_id, query.cache_dir)
        self.was_asked = False
        """Whether the Hub has sent the list of the files."""

    def from_hub(self, resolver: Resolver) -> ResolvedCheckpoint:
        """Ask the Hub, and download what is not in the cache; if the Hub can't be reached, fall back to the cache."""
        try:
            tree = self._tree(resolver)
        except HubConnectionError as error:
            resolved = self._despite(error, resolver)
            if resolved is None:
                raise
            return resolved
        self.was_asked = True
        files = RemoteFiles(
            HubReader(self.repo_id, tree, self.query.token),
            self.cache,
            force=self.query.force_download,
            progress=self.progress,
        )
        resolved = resolver(files)
        sizes = {path: file.size for path, file in tree.files.items()}
        if self.query.needs_companions:
            warn_of_idle_patterns(sizes, self.query)
            files.download(companion_files(sizes, self.query))
        if self.query.needs_signature:
            files.download(files_to_compare(sizes, self.query))
        for path in resolved.known_missing:
            self.cache.mark_missing(tree.commit, path)
        self.cache.remember(self.query.revision, tree.commit)
        return resolved

    def from_cache(self, resolver: Resolver) -> ResolvedCheckpoint:
        """Use the cache alone, without a request.

        Raises:
            CheckpointNotFoundError: The cache does not have all files.
        """
        why = (
            "local_files_only=True allows no download"
            if self.query.local_files_only
            else f"offline mode is on ({offline_variable()})"
        )
        how = "without local_files_only" if self.query.local_files_only else f"with {offline_variable()} unset"
        revision = self.query.revision or constants.DEFAULT_REVISION
        todo = f"Load it once {how}; to list the files of the repo, run: hf models ls {self.repo_id}"
        commit = self.cache.commit_of(revision)
        if commit is None or not os.path.isdir(self.cache.snapshot(commit)):
            raise CheckpointNotFoundError(
                f"'{self.repo_id}' at revision '{revision}' is not in the cache '{self.cache.root}', and {why}. {todo}",
                path=self.repo_id,
            )
        try:
            return resolver(CachedFiles(self.cache, commit, self.repo_id, is_sure=False, todo=f"{why}. {todo}"))
        except CacheMissError as error:
            raise CheckpointNotFoundError(f"{error}, and {why}. {todo}", path=self.repo_id) from error

    def _tree(self, resolver: Resolver) -> RepoTree:
        """Ask the Hub for the list of files, and retry only if the cache does not have all of them."""
        try:
            return fetch_tree(self.repo_id, self.query.revision, self.query.token, attempts=1)
        except HubConnectionError as error:
            if self._cached(resolver) is not None:
                raise
            logger.info("%s Retrying.", error)
        return fetch_tree(self.repo_id, self.query.revision, self.query.token)

    def _despite(self, error: HubConnectionError, resolver: Resolver) -> ResolvedCheckpoint | None:
        resolved = self._cached(resolver)
        if resolved is not None:
            logger.warning("%s Using the files in the cache: commit %s.", error, resolved.commit)
        return resolved

    def _cached(self, resolver: Resolver) -> ResolvedCheckpoint | None:
        """Return what the cache has, if that is complete."""
        commit = self.cache.commit_of(self.query.revision)
        if commit is None or self.query.force_download:
            return None
        try:
            return resolver(CachedFiles(self.cache, commit, self.repo_id, is_sure=False))
        except (CacheMissError, CheckpointNotFoundError):
            return None


def is_offline(local_files_only: bool) -> bool:
    """Return whether no request may be sent."""
    return local_files_only or bool(constants.is_offline_mode())
