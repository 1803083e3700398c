"""What the leader of a save has all ranks do: files to write or to link, or their fingerprints to compute."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Literal, Self

from hfshard.commit.transaction import KnownFile
from hfshard.constants import FINGERPRINT_BYTES
from hfshard.format.digests import fingerprint_positions
from hfshard.format.index import FileDigest
from hfshard.shards.write_shards import WriteJob
from hfshard.tensors.stored_tensor import TensorLayout

Kind = Literal["write", "link", "fingerprint"]


@dataclass(frozen=True, slots=True)
class OrderedFile:
    """One file of an order: a `WriteJob` without its tensors' bytes."""

    path: str
    names: tuple[str, ...]
    """In the order of their bytes."""
    metadata: dict[str, str]
    hfshard_metadata: dict[str, Any] | None
    like: tuple[int, int] | None
    """Mode and group of the file that it will replace."""
    known: KnownFile | None = None
    """To be linked, if it has the very bytes; for an order to link."""

    @property
    def replaced(self) -> os.stat_result | None:
        """The status of the file that it will replace, as far as a new file gets it."""
        if self.like is None:
            return None
        mode, group = self.like
        return os.stat_result((stat.S_IFREG | mode, 0, 0, 1, 0, group, 0, 0, 0, 0))


@dataclass(frozen=True, slots=True)
class Order:
    """Files for all ranks, each of which owns some."""

    kind: Kind
    checksum: str | None
    files: tuple[OrderedFile, ...]

    @classmethod
    def of(cls, kind: Kind, jobs: Sequence[WriteJob], checksum: str | None, known: Sequence[KnownFile] = ()) -> Self:
        """Order what `write_shards` would do with these jobs, or for each of them what `link_if_same` would."""
        files = zip(jobs, known or repeat(None))
        return cls(kind, checksum, tuple(_ordered(job, file) for job, file in files))

    def wanted_bytes(self, file: OrderedFile, layouts: Mapping[str, TensorLayout]) -> list[tuple[str, int]]:
        """(name, how many of its first bytes are needed), in the order of the file."""
        if self.kind == "fingerprint":
            sampled = [file.names[position] for position in fingerprint_positions(len(file.names))]
            return [(name, min(FINGERPRINT_BYTES, layouts[name].nbytes)) for name in sampled]
        return [(name, layouts[name].nbytes) for name in file.names]

    def to_json(self, names: Sequence[str]) -> bytes:
        """Encode it; names are told by their numbers, which all ranks know."""
        numbers = {name: number for number, name in enumerate(names)}
        files = [
            [
                file.path,
                _ranges(numbers[name] for name in file.names),
                file.metadata,
                file.hfshard_metadata,
                file.like,
                None if file.known is None else [file.known.path, file.known.digest.as_json()],
            ]
            for file in self.files
        ]
        return json.dumps([self.kind, self.checksum, files]).encode()

    @classmethod
    def from_json(cls, raw: bytes, names: Sequence[str]) -> Self:
        """Decode it, with the same names."""
        kind, checksum, values = json.loads(raw)
        files = []
        for path, ranges, metadata, hfshard_metadata, like, known in values:
            chosen = tuple(names[number] for start, stop in ranges for number in range(start, stop))
            mode_and_group = None if like is None else tuple(like)
            file = None if known is None else KnownFile(known[0], FileDigest(**known[1]))
            files.append(OrderedFile(path, chosen, metadata, hfshard_metadata, mode_and_group, file))
        return cls(kind, checksum, tuple(files))


def _ordered(job: WriteJob, known: KnownFile | None) -> OrderedFile:
    own = job.hfshard_metadata
    like = None if job.like is None else (stat.S_IMODE(job.like.st_mode), job.like.st_gid)
    own_metadata = None if own is None else dict(own)
    return OrderedFile(job.path, tuple(job.tensors), dict(job.metadata), own_metadata, like, known)


def _ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Numbers as ranges of consecutive ones, in their order."""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number:
            ranges[-1] = ranges[-1][0], number + 1
        else:
            ranges.append((number, number + 1))
    return ranges
