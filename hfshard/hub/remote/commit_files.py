"""The files of one commit as a pull sees them: those that the Hub lists, or those that the cache holds."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from hfshard._util.progress import bytes_bar
from hfshard._util.text import list_some
from hfshard.constants import COPY_BYTES, WEIGHTS_SUFFIXES
from hfshard.errors import CheckpointNotFoundError
from hfshard.format.parts_of_ranks import describe_parts
from hfshard.hub.remote.cache import RepoCache
from hfshard.hub.remote.download import bytes_to_download, download
from hfshard.hub.remote.transport import HubReader

_SHOWN: Final = 5
"""Names that an error lists."""


class RemoteFiles:
    """The files of a commit as the Hub lists them."""

    def __init__(self, reader: HubReader, cache: RepoCache, *, force: bool, progress: bool | None) -> None:
        """Keep the reader and the cache; with `force` each file is downloaded once, even if the cache holds it."""
        self.commit = reader.tree.commit
        self._files = reader.tree.files
        self._reader = reader
        self._cache = cache
        self._force = force
        self._progress = progress
        self._forced: set[str] = set()

    def has(self, path: str, *, is_needed: bool = True) -> bool:
        """Whether the commit has a file."""
        return path in self._files

    def download(self, paths: Collection[str]) -> None:
        """Download files into the cache.

        Raises:
            CheckpointNotFoundError: The commit has no such file.
        """
        if lacking := [path for path in paths if path not in self._files]:
            shown = list_some(lacking, _SHOWN, quote=True)
            raise CheckpointNotFoundError(
                f"'{self._reader.repo_id}' lacks {shown}, which its index names (commit {self.commit}). "
                "Tell its owner, or load another revision.",
                path=lacking[0],
            )
        force = self._force
        todo = [path for path in paths if path not in self._forced]
        if force:
            self._forced |= set(todo)
        total = bytes_to_download(self._reader, self._cache, todo, force=force)
        progress = self._progress if total > COPY_BYTES else False  # less is downloaded in no time
        with bytes_bar("Pulling", total, progress) as progress_callback:
            download(self._reader, self._cache, todo, force=force, progress_callback=progress_callback)

    def snapshot(self, path: str = "") -> str:
        """The local path of a file."""
        return self._cache.snapshot(self.commit, path)

    def code(self) -> list[str]:
        """The known Python files of the commit."""
        return [path for path in self._files if path.endswith(".py")]

    def description(self) -> tuple[str, str]:
        """For an error message: what was looked at, and what to do."""
        weights = sorted(path for path in self._files if path.endswith(WEIGHTS_SUFFIXES))
        held = f"It holds {list_some(weights, _SHOWN, quote=True)}." if weights else "It holds no weights at all."
        repo_id = self._reader.repo_id
        return f"'{repo_id}' (commit {self.commit})", f"{held} To see its files, run: hf models ls {repo_id}"

    def parts(self, folder: str) -> str | None:
        """Describe what a folder holds in parts of ranks; see `describe_parts`."""
        paths = [path.removeprefix(folder) for path in self._files if path.startswith(folder)]
        return describe_parts(paths, f"{self._reader.repo_id}/{folder}".rstrip("/"), is_local=False)


class NotCachedError(Exception):
    """The cache does not hold what is needed, or does not know of it."""


class CachedFiles:
    """The files of a commit as far as the cache holds them."""

    def __init__(self, cache: RepoCache, commit: str, repo_id: str, *, is_sure: bool, todo: str = "") -> None:
        self.commit = commit
        self._cache = cache
        self._repo_id = repo_id
        self._is_sure = is_sure
        self._todo = todo

    def has(self, path: str, *, is_needed: bool = True) -> bool:
        """Whether the commit has a file, as far as the cache knows.

        Raises:
            NotCachedError: It does not know, and it `is_needed`.
        """
        found = self._cache.has(self.commit, path)
        if found is None and is_needed and self._is_sure:
            raise NotCachedError(f"the cache does not know whether '{self._repo_id}' has '{path}'")
        return bool(found)

    def download(self, paths: Collection[str]) -> None:
        """Check that the cache holds files.

        Raises:
            NotCachedError: One is missing.
        """
        if missing := [path for path in paths if not self._cache.has(self.commit, path)]:
            raise NotCachedError(
                f"'{self._repo_id}' (commit {self.commit}) is not complete in the cache '{self._cache.root}': "
                f"it lacks {list_some(missing, _SHOWN, quote=True)}"
            )

    def snapshot(self, path: str = "") -> str:
        """The local path of a file."""
        return self._cache.snapshot(self.commit, path)

    def code(self) -> list[str]:
        """The known Python files of the commit."""
        return []  # the cache does not know all files; transformers asks for what is missing

    def description(self) -> tuple[str, str]:
        """For an error message: what was looked at, and what to do."""
        return f"What the cache '{self._cache.root}' holds of '{self._repo_id}' (commit {self.commit})", self._todo

    def parts(self, folder: str) -> str | None:
        """None: the cache does not know all files."""
        return None
