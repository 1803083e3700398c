"""Writes one checkpoint into a new directory: shards that did not change are linked, all others are written."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from hfshard.commit.transaction import KnownFile, OwnShardWriter, ShardWriter
from hfshard.constants import (
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    INDEX_SUFFIX,
    MAX_INDEX_BYTES,
    SAFETENSORS_SUFFIX,
)
from hfshard.disk.fsops import Unflushed, require_space
from hfshard.errors import InvalidArgumentError
from hfshard.format.digests import Checksum
from hfshard.format.index import FileDigest
from hfshard.saving.pipeline import index_of, plan_request, shard_jobs
from hfshard.shards.write_shards import WriteJob, await_devices, writer_threads
from hfshard.tensors.stored_tensor import tensor_nbytes
from hfshard.training.collecting import SavePayload
from hfshard.training.run.manifest import MANIFEST, CheckpointManifest, shard_record, small_record

TRAINING_STATE: Final = "training_state.json"

_OWN_SUFFIXES: Final = (SAFETENSORS_SUFFIX, INDEX_SUFFIX)


@dataclass
class ReusableShards:
    """Files of the checkpoint before, by fingerprint: weights that did not change need not be written again."""

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
        reusable: The files of the checkpoint before.
        progress_callback: Gets the bytes that were written, from any thread.
        writer: Writes and links the shards; None: this process does.

    Returns:
        The manifest with all files.

    Raises:
        NotEnoughSpaceError: Before the first byte is written.
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
    with Unflushed() as unflushed:
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
    """Link the shards that did not change, write all others, and return the digests of both by file name."""
    await_devices(list(jobs.values()))  # a step that still runs must not change what is compared and written
    records: dict[str, FileDigest] = {}
    if checksum is not None and reusable.files:
        linked = writer.link(list(jobs.values()), reusable.files, checksum)
        records = {name: record for name, record in zip(jobs, linked, strict=True) if record is not None}
    left = {name: job for name, job in jobs.items() if name not in records}
    require_space(
        directory,
        sum(tensor_nbytes(tensor) for job in left.values() for tensor in job.tensors.values()),
        doing=f"Saving into '{os.path.dirname(directory)}'",
        todo=". Free some space, or keep fewer checkpoints: max_to_keep.",
    )
    written = writer.write(list(left.values()), checksum, progress_callback)
    return records | dict(zip(left, written))


def check_names(files: Mapping[str, bytes], payload: SavePayload) -> None:
    """Refuse small files whose names lead elsewhere or are used by a checkpoint, and plain values that are too long.

    Raises:
        InvalidArgumentError: A name is refused, or the plain values are longer than a restore reads.
    """
    if len(payload.training_state) > MAX_INDEX_BYTES:
        raise InvalidArgumentError(
            f"The plain values of the state take {len(payload.training_state):,} bytes, and a restore reads "
            f"{MAX_INDEX_BYTES:,}. Put long lists of numbers into tensors."
        )
    own = {MANIFEST, TRAINING_STATE, CONFIG_NAME, GENERATION_CONFIG_NAME}
    for request in payload.requests.values():
        own |= request.model_files.keys()
    for name in files:
        if (
            not isinstance(name, str)
            or name in own
            or os.path.basename(name) != name
            or name.startswith(".")
            or name.endswith(_OWN_SUFFIXES)
        ):
            raise InvalidArgumentError(
                f"A file of a checkpoint can't be called {name!r}: give it a plain name that is not one of its own."
            )
