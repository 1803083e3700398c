"""Stream files from tensor memory into a store, several at once, with their checksums in the same pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from hfshard._util.progress import ProgressCallback
from hfshard._util.threads import cancellable, in_threads
from hfshard.format.index import FileDigest
from hfshard.shards.write_shards import WriteJob, await_devices, stream_shard, writer_threads
from hfshard.stores.store import ObjectWriter, Store


def upload_files(
    store: Store,
    jobs: Mapping[str, WriteJob],
    checksum: str | None,
    progress_callback: ProgressCallback | None = None,
) -> dict[str, FileDigest]:
    """Send files to a store, several at once; nothing is written to the disk.

    Args:
        store: Where to.
        jobs: Name -> contents; the jobs' paths do not matter. No object may have such a name.
        checksum: A key of `HASHERS`, or None.
        progress_callback: Called from any thread with the number of bytes of each block that was taken.

    Returns:
        Name -> digest of the file, with its ETag.

    Raises:
        StoreError: The first error of any file; the others stop. What was sent stays, for the next save to delete.
    """
    await_devices(list(jobs.values()))
    upload = partial(_upload, store, checksum=checksum, progress_callback=progress_callback)
    return dict(in_threads(upload, jobs.items(), writer_threads()))


def _upload(
    store: Store,
    named: tuple[str, WriteJob],
    cancelled: threading.Event,
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
