"""Interface of the directory or store of a run, and the writing of one checkpoint into a new directory."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from hfshard.commit.transaction import KnownFile, OwnShardWriter, ShardWriter
from hfshard.constants import (
    SAFETENSORS_SUFFIX,
)
from hfshard.disk.fsops import FlushBatch, require_space
from hfshard.format.digests import Checksum
from hfshard.format.index import FileDigest
from hfshard.saving.pipeline import index_of, plan_request, shard_jobs
from hfshard.shards.write_shards import WriteJob, synchronize_devices, writer_threads
from hfshard.tensors.stored_tensor import tensor_nbytes
from hfshard.training.run.manifest import (
    MANIFEST,
    TRAINING_STATE,
    CheckpointManifest,
    RunCheckpoint,
    shard_record,
    small_record,
)
from hfshard.training.state.collect_state import SavePayload


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOrder:
    """A request to write one checkpoint."""

    payload: SavePayload
    manifest: CheckpointManifest
    """The manifest without files, and without the save's number, which the storage sets."""
    files: Mapping[str, bytes]
    """More small files."""
    progress_callback: Callable[[int], object] | None
    """A function that gets the bytes that were written, from any thread."""
    writer: ShardWriter | None
    """Writes the shards, if other ranks take part; None: this process does."""
    before_commit: Callable[[], None]
    """Called when everything is written and nothing is visible yet: the last moment to raise."""
    keeps_metrics: bool = False
    """True if it keeps the metrics of the checkpoint that it replaces."""

    def over(self, replaced: RunCheckpoint | None) -> CheckpointOrder:
        """Return the request for the case that it replaces this checkpoint, which is read only if necessary."""
        if not self.keeps_metrics or replaced is None or replaced.manifest is None:
            return self
        return replace(self, manifest=replace(self.manifest, metrics=replaced.manifest.metrics))


class RunStorage(Protocol):
    """The directory or store of a run.

    `RunWriter` has one of its own, and acquires it before it changes anything. Readers have another one, which always
    lists what other processes have saved.
    """

    root: str
    """The run's directory, or its address."""

    def checkpoints(self) -> list[RunCheckpoint]:
        """List the checkpoints, damaged ones included, as `newest_first` sorts them.

        After a save, its writer's listing may be the one that the save ended with.
        """

    def acquire(self) -> bool:
        """Become the only writer, and create what is missing.

        Returns:
            Whether that is new, so that other writers may have left something there.
        """

    @property
    def is_acquired(self) -> bool:
        """True while this process may remove checkpoints, as the only writer or the last one."""

    def release(self) -> None:
        """Let others write; a second call does nothing."""

    def clean_up(self) -> None:
        """Remove what killed saves left, and restore what they had moved aside."""

    def write(self, order: CheckpointOrder) -> RunCheckpoint:
        """Write a checkpoint, durably and all or nothing; the previous one of its step is replaced."""

    def remove(self, checkpoints: Sequence[RunCheckpoint]) -> None:
        """Remove checkpoints, in a store by one request: each at once, then its files.

        What another save has put in its place stays. What cannot be removed is logged as a warning.
        """


# Writing of one checkpoint into a new directory: unchanged shards are linked, all others are written.


@dataclass
class ReusableShards:
    """Files of the previous checkpoint, by fingerprint: unchanged weights need not be written again."""

    files: dict[str, KnownFile] = field(default_factory=dict)

    @classmethod
    def of(cls, directory: str, manifest: CheckpointManifest) -> ReusableShards:
        """Index the shards of a checkpoint."""
        return cls(
            {
                record.fingerprint: KnownFile(os.path.join(directory, name), record)
                for name, record in manifest.files.items()
                if name.endswith(SAFETENSORS_SUFFIX) and record.fingerprint is not None and record.is_verifiable
            }
        )


def write_checkpoint(
    directory: str,
    payload: SavePayload,
    manifest: CheckpointManifest,
    files: Mapping[str, bytes],
    reusable: ReusableShards,
    progress_callback: Callable[[int], object] | None,
    writer: ShardWriter | None = None,
) -> CheckpointManifest:
    """Write all files of a checkpoint durably, its manifest last.

    Args:
        directory: The directory, which is empty.
        payload: What to write.
        manifest: The manifest without files.
        files: More small files to write.
        reusable: The files of the previous checkpoint.
        progress_callback: Gets the bytes that were written, from any thread.
        writer: Writes and links the shards; None: this process does.

    Returns:
        The manifest with all files.

    Raises:
        NotEnoughSpaceError: There is too little space; raised before the first byte is written.
        OSError: The disk failed; the caller removes what was written.
    """
    plans = {base: plan_request(request) for base, request in payload.requests.items()}
    small = {**files, TRAINING_STATE: payload.training_state}
    jobs: dict[str, WriteJob] = {}
    for base, request in payload.requests.items():
        names = [shard.file for shard in plans[base].shards]
        paths = [os.path.join(directory, name) for name in names]
        jobs |= zip(names, shard_jobs(plans[base], request, paths))
        small |= request.small_files
    checksum = next((request.options.checksum for request in payload.requests.values()), None)
    records = _link_or_write(directory, jobs, checksum, reusable, progress_callback, writer or OwnShardWriter())
    for base, request in payload.requests.items():
        if plans[base].is_sharded:
            own = [records[shard.file] for shard in plans[base].shards]
            small[request.options.names.index] = index_of(plans[base], request, own).to_json()
    table = {name: shard_record(record) for name, record in records.items()}
    table |= {name: small_record(raw) for name, raw in small.items()}
    whole = replace(manifest, files=table)
    with FlushBatch() as unflushed:
        for name, raw in small.items():
            unflushed.write_file(os.path.join(directory, name), raw)
        unflushed.write_file(os.path.join(directory, MANIFEST), whole.to_json())
        unflushed.add_directory(directory)
        unflushed.flush(writer_threads())
    return whole


def _link_or_write(
    directory: str,
    jobs: Mapping[str, WriteJob],
    checksum: Checksum | None,
    reusable: ReusableShards,
    progress_callback: Callable[[int], object] | None,
    writer: ShardWriter,
) -> dict[str, FileDigest]:
    """Link unchanged shards, write all others, and return the digests of both by file name."""
    synchronize_devices(list(jobs.values()))  # a step that still runs must not change what is compared and written
    records: dict[str, FileDigest] = {}
    if checksum is not None and reusable.files:
        linked = writer.link(list(jobs.values()), reusable.files, checksum)
        records = {name: record for name, record in zip(jobs, linked, strict=True) if record is not None}
    left = {name: job for name, job in jobs.items() if name not in records}
    require_space(
        directory,
        sum(tensor_nbytes(tensor) for job in left.values() for tensor in job.tensors.values()),
        doing=f"Saving into '{os.path.dirname(directory)}'",
        todo=". Free some space, or keep fewer checkpoints with max_to_keep.",
    )
    written = writer.write(list(left.values()), checksum, progress_callback)
    return records | dict(zip(left, written))
