"""Who writes the files of a save: this process alone, or several that have a part of the tensors each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from hfshard._util.progress import ProgressCallback
from hfshard.format.index import FileDigest
from hfshard.saving.linking import KnownFile, link_unchanged
from hfshard.saving.stores.upload import upload_files
from hfshard.shards.write_shards import WriteJob, fingerprint_of_job, write_shards
from hfshard.stores.store import Store


class ShardWriter(Protocol):
    """Writes the files of a save into the staging directory, or sends them to a store."""

    def fingerprints(self, jobs: Sequence[WriteJob], checksum: str | None) -> Iterable[str]:
        """The fingerprints of the files that `write` would write for these jobs, in order; nothing is written."""

    def link(self, jobs: Sequence[WriteJob], known: Mapping[str, KnownFile], checksum: str) -> list[FileDigest | None]:
        """Hard-link the files that are on the disk already, as `link_unchanged` does; those in a store are kept."""

    def write(
        self,
        jobs: Sequence[WriteJob],
        checksum: str | None,
        progress_callback: ProgressCallback | None,
        store: Store | None = None,
    ) -> list[FileDigest]:
        """Write the files, and return the digest of each: as `write_shards` does, or `upload_files` into a store."""

    def confirm(self) -> None:
        """Called right before the commit: the last moment for one who writes with others to raise."""


class OwnShardWriter:
    """Writes in this process, which has all tensors.

    Args:
        confirm: Called right before the commit.
    """

    def __init__(self, confirm: Callable[[], None] = lambda: None) -> None:
        self._confirm = confirm

    def fingerprints(self, jobs: Sequence[WriteJob], checksum: str | None) -> Iterable[str]:
        """Compute each one when it is asked for: most saves find a difference in the first file."""
        return (fingerprint_of_job(job, checksum) for job in jobs)

    def link(self, jobs: Sequence[WriteJob], known: Mapping[str, KnownFile], checksum: str) -> list[FileDigest | None]:
        """Compare several files at once, in threads."""
        return link_unchanged(jobs, known, checksum)

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
        """As the caller wants."""
        self._confirm()
