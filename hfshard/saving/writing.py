"""Who writes the files of a save: this process alone, or several that have a part of the tensors each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from hfshard._util.progress import ProgressCallback
from hfshard.saving.linking import KnownFile, link_unchanged
from hfshard.storage.format.index import FileDigest
from hfshard.storage.weights.safetensors_writer import WriteJob, fingerprint_of_job, write_shards


class ShardWriter(Protocol):
    """Writes the files of a save into the staging directory."""

    def fingerprints(self, jobs: Sequence[WriteJob], checksum: str | None) -> Iterable[str]:
        """The fingerprints of the files that `write` would write for these jobs, in order; nothing is written."""

    def link(self, jobs: Sequence[WriteJob], known: Mapping[str, KnownFile], checksum: str) -> list[FileDigest | None]:
        """Hard-link the files that are on the disk already, as `link_unchanged` does."""

    def write(
        self, jobs: Sequence[WriteJob], checksum: str | None, progress_callback: ProgressCallback | None
    ) -> list[FileDigest]:
        """Write the files as `write_shards` does, and return the digest of each."""

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
        self, jobs: Sequence[WriteJob], checksum: str | None, progress_callback: ProgressCallback | None
    ) -> list[FileDigest]:
        """Write several files at once, in threads."""
        return write_shards(jobs, checksum=checksum, progress_callback=progress_callback)

    def confirm(self) -> None:
        """As the caller wants."""
        self._confirm()
