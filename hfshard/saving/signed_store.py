"""Verification of a signature in a store: objects, under the names of a pull, are streamed and compared with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from hfshard._util.progress import byte_progress
from hfshard.checkpoint.reports import VerifyReport
from hfshard.constants import MAX_INDEX_BYTES, SIGNATURE_NAME, WEIGHTS_SUFFIXES
from hfshard.disk.byte_source import ByteSource, hash_all, read_all
from hfshard.errors import CheckpointChangedError, HfshardError, InvalidArgumentError, StoreError
from hfshard.format.file_names import WeightNames
from hfshard.format.index import CheckpointIndex
from hfshard.hub.push_files import PushContents, detect_variants
from hfshard.places.source import CheckpointSource
from hfshard.places.store_files import StoreFiles
from hfshard.saving.copy_checkpoint import without_marks
from hfshard.signing.check_signature import (
    SignedFolder,
    needs_disk,
    recorded_digests,
    stored_manifest,
    with_compared,
    with_problems,
)
from hfshard.signing.model_signing import SignedManifest
from hfshard.signing.signed_files import is_signable
from hfshard.signing.signer import SignedBy
from hfshard.stores.store import StoredSource

_CHANGED: Final = "was replaced while it was being checked. Retry when no save is running."


def verify_signed_store(
    source: CheckpointSource,
    by: SignedBy,
    verify: Callable[[], VerifyReport],
    *,
    level: str,
    progress: bool | None,
    trusts_index: bool = True,
) -> VerifyReport:
    """Check a checkpoint in a store, and add the problems of its signature and the files that differ from it.

    Files count under the names that a pull gives them, because those were signed: in a store, shard names have
    additional digits. Shards that were compared with their recorded sha256 are not read again; others are streamed,
    several at once.

    Args:
        source, by: The checkpoint, and the required signer.
        verify: Checks the checkpoint without the signature.
        level: "full"; or "structure": weights are not read, only their records are compared.
        progress: Whether to show a bar.
        trusts_index: Whether `verify` compares shards with the sha256 in their index, so that those of a signed index
            need not be read again. False for a run's manifest, which may be forged.

    Raises:
        CheckpointChangedError: The checkpoint was replaced meanwhile.
        InvalidArgumentError: It can't be compared in a store.
        Everything that `verify` raises, and a store.
    """
    local = source.find_local()
    assert local is not None
    place = local.folder.path
    files = StoreFiles(place)
    report = verify()
    try:
        is_compared = trusts_index or level == "structure"
        report = _with_signature(report, files, by, level=level, progress=progress, is_compared=is_compared)
    except (InvalidArgumentError, CheckpointChangedError, StoreError):
        raise
    except HfshardError as error:
        report = with_problems(report, [error])
    if not files.is_unchanged():
        raise CheckpointChangedError(f"The checkpoint in '{place}' {_CHANGED}", path=place)
    return report


def _with_signature(
    report: VerifyReport, files: StoreFiles, by: SignedBy, *, level: str, progress: bool | None, is_compared: bool
) -> VerifyReport:
    listed = files.contents()
    sizes = {name: content.size for name, content in listed.items()}
    manifest = stored_manifest(files.place, sizes, lambda _: read_all(listed[SIGNATURE_NAME]), by)
    contents = _as_pulled(files, manifest)
    objects = {name: one.found.name for name, one in contents.items() if isinstance(one, StoredSource)}
    place = SignedFolder(files.place, manifest, objects=objects)
    there = {name for name in contents if is_signable(name) or name in manifest.digests}
    names, errors = place.compare_names(there)
    recorded = recorded_digests(manifest, names, partial(_index, contents)) if report.ok and is_compared else {}
    known = {name: digest for name, digest in recorded.items() if name in report.files}  # others were not looked at
    left = {name for name in names - known.keys() if level == "full" or not name.endswith(WEIGHTS_SUFFIXES)}
    total = sum(contents[name].size for name in left)
    with byte_progress("Verifying", total, progress) as progress_callback:
        found = known | hash_all({name: contents[name] for name in left}, progress_callback)
    errors += [place.differs(name) for name in sorted(found) if manifest.digests[name] != {name: found[name]}]

    unread = 0 if level == "full" else len(names) - len(left)
    return with_compared(report, by, names, errors, place.left_out(there), unread=unread, read_bytes=total)


def _index(contents: Mapping[str, ByteSource], name: str) -> bytes:
    """Read an index; one that is too large to be read is empty, and thus none that was signed."""
    return read_all(contents[name]) if contents[name].size <= MAX_INDEX_BYTES else b""


def _as_pulled(files: StoreFiles, manifest: SignedManifest) -> dict[str, ByteSource]:
    """Return the files under the names that were signed: unchanged, or as a pull would write them.

    Raises:
        InvalidArgumentError: A pull writes weights that were signed as one file with another header.
    """
    contents = files.contents()
    if manifest.digests.keys() <= contents.keys():
        return contents  # as another tool uploaded it
    indexes: dict[str | None, CheckpointIndex] = {}
    entries: dict[str | None, str] = {}
    for variant in detect_variants(name for name in contents if "/" not in name) or {None}:
        with files.open_variant(variant) as checkpoint:
            indexes[variant], entries[variant] = checkpoint.index, checkpoint.weights.name
        single = WeightNames(variant).single
        if (
            single in manifest.digests
            and single not in contents
            and len(set(indexes[variant].weight_map.values())) == 1
        ):
            raise needs_disk(files.place, f"was signed as one file, '{single}', which has another header in a store")
    return without_marks(PushContents(contents, indexes, entries)).contents
