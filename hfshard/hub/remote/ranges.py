"""Reads single tensors of a repo by their byte ranges: headers first, then only the bytes that are wanted."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from hfshard._util.progress import bytes_bar
from hfshard.constants import METADATA_KEY, SAFETENSORS_SUFFIX
from hfshard.errors import DamagedCheckpointError, HubError, IntegrityError, InvalidArgumentError, UnsafePathError
from hfshard.hub.remote.cache import is_plain_path
from hfshard.hub.remote.download import for_each_path, hasher_for
from hfshard.hub.remote.transport import HubReader
from hfshard.hub.repo_tree import RepoTree
from hfshard.hub.resolve import CheckpointQuery, resolve
from hfshard.storage.checkpoint.checkpoint import OpenCheckpoint, Verify, open_checkpoint
from hfshard.storage.format.header import LENGTH_BYTES, Header, TensorInfo, parse_header, read_header_length
from hfshard.storage.format.index import CheckpointIndex, FileDigest, parse_single_file_metadata
from hfshard.storage.format.integrity import tensor_digest

logger = logging.getLogger(__name__)

NamesOf = Callable[[CheckpointIndex], Collection[str]]
"""Of the tensors that an index names, those that are wanted."""

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
    """Open a checkpoint of which only the wanted tensors are there: in sparse files that are gone afterwards.

    Each tensor is compared with its own checksum, where the checkpoint has them (hfshard writes them).

    Args:
        repo_id: "org/name".
        tree: The commit and its files.
        query: Which checkpoint; its `files_of` says which shards.
        names_of: Which tensors of an index.
        verify: "full" refuses tensors that have no checksum.
        progress: A bar on stderr: None: on a terminal.

    Yields:
        The checkpoint; its wanted tensors are to be read without a mapping, before the block ends.

    Raises:
        CheckpointNotFoundError, HubError: As a pull.
        InvalidArgumentError: Its weights are pickled: they have no ranges.
        DamagedCheckpointError, IntegrityError: A header or a tensor is not what it has to be.
    """
    remote = HubReader(repo_id, tree, query.token)
    with tempfile.TemporaryDirectory(prefix="hfshard-ranges-") as folder:
        chosen = resolve(_View(remote, folder), query)
        if chosen.kind not in ("single", "index"):
            raise InvalidArgumentError(
                f"'{repo_id}' has pickled weights, of which no ranges can be read. Leave out ranges=True.", path=repo_id
            )
        weights = [path for path in chosen.files if path.endswith(SAFETENSORS_SUFFIX)]
        remote.prefetch_urls(weights)
        index = None
        if chosen.kind == "index":
            with open_checkpoint(  # of the index alone
                chosen.directory, variant=query.variant, verify="none", files_of=lambda index: ()
            ) as empty:
                index = empty.index
        below = len(query.path(""))
        parts = [_Part(remote, path, folder, path[below:]) for path in weights]
        by_path = {part.path: part for part in parts}
        for_each_path(lambda path: by_path[path].read_header(), weights, remote.cancelled)
        for part in parts:
            part.plan(index, names_of, is_strict=verify in ("full", "sha256"))
        total = sum(end - begin for part in parts for begin, end in part.ranges)
        with bytes_bar("Pulling", total, progress) as progress_callback:
            for_each_path(lambda path: by_path[path].read_ranges(progress_callback), weights, remote.cancelled)
        for part in parts:
            part.check()
        with open_checkpoint(
            chosen.directory, variant=query.variant, use_safetensors=True, verify="none", files_of=query.files_of
        ) as checkpoint:
            yield checkpoint


class _View:
    """The files of a commit, of which the small ones are brought into a folder, and the weights are not."""

    def __init__(self, remote: HubReader, folder: str) -> None:
        self.commit, self._remote, self._folder = remote.tree.commit, remote, folder

    def has(self, path: str, *, is_needed: bool = True) -> bool:
        return path in self._remote.tree.files

    def download(self, paths: Collection[str]) -> None:
        for path in paths:
            target = self.snapshot(path)
            if path.endswith(SAFETENSORS_SUFFIX) or os.path.exists(target):
                continue
            file = self._remote.tree.files.get(path)
            if file is None:
                raise HubError(f"'{self._remote.repo_id}' has no file '{path}', which its index names.", path=path)
            hasher, raw = hasher_for(file), self._remote.read_all(path)
            hasher.update(raw)
            if hasher.hexdigest() != file.etag:
                raise IntegrityError(
                    f"'{path}' of '{self._remote.repo_id}' came damaged. Run it again.", path=path, expected=file.etag
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
        repo_id = self._remote.repo_id
        return f"'{repo_id}' (commit {self.commit})", f"To see its files, run: hf models ls {repo_id}"


@dataclass(slots=True)
class _Part:
    """One file of weights, of which some ranges are read."""

    remote: HubReader
    path: str
    folder: str
    name: str
    """In the index."""
    header: Header | None = None
    tensors: Sequence[TensorInfo] = ()
    """Of the wanted tensors, in the order of their bytes."""
    ranges: Sequence[tuple[int, int]] = ()
    record: FileDigest = field(default_factory=FileDigest)

    @property
    def target(self) -> str:
        """The sparse file."""
        return os.path.join(self.folder, *self.path.split("/"))

    def read_header(self) -> None:
        """Ask for the header, and put it at the beginning of a sparse file."""
        size = self.remote.tree.files[self.path].size
        raw = self._read(0, min(size, HEADER_GUESS_BYTES))
        end = LENGTH_BYTES + read_header_length(raw[:LENGTH_BYTES], size, self.path)
        if end > len(raw):
            raw += self._read(len(raw), end)
        self.header = parse_header(raw[LENGTH_BYTES:end], size, self.path)
        own = parse_single_file_metadata(self.header.metadata.get(METADATA_KEY), self.path)
        self.record = own.digests
        os.makedirs(os.path.dirname(self.target), exist_ok=True)
        with open(self.target, "wb") as out:
            out.write(raw[:end])
            out.truncate(size)

    def plan(self, index: CheckpointIndex | None, names_of: NamesOf, *, is_strict: bool) -> None:
        """Find the ranges of the wanted tensors."""
        assert self.header is not None
        if index is None:
            own = parse_single_file_metadata(self.header.metadata.get(METADATA_KEY), self.path)
            index = CheckpointIndex(weight_map=dict.fromkeys(self.header.tensors, self.name), tied_names=own.tied_names)
        else:
            self.record = index.files.get(self.name, FileDigest())
        wanted = set(names_of(index))
        self.tensors = [slot for slot in self.header.tensors.values() if slot.name in wanted]
        self.ranges = _coalesced(self.tensors, self.header.data_start)
        if is_strict and self._digests() is None:
            raise DamagedCheckpointError(
                f"'{self.path}' of '{self.remote.repo_id}' has no checksums of its tensors (hfshard writes them). "
                "Load it with verify='structure', or without ranges=True.",
                path=self.path,
            )

    def read_ranges(self, progress_callback: Callable[[int], object]) -> None:
        """Ask for the wanted bytes, and put them where they belong in the sparse file."""
        with open(self.target, "r+b") as out:
            for begin, end in self.ranges:
                out.seek(begin)
                for block in self.remote.read(self.path, begin, end):
                    out.write(block)
                    progress_callback(len(block))

    def check(self) -> None:
        """Compare the tensors with their checksums."""
        digests = self._digests()
        if digests is None or self.header is None:
            logger.debug("'%s' of '%s' has no checksums of its tensors.", self.path, self.remote.repo_id)
            return
        expected = dict(zip(self.header.tensors, digests, strict=True))
        with open(self.target, "rb") as file:
            for slot in self.tensors:
                file.seek(self.header.data_start + slot.begin)
                found = tensor_digest([file.read(slot.nbytes)])
                if found != expected[slot.name]:
                    raise IntegrityError(
                        f"Tensor '{slot.name}' of '{self.path}' in '{self.remote.repo_id}' came damaged: its checksum "
                        f"is {found}, and {expected[slot.name]} was recorded. Run it again; if it fails again, the "
                        "file on the Hub is damaged.",
                        path=self.path,
                        fqn=slot.name,
                        expected=expected[slot.name],
                        actual=found,
                    )

    def _digests(self) -> list[str] | None:
        return None if self.header is None else self.record.split_tensor_digests(len(self.header.tensors))

    def _read(self, begin: int, end: int) -> bytes:
        return b"".join(self.remote.read(self.path, begin, end))


def _coalesced(slots: Sequence[TensorInfo], data_start: int) -> list[tuple[int, int]]:
    """Byte ranges of a file that cover the tensors; those that nearly touch are one."""
    ranges: list[tuple[int, int]] = []
    for slot in slots:
        begin, end = data_start + slot.begin, data_start + slot.end
        if begin == end:
            continue
        if ranges and begin - ranges[-1][1] < GAP_BYTES:
            ranges[-1] = (ranges[-1][0], end)
        else:
            ranges.append((begin, end))
    return ranges
