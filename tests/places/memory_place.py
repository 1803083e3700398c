"""A place in memory: all that a new kind of place takes. It is no `Store`, and derives from no other place."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

from hfshard._util.arguments import reject_hub_arguments
from hfshard.checkpoint.folder import Folder
from hfshard.checkpoint.locate import CheckpointQuery, is_weights_name
from hfshard.checkpoint.open_checkpoint import OpenCheckpoint, WhenOpen, open_checkpoint
from hfshard.checkpoint.ranged_folder import RangedFolder
from hfshard.checkpoint.reports import VerifyReport
from hfshard.checkpoint.verifier import verify_directory
from hfshard.commit.removal import (
    NOT_ITS_OWN,
    SMALL_FILES,
    FoundFile,
    Removal,
    RemovalPlan,
    in_phases,
    phase_of_weights,
)
from hfshard.commit.transaction import JobsOf, NewCheckpoint, ShardWriter
from hfshard.constants import CONFIG_NAME, README
from hfshard.disk.byte_source import ByteSource, BytesSource
from hfshard.errors import CheckpointChangedError, CheckpointNotFoundError
from hfshard.format.file_names import WeightNames
from hfshard.format.index import CheckpointIndex, FileDigest
from hfshard.places.place import Kind, ResolvedSource, SavePlace
from hfshard.places.store_mirror import SmallFilesMirror
from hfshard.remove import RemovalRequest
from hfshard.shards.shard_plan import ShardPlan
from hfshard.shards.write_shards import WriteJob, stream_shard

FILES: dict[str, bytes] = {}
"""Address of a file -> its bytes, of all places in the memory of this process."""

SCHEME = "mem://"


class Entry(NamedTuple):
    """A file as it was listed."""

    name: str
    size: int
    etag: str


class Reader:
    """Reads ranges of the files below an address."""

    def __init__(self, address: str) -> None:
        self._start = f"{address}/"

    def list_objects(self, folder: str = "") -> dict[str, Entry]:
        start = f"{self._start}{folder}/" if folder else self._start
        paths = [path for path in sorted(FILES) if path.startswith(start) and "/" not in path[len(start) :]]
        return {entry.name: entry for entry in map(self._entry, paths)}

    def folders(self, folder: str = "") -> list[str]:
        start = f"{self._start}{folder}/" if folder else self._start
        below = [path[len(start) :] for path in FILES if path.startswith(start)]
        return sorted({path.partition("/")[0] for path in below if "/" in path})

    def everything(self) -> dict[str, ByteSource]:
        return {
            path[len(self._start) :]: BytesSource(raw) for path, raw in FILES.items() if path.startswith(self._start)
        }

    def read_into(self, found: Entry, begin: int, target: memoryview) -> None:
        path = self._start + found.name
        if path not in FILES or self._entry(path) != found:
            raise CheckpointChangedError(f"'{path}' was replaced.", path=path)
        target[:] = FILES[path][begin : begin + len(target)]

    def _entry(self, path: str) -> Entry:
        raw = FILES[path]
        return Entry(path[len(self._start) :], len(raw), hashlib.sha256(raw).hexdigest())


class MemoryFiles:
    """The files below a place, to be pushed or copied."""

    def __init__(self, place: str) -> None:
        self.place = place

    def contents(self) -> dict[str, ByteSource]:
        return Reader(self.place).everything()

    def open_variant(
        self, variant: str | None, when_open: WhenOpen | None = None
    ) -> AbstractContextManager[OpenCheckpoint]:
        return open_checkpoint(RangedFolder(Reader(self.place), self.place), variant=variant, when_open=when_open)

    def check(self, paths: Collection[str]) -> None:
        """Every name is fine."""


class MemoryTransaction:
    """A change that appears at once, when all files are put into the dictionary."""

    def __init__(self, address: str, new: NewCheckpoint) -> None:
        self._address = address
        self._new = new
        self._staged: dict[str, bytes] = {}

    def prepare(self, plan: ShardPlan, names: WeightNames, jobs_of: JobsOf) -> ShardPlan:
        return plan

    def write(self, jobs: Mapping[str, WriteJob]) -> dict[str, FileDigest]:
        digests = {}
        for name, job in jobs.items():
            raw = bytearray()
            digests[name] = stream_shard(job, self._new.checksum, lambda _, raw=raw: raw.extend)  # type: ignore[misc]
            self._staged[name] = bytes(raw)
        return digests

    def commit(
        self,
        indexes: Mapping[str, CheckpointIndex],
        index_files: Mapping[str, bytes],
        confirm: Callable[[], None],
    ) -> bool:
        new, start = self._new, f"{self._address}/"
        files = {**self._staged, **index_files, **new.small_files}
        for name, source in new.companion_files.items():
            if name != README or new.replaces_readme or start + name not in FILES:
                with source.open() as reader:
                    files[name] = reader.read()
        confirm()
        listed = Reader(self._address).list_objects()
        gone = [name for name in listed if is_weights(name, new.names) or (new.drops_config and name == CONFIG_NAME)]
        before = dict(FILES)
        for name in gone:
            del FILES[start + name]
        FILES.update({start + name: raw for name, raw in files.items()})
        return before != FILES


class MemoryPlace(SavePlace):
    """A place in the memory of this process."""

    is_read_from_disk = False
    is_for_hfshard_only = True
    has_revisions = False

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")

    @property
    def key(self) -> str:
        return self.address

    def folder(self, subfolder: str = "") -> RangedFolder:
        address = f"{self.address}/{subfolder}".rstrip("/")
        return RangedFolder(Reader(address), address)

    def find(self, query: CheckpointQuery, *, takes_files: bool = False) -> ResolvedSource:
        above, _, name = self.address.rpartition("/")
        is_file = takes_files and is_weights_name(name) and self.address in FILES
        folder = MemoryPlace(above).folder() if is_file else self.folder(query.subfolder)
        mirror = SmallFilesMirror(folder, query.subfolder, has_code=query.needs_code)
        weights_name = name if is_file else None
        return ResolvedSource(mirror.directory, mirror.path, folder, weights_name=weights_name, mirror=mirror)

    def fetch(self, query: CheckpointQuery, progress: bool | None, *, takes_files: bool = False) -> ResolvedSource:
        found = self.find(query, takes_files=takes_files)
        if found.mirror is not None:
            found.mirror.fill()
        return found

    def verify(self, query: CheckpointQuery, level: str, progress: bool | None) -> VerifyReport:
        found = self.find(query, takes_files=True)
        return verify_directory(found.folder, WeightNames(query.variant), level, progress, found.weights_name)

    def files(self, subfolder: str = "", *, follow_links: bool = False) -> MemoryFiles:
        return MemoryFiles(f"{self.address}/{subfolder}".rstrip("/"))

    @contextmanager
    def transaction(self, new: NewCheckpoint, writer: ShardWriter) -> Iterator[MemoryTransaction]:
        yield MemoryTransaction(self.address, new)

    def reject_hub_arguments(self, *, revision: str | None = None, token: str | bool | None = None) -> None:
        reject_hub_arguments(self.address, revision=revision, token=token)

    def is_same(self, folder: Folder) -> bool:
        return folder.path == self.address


CLASS: type[SavePlace] = MemoryPlace
"""The key of a place in memory in tables by class."""


def is_weights(name: str, names: WeightNames) -> bool:
    return name in (names.single, names.index) or names.is_shard(name)


def plan_removal(request: RemovalRequest) -> Removal:
    """Plan the removal of a checkpoint; no save leaves anything behind."""
    address, names = request.place, request.names
    listed = {} if request.leftovers else Reader(address).list_objects()
    weights = [name for name in listed if is_weights(name, names)]
    if not weights and not request.leftovers:
        raise CheckpointNotFoundError(f"There is no checkpoint in '{address}'.", path=address)
    small = [name for name in SMALL_FILES if name in listed]
    phases = in_phases([*weights, *small], lambda name: phase_of_weights(name, names))
    found = {name: FoundFile(listed[name].size, listed[name].etag) for phase in phases for name in phase}
    plan = RemovalPlan(address, phases, found, dict.fromkeys(listed.keys() - found.keys(), NOT_ITS_OWN))

    def carry_out() -> None:
        for name in found:
            del FILES[f"{address}/{name}"]

    return Removal(plan.report(), carry_out)


def named(text: str | os.PathLike[str], _argument: str) -> MemoryPlace | None:
    return MemoryPlace(text) if isinstance(text, str) and text.startswith(SCHEME) else None


MEMORY = Kind(to_save=named, to_load=named, to_check=named, to_push=named)
"""The row of the table."""
