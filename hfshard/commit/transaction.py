"""The change that a save makes in a place, the writers of its files, and the reuse of files of an older checkpoint."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event
from typing import Protocol

from hfshard._util.progress import ProgressCallback
from hfshard._util.threads import cancellable, run_in_threads
from hfshard.constants import CONFIG_NAME, FILES_AT_ONCE
from hfshard.disk.byte_source import ByteSource
from hfshard.disk.direct_io import check_setting
from hfshard.errors import HfshardError
from hfshard.format.file_names import WeightNames
from hfshard.format.index import CheckpointIndex, Checksum, FileDigest
from hfshard.shards.shard_file import SafetensorsFile
from hfshard.shards.shard_plan import ShardPlan
from hfshard.shards.write_shards import (
    WriteJob,
    digest_shard,
    fingerprint_of_job,
    stream_shard,
    synchronize_devices,
    write_shards,
    writer_threads,
)
from hfshard.stores.store import ObjectWriter, Store


@dataclass(frozen=True, slots=True, kw_only=True)
class NewCheckpoint:
    """Everything that a save writes except for the tensors; known before the first byte is written."""

    names: WeightNames
    """Names of its files; in a run, those of its first part."""
    checksum: Checksum | None
    """Kind of checksum recorded for every file of weights."""
    small_files: Mapping[str, bytes]
    """config.json and the other small files of the checkpoint."""
    companion_files: Mapping[str, ByteSource] = field(default_factory=dict)
    """Files of another place that are copied along, and are not part of the checkpoint."""
    drops_config: bool = False
    """Remove an existing config.json, because this checkpoint has none."""
    hides_single: bool = False
    """Hide the old single file during the commit; see `StagedCheckpoint`."""
    is_copy: bool = False
    """True if it keeps the files of another checkpoint."""
    replaces_readme: bool = False
    """Let a README.md among `companion_files` replace an existing one in a directory."""
    drops_signature: bool = False
    """Remove a `model.sig` that the save makes stale."""
    progress: bool | None = None
    """A bar on stderr; None: on a terminal."""

    @property
    def config(self) -> bytes | None:
        """The contents of config.json; None if it has none, and an existing one stays."""
        return self.small_files.get(CONFIG_NAME)

    @property
    def model_files(self) -> dict[str, bytes]:
        """The small files without config.json."""
        return {name: raw for name, raw in self.small_files.items() if name != CONFIG_NAME}


JobsOf = Callable[[ShardPlan], Mapping[str, "WriteJob"]]
"""Builds the jobs of a plan: file -> contents. A transaction sets the paths."""


class NamesTakenError(Exception):
    """The place can't have files under the names of a plan; raised when nothing is staged any more."""


class Transaction(Protocol):
    """One change of a place, all or nothing: the sink of the one save (`saving/pipeline.py`).

    It is opened with a `NewCheckpoint` and a `ShardWriter`, as the value of a `with` statement: leaving the block
    without `commit` leaves what was there. The calls are made in this order, `prepare` once for each plan. (A directory
    has two methods more, for torch.distributed.checkpoint, which fills its files between `prepare` and `write`.)
    """

    def prepare(self, plan: ShardPlan, names: WeightNames, jobs_of: JobsOf) -> ShardPlan:
        """Give the files of a plan names that are free here; check what can be checked before the first byte.

        Args:
            plan: A plan with the usual names.
            names: Makes these names; each part of a run has its own.
            jobs_of: Builds the jobs of a plan, to compare them with files that are there.

        Raises:
            NotEnoughSpaceError: There is too little space.
        """

    def write(self, jobs: Mapping[str, WriteJob]) -> dict[str, FileDigest]:
        """Reuse the files that are there already, and write the rest.

        Returns:
            File -> digest, in the order of the jobs.

        Raises:
            NamesTakenError: Plan with one file more, prepare, and write again.
        """

    def commit(
        self,
        indexes: Mapping[str, CheckpointIndex],
        index_files: Mapping[str, bytes],
        confirm: Callable[[], None],
    ) -> bool:
        """Make the change visible at once.

        Args:
            indexes: Base -> index.
            index_files: The indexes to write, by file; a checkpoint of one file may have none.
            confirm: Called when everything is written and nothing is visible yet: the last moment to raise.

        Returns:
            False if the place had exactly this already: nothing was changed.
        """


class ShardWriter(Protocol):
    """Writer of a save's files, which writes them into the staging directory, or sends them to a store."""

    verb: str
    """The label of the progress bar while it writes."""

    def fingerprints(self, jobs: Sequence[WriteJob], checksum: str | None) -> Iterable[str]:
        """Compute the fingerprints of the files that `write` would write for these jobs, in order; write nothing."""

    def link(self, jobs: Sequence[WriteJob], known: Mapping[str, KnownFile], checksum: str) -> list[FileDigest | None]:
        """Hard-link the files that are on disk already, byte for byte; those in a store are kept.

        Args:
            jobs: The files to write.
            known: Fingerprint -> a file that may have the same bytes.
            checksum: A key of `HASHERS`.

        Returns:
            For each job the digest of the file that was linked; None: it must be written.
        """

    def write(
        self,
        jobs: Sequence[WriteJob],
        checksum: str | None,
        progress_callback: ProgressCallback | None,
        store: Store | None = None,
    ) -> list[FileDigest]:
        """Write the files, and return the digest of each: as `write_shards` does, or `upload_files` into a store."""

    def confirm(self) -> None:
        """Raise if the save must not be committed, as when another rank failed; called right before the commit."""


class OwnShardWriter:
    """Writer for a process that has all tensors.

    Args:
        confirm: Called right before the commit.
    """

    verb = "Saving"

    def __init__(self, confirm: Callable[[], None] = lambda: None) -> None:
        check_setting()  # raises where the environment asks for what there is not
        self._confirm = confirm

    def fingerprints(self, jobs: Sequence[WriteJob], checksum: str | None) -> Iterable[str]:
        """Compute each one on demand: most saves find a difference in the first file."""
        return (fingerprint_of_job(job, checksum) for job in jobs)

    def link(self, jobs: Sequence[WriteJob], known: Mapping[str, KnownFile], checksum: str) -> list[FileDigest | None]:
        """Compare several files at once, in threads."""

        def link_one(job: WriteJob, stop: Event) -> FileDigest | None:
            file = known.get(fingerprint_of_job(job, checksum))
            return None if file is None else link_if_same(job, file, checksum, stop)

        return run_in_threads(link_one, jobs, FILES_AT_ONCE)

    def write(
        self,
        jobs: Sequence[WriteJob],
        checksum: str | None,
        progress_callback: ProgressCallback | None,
        store: Store | None = None,
    ) -> list[FileDigest]:
        """Write several files at once, in threads."""
        if store is not None:
            named = {os.path.basename(job.path): job for job in jobs}
            return list(upload_files(store, named, checksum, progress_callback).values())
        return write_shards(jobs, checksum=checksum, progress_callback=progress_callback)

    def confirm(self) -> None:
        """Call the `confirm` that was passed."""
        self._confirm()


# Reuse: files of an older checkpoint that have the same bytes as the ones to write are linked, or kept.


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KnownFile:
    """A file of an older checkpoint."""

    path: str | None
    """None: in a store, where it stays, and gets no second name."""
    digest: FileDigest
    """The file's record: its size, a checksum and the fingerprint, not the digests of its tensors."""


def link_if_same(job: WriteJob, file: KnownFile, checksum: str, stop: Event) -> FileDigest | None:
    """Hard-link a file of the same fingerprint if it has exactly the bytes of the job. All of these are read anyway.

    Raises InterruptedError when `stop` is set.

    Returns:
        The digest; None if the bytes differ, or the file on disk is damaged, is a link, or cannot be hard-linked.
    """
    record, _ = digest_shard(job, checksum, None, stop)
    if replace(record, tensor_digests=None) != file.digest:
        return None
    if file.path is None:
        return record
    if os.path.islink(file.path):
        return None  # a link's target may be removed on its own
    try:
        shard = SafetensorsFile(file.path, os.path.dirname(file.path))
        try:
            shard.check_contents(file.digest)  # also on disk: a damaged file is written again
        finally:
            shard.close()
        os.link(file.path, job.path)
    except (HfshardError, OSError) as error:
        logger.info("'%s' cannot be hard-linked (%s): it is written again.", file.path, error)
        return None
    return record


# Uploads: files are streamed from tensor memory into a store, several at once, with their checksums in the same pass.


def upload_files(
    store: Store,
    jobs: Mapping[str, WriteJob],
    checksum: str | None,
    progress_callback: ProgressCallback | None = None,
) -> dict[str, FileDigest]:
    """Send files to a store, several at once; nothing is written to disk.

    Args:
        store: The target.
        jobs: Name -> contents; the jobs' paths do not matter. No object may have such a name.
        checksum: A key of `HASHERS`, or None.
        progress_callback: Called from any thread with the number of bytes of each block that was taken.

    Returns:
        Name -> digest of the file, with its ETag.

    Raises:
        StoreError: The first error of any file; the others stop. The next save deletes what was sent.
    """
    synchronize_devices(list(jobs.values()))
    upload = partial(_upload, store, checksum=checksum, progress_callback=progress_callback)
    return dict(run_in_threads(upload, jobs.items(), writer_threads()))


def _upload(
    store: Store,
    named: tuple[str, WriteJob],
    cancelled: Event,
    *,
    checksum: str | None,
    progress_callback: ProgressCallback | None,
) -> tuple[str, FileDigest]:
    name, job = named
    report = cancellable(progress_callback, cancelled)
    opened: list[ObjectWriter] = []

    def open_output(size: int) -> Callable[[memoryview], None]:
        writer = store.open_writer(name, size)
        opened.append(writer)

        def put(block: memoryview) -> None:
            writer.write(block)
            report(len(block))

        return put

    try:
        digest = stream_shard(job, checksum, open_output)
        put = opened[0].finish()
    except BaseException:
        for writer in opened:
            writer.abort()
        raise
    return name, replace(digest, etag=put.etag)
