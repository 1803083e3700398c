"""Links, or keeps, files of an older checkpoint that hold the very bytes which are to be written."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import Event

from hfshard._util.threads import in_threads
from hfshard.constants import FILES_AT_ONCE
from hfshard.errors import HfshardError
from hfshard.format.index import FileDigest
from hfshard.shards.shard_file import SafetensorsFile
from hfshard.shards.write_shards import WriteJob, digest_shard, fingerprint_of_job

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KnownFile:
    """A file of an older checkpoint."""

    path: str | None
    """None: in a store, where it stays, and gets no second name."""
    digest: FileDigest
    """What a manifest tells of it: its size, a checksum and the fingerprint, not the digests of its tensors."""


def link_unchanged(jobs: Sequence[WriteJob], known: Mapping[str, KnownFile], checksum: str) -> list[FileDigest | None]:
    """Hard-link the files that are on the disk already, byte for byte.

    Args:
        jobs: What is to be written.
        known: Fingerprint -> a file that may have the same bytes.
        checksum: A key of `HASHERS`.

    Returns:
        For each job the digest of what was linked; None: it is to be written.
    """
    return in_threads(partial(_link_one, known=known, checksum=checksum), jobs, FILES_AT_ONCE)


def _link_one(job: WriteJob, stop: Event, *, known: Mapping[str, KnownFile], checksum: str) -> FileDigest | None:
    file = known.get(fingerprint_of_job(job, checksum))
    return None if file is None else link_if_same(job, file, checksum, stop)


def link_if_same(job: WriteJob, file: KnownFile, checksum: str, stop: Event) -> FileDigest | None:
    """Hard-link one file, if all bytes of the job are those that it has.

    The bytes of the job are read to their end in any case.

    Args:
        job: What is to be written.
        file: Of the same fingerprint.
        checksum: A key of `HASHERS`.
        stop: When it is set, this raises.

    Returns:
        The digest; None where the bytes differ, the file on the disk is damaged, or there are no hard links.
    """
    record, _ = digest_shard(job, checksum, None, stop)
    if replace(record, tensor_digests=None) != file.digest:
        return None
    if file.path is None:
        return record
    if os.path.islink(file.path):
        return None  # a link's bytes may go without it
    try:
        shard = SafetensorsFile(file.path, os.path.dirname(file.path))
        try:
            shard.check_contents(file.digest)  # on the disk, too: a damaged file is written again
        finally:
            shard.close()
        os.link(file.path, job.path)
    except (HfshardError, OSError) as error:
        logger.info("'%s' can't be linked (%s): it is written again.", file.path, error)
        return None
    return record
