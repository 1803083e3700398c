"""A save that goes nowhere: the files of a request as streams from memory, to be sent without a copy on disk."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from hfshard._util.progress import bytes_bar
from hfshard._util.threads import in_threads
from hfshard.saving.prepare import SaveRequest, index_of, plan_request, shard_jobs
from hfshard.storage.disk.content import BytesContent, Content, StreamContent, sha256_of_reader
from hfshard.storage.format.index import CheckpointIndex, FileRecord
from hfshard.storage.weights.shard_stream import ShardStream
from hfshard.storage.weights.shard_writer import ShardJob, digest_shard, writer_threads


def stream_request(request: SaveRequest) -> tuple[dict[str, Content], CheckpointIndex]:
    """The files that a save of this request into an empty directory would write, bit for bit.

    Each tensor is read once to make the hashes, and again when its file is read; those of a single file twice for the
    hashes, as it holds its own.

    Args:
        request: Its tensors must not change until the files are read.

    Returns:
        Name -> contents, and the index.

    Raises:
        UnstorableTensorError, InvalidArgumentError: As when it is saved.
    """
    plan = plan_request(request)
    jobs = shard_jobs(plan, request, [""] * len(plan.shards))
    with bytes_bar("Hashing", plan.total_size, request.progress) as on_bytes:
        digested = in_threads(partial(_digest, on_bytes=on_bytes), jobs, writer_threads())
    index = index_of(plan, request, [record for record, _ in digested])
    contents: dict[str, Content] = {}
    for shard, job, (record, header) in zip(plan.shards, jobs, digested, strict=True):
        opener = partial(ShardStream, header, list(job.tensors.values()))
        sha256 = record.sha256 if plan.is_sharded and record.sha256 is not None else sha256_of_reader(opener())
        contents[shard.file] = StreamContent(record.size or 0, sha256, opener)
    if plan.is_sharded:
        contents[request.names.index] = BytesContent(index.to_json())
    small = {**request.extras, **({"config.json": request.config} if request.config is not None else {})}
    return contents | {name: BytesContent(raw) for name, raw in small.items()}, index


def _digest(job: ShardJob, stop: threading.Event, on_bytes: Callable[[int], object]) -> tuple[FileRecord, bytes]:
    return digest_shard(job, "sha256", on_bytes, stop)
