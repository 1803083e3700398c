"""Single tensors of a repo, read by byte ranges: headers first, then only the bytes that are needed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from hfshard.checkpoint.locate import CheckpointQuery
from hfshard.checkpoint.open_checkpoint import OpenCheckpoint, open_checkpoint
from hfshard.checkpoint.ranged_folder import RangedFolder
from hfshard.errors import IntegrityError, InvalidArgumentError
from hfshard.format.index import Verify
from hfshard.hub.http import HubReader
from hfshard.hub.repo import RepoTree
from hfshard.pickles.pickle_file import PickleFile
from hfshard.shards.shard import SafetensorsShard


@contextmanager
def open_by_ranges(
    repo_id: str,
    tree: RepoTree,
    query: CheckpointQuery,
    *,
    verify: Verify = "structure",
    progress: bool | None = None,
) -> Iterator[OpenCheckpoint]:
    """Open a checkpoint whose tensors are read straight into memory; nothing is written to disk.

    Each tensor is compared with its own checksum, where the checkpoint has them (hfshard writes them); "full" rejects
    files that have none. The query's `files_of` selects the shards.

    Raises:
        CheckpointNotFoundError, HubError: There is none, or the Hub refuses.
        InvalidArgumentError: The weights are pickled, and can't be read by ranges.
        DamagedCheckpointError, IntegrityError: An index or a header is not valid.
    """
    reader = HubReader(repo_id, tree, query.token)
    with open_checkpoint(
        _RepoFolder(reader, query.path("")),
        variant=query.variant,
        use_safetensors=query.use_safetensors,
        verify=verify,
        files_of=query.files_of,
        opens_adapter=query.opens_adapter,
    ) as checkpoint:
        checkpoint.progress = progress
        yield checkpoint


class _File(NamedTuple):
    """A file of the commit, as a `RangedFile`."""

    name: str
    size: int
    etag: str
    path: str
    """In the repo."""


class _CommitRanges:
    """The files of one folder of a commit, read by ranges."""

    def __init__(self, reader: HubReader, below: str) -> None:
        self.reader = reader
        self._files = {
            path.removeprefix(below): _File(path.removeprefix(below), file.size, file.etag or "", path)
            for path, file in reader.tree.files.items()
            if path.startswith(below)
        }

    def list_objects(self, folder: str = "") -> Mapping[str, _File]:
        start = f"{folder}/" if folder else ""
        return {name: file for name, file in self._below(start) if "/" not in name[len(start) :]}

    def folders(self, folder: str = "") -> list[str]:
        start = f"{folder}/" if folder else ""
        below = (name[len(start) :] for name, _ in self._below(start))
        return sorted({name.partition("/")[0] for name in below if "/" in name})

    def _below(self, start: str) -> Iterator[tuple[str, _File]]:
        return ((name, file) for name, file in self._files.items() if name.startswith(start))

    def find(self, name: str) -> _File | None:
        return self._files.get(name)

    def read_into(self, found: _File, begin: int, target: memoryview) -> None:
        at = 0
        try:
            for block in self.reader.read(found.path, begin, begin + len(target)):
                target[at : at + len(block)] = block
                at += len(block)
        except BaseException:
            self.reader.cancelled.set()  # the others need not wait for a server that fails
            raise
        if len(target) == found.size:
            self._check(found, target)

    def _check(self, found: _File, whole: memoryview) -> None:
        hasher = self.reader.tree.files[found.path].hasher()
        hasher.update(whole)
        if hasher.hexdigest() != found.etag:
            raise IntegrityError(
                f"'{found.path}' of '{self.reader.repo_id}' arrived damaged. Try again.",
                path=found.path,
                expected=found.etag,
            )


class _RepoFolder(RangedFolder):
    """A folder of a commit."""

    def __init__(self, reader: HubReader, below: str) -> None:
        self._ranges = _CommitRanges(reader, below)
        super().__init__(self._ranges, f"{reader.repo_id}/{below}".rstrip("/"))

    @property
    def is_pinned(self) -> bool:
        """True: a commit never changes."""
        return True

    def open_shards(self, names: Collection[str]) -> dict[str, SafetensorsShard]:
        found = [self._ranges.find(name) for name in names]
        self._ranges.reader.prefetch_urls([file.path for file in found if file is not None])
        return super().open_shards(names)

    def open_pickle(self, name: str, key: str | None) -> PickleFile:
        repo_id = self._ranges.reader.repo_id
        raise InvalidArgumentError(
            f"'{repo_id}' has pickled weights, which cannot be read by ranges. Leave out ranges=True.", path=repo_id
        )
