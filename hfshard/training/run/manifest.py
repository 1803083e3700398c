"""`checkpoint.json`: the last file of a checkpoint, which makes it whole; it has the checksum of every other file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from threading import Event
from typing import Final, TypeGuard

from hfshard._util.threads import cancellable, in_threads
from hfshard.constants import FILES_AT_ONCE, MANIFEST_NAME, MAX_INDEX_BYTES, SAFETENSORS_SUFFIX
from hfshard.disk.byte_source import sha256_of_reader
from hfshard.disk.safe_open import open_regular, read_small
from hfshard.errors import DamagedCheckpointError, IntegrityError, InvalidArgumentError, UnsafePathError, remedy
from hfshard.format.digests import sha256_of
from hfshard.format.file_names import check_file_name
from hfshard.format.index import FileDigest, parse_file_digest
from hfshard.format.strict_json import dump_json, padded_json, parse_json_object
from hfshard.shards.shard_file import SafetensorsFile
from hfshard.training.parts.nested import decode, encode

MANIFEST: Final = MANIFEST_NAME

MANIFEST_FORMAT: Final = 1

_REMEDY: Final = "Restore another checkpoint, or download it again."


@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    """What makes a directory a whole checkpoint."""

    step: int
    save_number: int
    """Counts the saves of a run: of two checkpoints, the one with the higher number was saved later."""
    metrics: dict[str, float] = field(default_factory=dict)
    files: dict[str, FileDigest] = field(default_factory=dict)
    """Every file of the checkpoint except the manifest."""

    def to_json(self) -> bytes:
        """The bytes of the file, with a checksum of its contents."""
        body = {
            "format": MANIFEST_FORMAT,
            "step": self.step,
            "save_number": self.save_number,
            "metrics": encode(self.metrics, "metrics", {}),
            "files": {name: record.as_json() for name, record in self.files.items()},
        }
        return padded_json({**body, "checksum": sha256_of(dump_json(body))})

    @classmethod
    def from_json(cls, raw: bytes, path: str) -> CheckpointManifest:
        """Parse a manifest that is not trusted.

        Raises:
            DamagedCheckpointError: It is not a manifest, is damaged, or was written by a newer hfshard.
            UnsafePathError: It names a file outside the checkpoint's directory.
        """
        body = parse_json_object(raw, path=path, what="Manifest", remedy=_REMEDY)
        checksum = body.pop("checksum", None)
        if body.get("format") != MANIFEST_FORMAT:
            raise DamagedCheckpointError(
                f"'{path}' has format {body.get('format')!r:.50}, and this hfshard reads {MANIFEST_FORMAT}. "
                "Run: pip install --upgrade hfshard",
                path=path,
            )
        if checksum != _checksum_of(body):
            raise IntegrityError(f"'{path}' is damaged: its checksum does not match its contents. {_REMEDY}", path=path)
        if "sequence" in body and "save_number" not in body:
            raise DamagedCheckpointError(
                f"'{path}' was written by a version of hfshard before the first release, which called the number of a "
                "save 'sequence'. Restore it with that version and save it again with this one.",
                path=path,
            )
        step = body.get("step")
        save_number = body.get("save_number")
        files = body.get("files")
        metrics = decode(body.get("metrics"), {}, path)
        if not (_is_count(step) and _is_count(save_number) and isinstance(files, dict) and _are_metrics(metrics)):
            raise DamagedCheckpointError(
                f"'{path}' is damaged: it lacks a step, files or metrics. {_REMEDY}", path=path
            )
        records = {}
        for name, record in files.items():
            check_file_name(name, index_path=path, suffix="")
            records[name] = parse_file_digest(record, name, path)
        return cls(step, save_number, metrics, records)


def read_checkpoint_manifest(directory: str) -> CheckpointManifest:
    """Read the manifest of a checkpoint; the other files are not checked.

    Raises:
        MissingShardError: There is none: the checkpoint was never finished, or is another tool's.
        DamagedCheckpointError, UnsafePathError: It is damaged.
    """
    path = os.path.join(directory, MANIFEST)
    return CheckpointManifest.from_json(read_small(path, directory, MAX_INDEX_BYTES)[0], path)


def check_files(
    directory: str,
    manifest: CheckpointManifest,
    *,
    is_full: bool,
    progress_callback: Callable[[int], object] | None = None,
    on_problem: Callable[[DamagedCheckpointError], object] | None = None,
) -> None:
    """Compare every file of a checkpoint with its manifest, several at once.

    Args:
        directory: The checkpoint's.
        manifest: The checkpoint's.
        is_full: Compare checksums of all bytes; else sizes and fingerprints.
        progress_callback: Gets the bytes that were hashed, from any thread.
        on_problem: Gets the error of each damaged file; None: the first one is raised.

    Raises:
        DamagedCheckpointError, UnsafePathError: A file is missing, or not the one that was saved.
    """
    check = partial(_check_file, directory, is_full=is_full, progress_callback=progress_callback, on_problem=on_problem)
    in_threads(check, sorted(manifest.files.items(), key=lambda item: -(item[1].size or 0)), FILES_AT_ONCE)


def _check_file(
    directory: str,
    item: tuple[str, FileDigest],
    stop: Event,
    *,
    is_full: bool,
    progress_callback: Callable[[int], object] | None,
    on_problem: Callable[[DamagedCheckpointError], object] | None,
) -> None:
    name, record = item
    path = os.path.join(directory, name)
    try:
        if not name.endswith(SAFETENSORS_SUFFIX):
            _check_small(path, directory, record)
            return
        shard = SafetensorsFile(path, directory)
        try:
            shard.check_size_and_fingerprint(record, with_fingerprint=True)
            _check_own_digests(shard, record)
            if is_full:
                shard.check_contents(record, cancellable(progress_callback, stop), keep_cached=True)
        finally:
            shard.close()
    except UnsafePathError as error:
        problem = DamagedCheckpointError(error.message, path=path, actual=error.actual)
        if on_problem is None:
            raise problem from error
        on_problem(problem)
    except DamagedCheckpointError as error:
        if on_problem is None:
            raise
        on_problem(error)


def _check_own_digests(shard: SafetensorsFile, record: FileDigest) -> None:
    """Compare the digests that a single file holds itself: its checksum leaves them out, and readers rely on them."""
    for kind in ("fingerprint", "xxh3", "sha256"):
        stated = getattr(shard.hfshard_metadata.digests, kind)
        expected = getattr(record, kind)
        if stated is not None and stated != expected:
            raise IntegrityError(
                f"'{shard.path}' is not the file that was saved: it states the {kind} {stated}, and {expected} "
                f"was recorded. {remedy(shard.path)}",
                path=shard.path,
                expected=expected,
                actual=stated,
            )


def _check_small(path: str, directory: str, record: FileDigest) -> None:
    with os.fdopen(
        open_regular(path, directory), "rb"
    ) as reader:  # of any size, and not always text: a tokenizer's model
        size = os.fstat(reader.fileno()).st_size
        found = sha256_of_reader(reader) if size == record.size else f"that of {size} bytes"
    if found != record.sha256:
        raise IntegrityError(
            f"'{path}' is not the file that was saved: its sha256 is {found}, but was {record.sha256}. {remedy(path)}",
            path=path,
            expected=record.sha256,
            actual=found,
        )


def small_record(raw: bytes) -> FileDigest:
    """The record of a small file."""
    return FileDigest(size=len(raw), sha256=sha256_of(raw))


def shard_record(record: FileDigest) -> FileDigest:
    """The part of an index's record of a shard that the manifest repeats."""
    return FileDigest(record.size, record.sha256, record.xxh3, record.fingerprint)


def plain_metrics(metric: float | Mapping[str, float], name: str | None) -> dict[str, float]:
    """Return the metrics of a save by name; a single number is the metric that the best checkpoint is chosen by.

    Raises:
        InvalidArgumentError: A value is not a number.
    """
    values = metric if isinstance(metric, Mapping) else {name or "metric": metric}
    metrics = {}
    for key, value in values.items():
        try:
            metrics[str(key)] = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise InvalidArgumentError(f"The metric {str(key)!r} must be a number, got {value!r:.100}.") from error
    return metrics


def _checksum_of(body: dict[str, object]) -> str | None:
    try:
        return sha256_of(dump_json(body))
    except ValueError:  # a number such as 1e999, which JSON does not have
        return None


def _are_metrics(value: object) -> bool:
    return isinstance(value, dict) and all(type(key) is str and type(one) is float for key, one in value.items())


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and value >= 0
