"""Reads a checkpoint that is pushed: all bytes are compared with the manifest, and hashed as a hub needs it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event

from hfshard._util.progress import bytes_bar
from hfshard._util.threads import in_threads
from hfshard.constants import FILES_AT_ONCE, MAX_INDEX_BYTES, SAFETENSORS_SUFFIX
from hfshard.storage.disk.byte_source import ByteSource, BytesSource, FileSource
from hfshard.storage.disk.safe_open import read_small
from hfshard.storage.format.index import FileDigest
from hfshard.storage.weights.safetensors_file import SafetensorsFile
from hfshard.training.run.manifest import MANIFEST, CheckpointManifest, check_files
from hfshard.training.run.run_checkpoint import RunCheckpoint

Hashes = dict[FileDigest, str]
"""A file's digest in the manifest -> its sha256 from an earlier push: frozen weights are not hashed again."""


@dataclass(frozen=True, slots=True)
class VerifiedContents:
    """A checkpoint that is pushed."""

    directory: str
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
    path = os.path.join(found.path, MANIFEST)
    raw, _ = read_small(path, found.path, MAX_INDEX_BYTES)
    return VerifiedContents(found.path, CheckpointManifest.from_json(raw, path), raw)


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
    files = one.manifest.files
    check_files(one.directory, one.manifest, is_full=False)
    with bytes_bar("Verifying", sum(record.size or 0 for record in files.values()), progress) as progress_callback:
        work = partial(_content, one.directory, hashes=dict(hashes), progress_callback=progress_callback)
        made = dict(zip(files, in_threads(work, files.items(), FILES_AT_ONCE), strict=True))
    hashes.clear()
    hashes.update({files[name]: content.sha256 for name, content in made.items() if content.sha256 is not None})
    return replace(one, contents={MANIFEST: BytesSource(one.raw), **made})


def _content(
    directory: str,
    item: tuple[str, FileDigest],
    cancelled: Event,
    *,
    hashes: Hashes,
    progress_callback: Callable[[int], object],
) -> FileSource:
    name, record = item
    path = os.path.join(directory, name)
    sha256 = _checked_sha256(path, directory, record, hashes) if name.endswith(SAFETENSORS_SUFFIX) else record.sha256
    if cancelled.is_set():
        raise InterruptedError("another file failed, or Ctrl-C came")
    progress_callback(record.size or 0)
    return FileSource(path, os.stat(path).st_size, sha256)


def _checked_sha256(path: str, directory: str, record: FileDigest, hashes: Hashes) -> str:
    shard = SafetensorsFile(path, directory)
    try:
        # A file that holds its own checksum was hashed with zeros in its place.
        known = hashes.get(record) or (None if shard.written_by_hfshard else record.sha256)
        if known is None:
            return shard.checked_sha256(record)
        shard.check_contents(record)
        return known
    finally:
        shard.close()
