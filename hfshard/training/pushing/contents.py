"""Reads a checkpoint that is pushed: all bytes are compared with the manifest, and hashed as a hub needs it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event

from hfshard._util.progress import bytes_bar
from hfshard._util.threads import in_threads
from hfshard.constants import FILES_AT_ONCE, SAFETENSORS_SUFFIX
from hfshard.disk.byte_source import ByteSource, BytesSource
from hfshard.format.index import FileDigest
from hfshard.training.run.manifest import MANIFEST, CheckpointManifest
from hfshard.training.run.places.opening import files_at
from hfshard.training.run.places.protocols import CheckpointFiles
from hfshard.training.run.run_checkpoint import RunCheckpoint

Hashes = dict[FileDigest, str]
"""A file's digest in the manifest -> its sha256 from an earlier push: frozen weights are not hashed again."""


@dataclass(frozen=True, slots=True)
class VerifiedContents:
    """A checkpoint that is pushed."""

    files: CheckpointFiles
    manifest: CheckpointManifest
    raw: bytes
    """The bytes of the manifest."""
    contents: dict[str, ByteSource] = field(default_factory=dict)
    """File name -> contents."""


def read_manifest_of(found: RunCheckpoint) -> VerifiedContents:
    """Read the manifest of a checkpoint, without the contents yet.

    Raises:
        DamagedCheckpointError: Its manifest can't be read.
    """
    if found.manifest is None:
        raise found.problem or RuntimeError(f"'{found.path}' has no manifest.")
    files = files_at(found.path)
    raw = files.read_small(MANIFEST)
    manifest = CheckpointManifest.from_json(raw, os.path.join(found.path, MANIFEST))
    return VerifiedContents(files, manifest, raw)


def read_whole(one: VerifiedContents, progress: bool | None = None, hashes: Hashes | None = None) -> VerifiedContents:
    """Add the contents, compared and hashed in one reading.

    Args:
        one: The checkpoint.
        progress: Whether to show a bar on stderr. None: on a terminal.
        hashes: The hashes of earlier pushes, which are replaced by those of this one.

    Raises:
        DamagedCheckpointError, UnsafePathError: A file is not the one that was saved.
    """
    hashes = {} if hashes is None else hashes
    recorded = one.manifest.files
    one.files.check(one.manifest, is_full=False)
    with bytes_bar("Verifying", sum(record.size or 0 for record in recorded.values()), progress) as progress_callback:
        work = partial(_content, one.files, hashes=dict(hashes), progress_callback=progress_callback)
        made = dict(zip(recorded, in_threads(work, recorded.items(), FILES_AT_ONCE), strict=True))
    hashes.clear()
    hashes.update({recorded[name]: content.sha256 for name, content in made.items() if content.sha256 is not None})
    return replace(one, contents={MANIFEST: BytesSource(one.raw), **made})


def _content(
    files: CheckpointFiles,
    item: tuple[str, FileDigest],
    cancelled: Event,
    *,
    hashes: Hashes,
    progress_callback: Callable[[int], object],
) -> ByteSource:
    name, record = item
    sha256 = _checked_sha256(files, name, record, hashes) if name.endswith(SAFETENSORS_SUFFIX) else record.sha256
    if cancelled.is_set():
        raise InterruptedError("another file failed, or Ctrl-C came")
    progress_callback(record.size or 0)
    return files.source(name, sha256)


def _checked_sha256(files: CheckpointFiles, name: str, record: FileDigest, hashes: Hashes) -> str:
    shard = files.open_shard(name)
    try:
        # A file that holds its own checksum was hashed with zeros in its place.
        known = hashes.get(record) or (None if shard.written_by_hfshard else record.sha256)
        if known is None:
            return shard.checked_sha256(record)
        shard.check_contents(record)
        return known
    finally:
        shard.close()
