"""One repo's huggingface_hub cache: blobs by hash, snapshots of links, refs, and missing files."""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

from filelock import Timeout
from huggingface_hub import constants
from huggingface_hub.utils import WeakFileLock

from hfshard._util.arguments import absolute_directory
from hfshard.disk.fsops import sync_directory
from hfshard.errors import HubError, UnsafePathError
from hfshard.hub.repo import RemoteFile, is_commit_id, is_plain_path

logger = logging.getLogger(__name__)

_ETAG: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""A git hash (sha1), or a sha256."""

_PARTIAL_SUFFIX: Final = ".hfshard.incomplete"
"""Suffix of an unfinished blob: no other tool writes to such a name, and `hf cache` treats it as a leftover."""

_LOCK_SECONDS: Final = 0.5
"""How long to wait for a lock before checking whether the transfer was cancelled."""

_TAG: Final = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# This file is a cache directory tag: backup tools leave the directory alone. See https://bford.info/cachedir/\n"
)


class RepoCache:
    """One repo's folder in the cache.

    Attributes:
        folder: `<cache>/models--org--name`.
    """

    def __init__(self, repo_id: str, cache_dir: str | os.PathLike[str] | None = None) -> None:
        self.root = absolute_directory(cache_dir or constants.HF_HUB_CACHE, "cache_dir")
        self._name = constants.REPO_ID_SEPARATOR.join(["models", *repo_id.split("/")])
        self.folder = os.path.join(self.root, self._name)

    def commit_of(self, revision: str | None) -> str | None:
        """Return the commit that a revision was at when it was last pulled; None if it never was."""
        revision = revision or constants.DEFAULT_REVISION
        if is_commit_id(revision):
            return revision
        if not is_plain_path(revision):
            return None
        try:
            with open(os.path.join(self.folder, "refs", *revision.split("/")), encoding="utf-8") as file:
                commit = file.read().strip()
        except OSError:
            return None
        return commit if is_commit_id(commit) else None

    def remember(self, revision: str | None, commit: str) -> None:
        """Record a revision's commit atomically; a cache that is not writable stays as it is."""
        revision = revision or constants.DEFAULT_REVISION
        if revision == commit or self.commit_of(revision) == commit or not is_plain_path(revision):
            return
        path = os.path.join(self.folder, "refs", *revision.split("/"))
        aside = f"{path}.{uuid.uuid4().hex[:8]}.tmp"
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(aside, "w", encoding="utf-8") as file:
                file.write(commit)
            os.replace(aside, path)
        except OSError as error:
            logger.warning("'%s' could not be written: %s", path, error)

    def snapshot(self, commit: str, path: str = "") -> str:
        """Return the path of a commit's file, whether it exists or not."""
        if not is_commit_id(commit) or (path and not is_plain_path(path)):
            raise UnsafePathError(
                f"The Hub lists the file {path[:200]!r} in commit {commit[:200]!r}, which would be outside the "
                "cache. Do not load this repo.",
                path=path,
            )
        return os.path.join(self.folder, "snapshots", commit, *path.split("/") if path else ())

    def has(self, commit: str, path: str) -> bool | None:
        """Return whether a commit has a file: True if it is cached, False if it is known to be missing, else None."""
        if os.path.isfile(self.snapshot(commit, path)):
            return True
        return False if os.path.isfile(self._missing_mark(commit, path)) else None

    def mark_missing(self, commit: str, path: str) -> None:
        """Record that a commit has no such file, so that the Hub is not asked again."""
        mark = self._missing_mark(commit, path)
        try:
            os.makedirs(os.path.dirname(mark), exist_ok=True)
            with open(mark, "a", encoding="utf-8"):
                pass
        except OSError as error:
            logger.debug("'%s' could not be written: %s", mark, error)

    def holds(self, commit: str, path: str, file: RemoteFile) -> bool:
        """Return whether a commit's file is cached, with the size that the Hub lists."""
        return size_on_disk(self.snapshot(commit, path)) == file.size

    def has_blob(self, file: RemoteFile) -> bool:
        """Return whether a file's contents are cached, from any commit."""
        return size_on_disk(self.blob(file)) == file.size

    def blob(self, file: RemoteFile) -> str:
        """Return the path of a file's contents, whether they exist or not.

        Raises:
            HubError: The Hub gave no hash.
        """
        etag = file.etag
        if etag is None or _ETAG.fullmatch(etag) is None or file.size < 0:
            raise HubError("The Hub listed a file without a valid size and hash, so it was not loaded.")
        return os.path.join(self.folder, "blobs", etag)

    def partial(self, file: RemoteFile) -> str:
        """Return the path of a file's contents until they are complete."""
        return self.blob(file) + _PARTIAL_SUFFIX

    @contextmanager
    def lock(self, file: RemoteFile, cancelled: threading.Event) -> Iterator[bool]:
        """Hold the lock of a file's contents, as huggingface_hub does; yields False if the transfer was cancelled."""
        path = os.path.join(self.root, ".locks", self._name, f"{os.path.basename(self.blob(file))}.lock")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with ExitStack() as held:
            while not cancelled.is_set():
                try:
                    held.enter_context(WeakFileLock(path, timeout=_LOCK_SECONDS))
                except Timeout:
                    continue  # another process is downloading it
                break
            yield not cancelled.is_set()

    def prepare(self) -> None:
        """Create the folder of the blobs, and the tag that marks the cache for backup tools."""
        os.makedirs(os.path.join(self.folder, "blobs"), exist_ok=True)
        tag = os.path.join(self.root, "CACHEDIR.TAG")
        if not os.path.lexists(tag):
            with open(tag, "w", encoding="utf-8") as out:
                out.write(_TAG)

    def link(self, commit: str, path: str, file: RemoteFile, *, is_new: bool = False) -> None:
        """Link a commit's file to its contents; where links are not supported, move or copy the contents.

        Args:
            commit, path, file: The commit's full hash, a path in it, and the file, whose contents are in the cache.
            is_new: Whether they were just downloaded, and this is the last file that uses them.
        """
        target, blob = self.snapshot(commit, path), self.blob(file)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        aside = f"{target}.{uuid.uuid4().hex[:8]}.tmp"
        try:
            if constants.HF_HUB_DISABLE_SYMLINKS:
                raise OSError("links are turned off by HF_HUB_DISABLE_SYMLINKS")
            os.symlink(os.path.relpath(blob, os.path.dirname(target)), aside)
        except OSError as error:
            logger.debug("'%s' does not use links (%s): files are placed in the snapshot itself.", self.root, error)
            if is_new:
                os.replace(blob, target)
                return
            shutil.copyfile(blob, aside)
        os.replace(aside, target)

    def sync(self) -> None:
        """Make the names of new contents durable."""
        sync_directory(os.path.join(self.folder, "blobs"))

    def _missing_mark(self, commit: str, path: str) -> str:
        self.snapshot(commit, path)  # for its check
        return os.path.join(self.folder, ".no_exist", commit, *path.split("/"))


def size_on_disk(path: str) -> int | None:
    """Return the bytes of a file; None if there is none."""
    try:
        return os.stat(path).st_size
    except OSError:
        return None
