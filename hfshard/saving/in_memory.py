"""Saves into memory: the files of a request as streams, to be sent without a copy on disk."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from hfshard._util.progress import bytes_bar
from hfshard._util.threads import in_threads
from hfshard.disk.byte_source import ByteSource, BytesSource, StreamSource, sha256_of_reader
from hfshard.format.index import CheckpointIndex, FileDigest
from hfshard.saving.prepare import index_of, plan_request, shard_jobs
from hfshard.saving.request import SaveRequest
from hfshard.shards.write_shards import SafetensorsStream, WriteJob, digest_shard, writer_threads


def stream_request(request: SaveRequest) -> tuple[dict[str, ByteSource], CheckpointIndex]:
    """Stream the files that a save of this request into an empty directory would write, bit for bit.

    Each tensor is read once for the hashes, and again when its file is read. The tensors of a single file are read
    twice for the hashes, because the file holds its own.

    Args:
        request: Its tensors must not change until the files are read.

    Returns:
        Name -> contents, and the index.

    Raises:
        UnstorableTensorError, InvalidArgumentError: As when it is saved.
    """
    plan = plan_request(request)
    jobs = shard_jobs(plan, request, [""] * len(plan.shards))
    with bytes_bar("Hashing", plan.total_size, request.options.progress) as progress_callback:
        digested = in_threads(partial(_digest, progress_callback=progress_callback), jobs, writer_threads())
    index = index_of(plan, request, [digest for digest, _ in digested])
    contents: dict[str, ByteSource] = {}
    for shard, job, (digest, header) in zip(plan.shards, jobs, digested, strict=True):
        opener = partial(SafetensorsStream, header, list(job.tensors.values()))
        sha256 = digest.sha256 if plan.is_sharded and digest.sha256 is not None else sha256_of_reader(opener())
        contents[shard.file] = StreamSource(digest.size or 0, sha256, opener)
    if plan.is_sharded:
        contents[request.options.names.index] = BytesSource(index.to_json())
    return contents | {name: BytesSource(raw) for name, raw in request.small_files.items()}, index


def _digest(
    job: WriteJob, cancelled: threading.Event, progress_callback: Callable[[int], object]
) -> tuple[FileDigest, bytes]:
    return digest_shard(job, "sha256", progress_callback, cancelled)
