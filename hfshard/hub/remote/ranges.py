"""Reads single tensors of a repo by their byte ranges: headers first, then only the bytes that are needed."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from hfshard._util.progress import bytes_bar
from hfshard.constants import SAFETENSORS_SUFFIX
from hfshard.errors import DamagedCheckpointError, HubError, IntegrityError, InvalidArgumentError, UnsafePathError
from hfshard.hub.remote.cache import is_plain_path
from hfshard.hub.remote.download import for_each_path, hasher_for
from hfshard.hub.remote.transport import HubReader
from hfshard.hub.repo_tree import RepoTree
from hfshard.hub.resolve import CheckpointQuery, resolve_checkpoint
from hfshard.storage.checkpoint.checkpoint import OpenCheckpoint, Verify, open_checkpoint
from hfshard.storage.format.header import LENGTH_BYTES, Header, TensorInfo, parse_header, read_header_length
from hfshard.storage.format.index import CheckpointIndex, FileDigest, metadata_of_file
from hfshard.storage.format.integrity import tensor_digest

logger = logging.getLogger(__name__)

NamesOf = Callable[[CheckpointIndex], Collection[str]]
"""Chooses among the tensors that an index names."""

HEADER_GUESS_BYTES: Final = 16 * 1024
"""Bytes of a file that are asked for first: the header of some 120 tensors; a longer one takes a second request."""

GAP_BYTES: Final = 64 * 1024
"""Two ranges with fewer bytes between them are asked for as one: a request costs more than these bytes."""


@contextmanager
def open_by_ranges(
    repo_id: str,
    tree: RepoTree,
    query: CheckpointQuery,
    names_of: NamesOf,
    *,
    verify: Verify = "structure",
    progress: bool | None = None,
) -> Iterator[OpenCheckpoint]:
    """Open a checkpoint with only the chosen tensors, in sparse files that are removed afterwards.

    Each tensor is compared with its own checksum, where the checkpoint has them (hfshard writes them).

    Args:
        repo_id: "org/name".
        tree: The commit and its files.
        query: Which checkpoint; its `files_of` says which shards.
        names_of: Chooses the tensors.
        verify: "full" refuses tensors that have no checksum.
        progress: Whether to show a bar on stderr. None: on a terminal.

    Yields:
        The checkpoint; the chosen tensors must be read without mmap, before the block ends.

    Raises:
        CheckpointNotFoundError, HubError: The checkpoint can't be pulled.
        InvalidArgumentError: The weights are pickled, and can't be read by ranges.
        DamagedCheckpointError, IntegrityError: A header is not valid, or a tensor is damaged.
    """
    reader = HubReader(repo_id, tree, query.token)
    with tempfile.TemporaryDirectory(prefix="hfshard-ranges-") as folder:
        resolved = resolve_checkpoint(_SmallFiles(reader, folder), query)
        if resolved.kind not in ("single", "index"):
            raise InvalidArgumentError(
                f"'{repo_id}' has pickled weights, which can't be read by ranges. Leave out ranges=True.", path=repo_id
            )
        weights = [path for path in resolved.files if path.endswith(SAFETENSORS_SUFFIX)]
        reader.prefetch_urls(weights)
        index = None
        if resolved.kind == "index":
            with open_checkpoint(  # only for its index
                resolved.directory, variant=query.variant, verify="none", files_of=lambda index: ()
            ) as empty:
                index = empty.index
        below = len(query.path(""))
        files = [_RangedFile(reader, path, folder, path[below:]) for path in weights]
        _read_files(files, index, names_of, is_strict=verify in ("full", "sha256"), progress=progress)
        with open_checkpoint(
            resolved.directory, variant=query.variant, use_safetensors=True, verify="none", files_of=query.files_of
        ) as checkpoint:
            yield checkpoint


def _read_files(
    files: Sequence[_RangedFile],
    index: CheckpointIndex | None,
    names_of: NamesOf,
    *,
    is_strict: bool,
    progress: bool | None,
) -> None:
    """Read the chosen tensors of all files, and compare them with their checksums."""
    by_path = {file.path: file for file in files}
    cancelled = files[0].reader.cancelled
    for_each_path(lambda path: by_path[path].read_header(), by_path, cancelled)
    for file in files:
        file.plan(index, names_of, is_strict=is_strict)
    total = sum(end - begin for file in files for begin, end in file.ranges)
    with bytes_bar("Pulling", total, progress) as progress_callback:
        for_each_path(lambda path: by_path[path].read_ranges(progress_callback), by_path, cancelled)
    for file in files:
        file.check()


class _SmallFiles:
    """The files of a commit; small ones are downloaded into a folder, weights are not."""

    def __init__(self, reader: HubReader, folder: str) -> None:
        self.commit = reader.tree.commit
        self._reader = reader
        self._folder = folder

    def has(self, path: str, *, is_needed: bool = True) -> bool:
        return path in self._reader.tree.files

    def download(self, paths: Collection[str]) -> None:
        for path in paths:
            target = self.snapshot(path)
            if path.endswith(SAFETENSORS_SUFFIX) or os.path.exists(target):
                continue
            file = self._reader.tree.files.get(path)
            if file is None:
                raise HubError(f"'{self._reader.repo_id}' has no file '{path}', which its index names.", path=path)
            hasher, raw = hasher_for(file), self._reader.read_all(path)
            hasher.update(raw)
            if hasher.hexdigest() != file.etag:
                raise IntegrityError(
                    f"'{path}' of '{self._reader.repo_id}' arrived damaged. Run it again.",
                    path=path,
                    expected=file.etag,
                )
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with open(target, "wb") as out:
                out.write(raw)

    def snapshot(self, path: str = "") -> str:
        if path and not is_plain_path(path):
            raise UnsafePathError(f"The Hub names the file {path[:200]!r}. Do not load this repo.", path=path)
        return os.path.join(self._folder, *path.split("/")) if path else self._folder

    def code(self) -> list[str]:
        return []

    def description(self) -> tuple[str, str]:
        repo_id = self._reader.repo_id
        return f"'{repo_id}' (commit {self.commit})", f"To see its files, run: hf models ls {repo_id}"


@dataclass(slots=True)
class _RangedFile:
    """A file of weights that is read by ranges."""

    reader: HubReader
    path: str
    folder: str
    name: str
    """The file's name in the index."""
    header: Header | None = None
    tensors: Sequence[TensorInfo] = ()
    """The chosen tensors, in the order of their bytes."""
    ranges: Sequence[tuple[int, int]] = ()
    digest: FileDigest = field(default_factory=FileDigest)

    @property
    def target(self) -> str:
        """The sparse file."""
        return os.path.join(self.folder, *self.path.split("/"))

    def read_header(self) -> None:
        """Read the header, and write it to the beginning of a sparse file."""
        size = self.reader.tree.files[self.path].size
        raw = self._read(0, min(size, HEADER_GUESS_BYTES))
        end = LENGTH_BYTES + read_header_length(raw[:LENGTH_BYTES], size, self.path)
        if end > len(raw):
            raw += self._read(len(raw), end)
        self.header = parse_header(raw[LENGTH_BYTES:end], size, self.path)
        self.digest = metadata_of_file(self.header.metadata, self.header.tensors, self.path).digests
        os.makedirs(os.path.dirname(self.target), exist_ok=True)
        with open(self.target, "wb") as out:
            out.write(raw[:end])
            out.truncate(size)

    def plan(self, index: CheckpointIndex | None, names_of: NamesOf, *, is_strict: bool) -> None:
        """Choose the tensors, and find their byte ranges."""
        assert self.header is not None
        if index is None:
            tied_names = metadata_of_file(self.header.metadata, self.header.tensors, self.path).tied_names
            index = CheckpointIndex(weight_map=dict.fromkeys(self.header.tensors, self.name), tied_names=tied_names)
        else:
            self.digest = index.files.get(self.name, FileDigest())
        chosen = set(names_of(index))
        self.tensors = [tensor for tensor in self.header.tensors.values() if tensor.name in chosen]
        self.ranges = _coalesced(self.tensors, self.header.data_start)
        if is_strict and self._digests() is None:
            raise DamagedCheckpointError(
                f"'{self.path}' of '{self.reader.repo_id}' has no checksums of its tensors (hfshard writes them). "
                "Load it with verify='structure', or without ranges=True.",
                path=self.path,
            )

    def read_ranges(self, progress_callback: Callable[[int], object]) -> None:
        """Read the ranges, and write them to their places in the sparse file."""
        with open(self.target, "r+b") as out:
            for begin, end in self.ranges:
                out.seek(begin)
                for block in self.reader.read(self.path, begin, end):
                    out.write(block)
                    progress_callback(len(block))

    def check(self) -> None:
        """Compare the tensors with their checksums."""
        digests = self._digests()
        if digests is None or self.header is None:
            logger.debug("'%s' of '%s' has no checksums of its tensors.", self.path, self.reader.repo_id)
            return
        expected = dict(zip(self.header.tensors, digests, strict=True))
        with open(self.target, "rb") as file:
            for tensor in self.tensors:
                file.seek(self.header.data_start + tensor.begin)
                found = tensor_digest([file.read(tensor.nbytes)])
                if found != expected[tensor.name]:
                    raise IntegrityError(
                        f"Tensor '{tensor.name}' of '{self.path}' in '{self.reader.repo_id}' arrived damaged: its "
                        f"checksum must be {expected[tensor.name]}, got {found}. Run it again; if it fails again, the "
                        "file on the Hub is damaged.",
                        path=self.path,
                        fqn=tensor.name,
                        expected=expected[tensor.name],
                        actual=found,
                    )

    def _digests(self) -> list[str] | None:
        return None if self.header is None else self.digest.split_tensor_digests(len(self.header.tensors))

    def _read(self, begin: int, end: int) -> bytes:
        return b"".join(self.reader.read(self.path, begin, end))


def _coalesced(tensors: Sequence[TensorInfo], data_start: int) -> list[tuple[int, int]]:
    """The byte ranges of a file that cover the tensors; ranges that nearly touch are joined."""
    ranges: list[tuple[int, int]] = []
    for tensor in tensors:
        begin, end = data_start + tensor.begin, data_start + tensor.end
        if begin == end:
            continue
        if ranges and begin - ranges[-1][1] < GAP_BYTES:
            ranges[-1] = (ranges[-1][0], end)
        else:
            ranges.append((begin, end))
    return ranges
