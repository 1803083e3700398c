"""`checkpoint.json`, a run checkpoint's last file; checkpoints of a run as they are found; and which of them stay."""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Literal, TypeGuard

from hfshard.checkpoint.folder import Folder, as_folder
from hfshard.constants import MANIFEST_NAME, MAX_INDEX_BYTES, TRAINING_STATE_NAME
from hfshard.errors import DamagedCheckpointError, HfshardError, IntegrityError, InvalidArgumentError, MissingShardError
from hfshard.format.file_names import WeightNames, check_file_name
from hfshard.format.index import FileDigest, parse_file_digest, sha256_of
from hfshard.format.stored_save import SaveId
from hfshard.format.strict_json import dump_json, padded_json, parse_json_object
from hfshard.places.place import place_to_save
from hfshard.training.state.nested import decode, encode

MANIFEST: Final = MANIFEST_NAME

TRAINING_STATE: Final = TRAINING_STATE_NAME

MANIFEST_FORMAT: Final = 1

_REMEDY: Final = "Restore another checkpoint, or download it again."


@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    """The manifest that makes a directory a complete checkpoint."""

    step: int
    save_number: int
    """Counts the saves of a run: of two checkpoints, the one with the higher number was saved later."""
    metrics: dict[str, float] = field(default_factory=dict)
    files: dict[str, FileDigest] = field(default_factory=dict)
    """Every file of the checkpoint except the manifest."""
    replaced: CheckpointManifest | None = field(default=None, compare=False, repr=False)
    """During a save without metrics of its own: the manifest of the checkpoint that it replaces."""

    @classmethod
    def begun(
        cls, step: int, save_number: int, metrics: dict[str, float] | None, found: Callable[[], Iterable[RunCheckpoint]]
    ) -> CheckpointManifest:
        """Build the manifest of a save, without files.

        Args:
            step: The checkpoint's.
            save_number: Larger than those of all earlier saves into the run.
            metrics: The checkpoint's; None: as `with_files` finds them.
            found: Lists the run's checkpoints; called only if the metrics may be those of one of them.
        """
        replaced = None
        if metrics is None:
            replaced = next((one.manifest for one in found() if one.step == step and one.is_own), None)
        return cls(step, save_number, metrics or {}, replaced=replaced)

    def with_files(self, shards: Mapping[str, FileDigest], small_files: Mapping[str, bytes]) -> CheckpointManifest:
        """Return the manifest of a checkpoint with these shards and small files.

        Without metrics, it gets those of the checkpoint that it replaces if both have the same weights: files of the
        component `model` with the same names and checksums. Without checksums there is nothing to compare.
        """
        table = {name: FileDigest(one.size, one.sha256, one.xxh3, one.fingerprint) for name, one in shards.items()}
        files = table | {name: small_record(raw) for name, raw in small_files.items()}
        metrics = self.metrics
        if self.replaced is not None and _have_same_weights(files, self.replaced.files):
            metrics = self.replaced.metrics
        return replace(self, metrics=metrics, files=files, replaced=None)

    def to_json(self) -> bytes:
        """Encode the manifest as the bytes of the file, with a checksum of its contents."""
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
                f"'{path}' has format {body.get('format')!r:.50}, but this version reads {MANIFEST_FORMAT}. "
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


def read_manifest(place: str | Folder) -> CheckpointManifest:
    """Read the manifest of a checkpoint, in a directory or a folder; the other files are not checked.

    Raises:
        MissingShardError: It is missing: the checkpoint was never finished, or is another tool's.
        DamagedCheckpointError, UnsafePathError: It is damaged.
    """
    folder = as_folder(place)
    return CheckpointManifest.from_json(folder.read_small(MANIFEST, MAX_INDEX_BYTES), f"{folder.path}/{MANIFEST}")


def _have_same_weights(files: Mapping[str, FileDigest], others: Mapping[str, FileDigest]) -> bool:
    """Return whether two checkpoints have files of the component `model`, known to be the same."""
    names = WeightNames()
    of_each = [
        {name: one.checksum for name, one in table.items() if name == names.single or names.is_shard(name)}
        for table in (files, others)
    ]
    return bool(of_each[0]) and None not in of_each[0].values() and of_each[0] == of_each[1]


def small_record(raw: bytes) -> FileDigest:
    """Build the record of a small file."""
    return FileDigest(size=len(raw), sha256=sha256_of(raw))


def plain_metrics(metric: float | Mapping[str, float], name: str | None) -> dict[str, float]:
    """Return the metrics of a save by name; a single number is the metric that selects the best checkpoint.

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
    except ValueError:  # a number such as 1e999, which JSON does not support
        return None


def _are_metrics(value: object) -> bool:
    return isinstance(value, dict) and all(type(key) is str and type(one) is float for key, one in value.items())


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and value >= 0


# A checkpoint of a run as it is found: its place, its step, and its manifest or the manifest's problem.


CHECKPOINT: Final = re.compile(r"checkpoint-(\d{1,18})")
"""The names that the folder of a checkpoint can have."""

_MAX_STEP: Final = 10**18 - 1
"""The highest step that fits into the name of a directory."""


def folder_at(path: str) -> Folder:
    """Return the folder of the checkpoint at a path or an address; nothing is read yet."""
    return place_to_save(path, "path").folder().entered(WeightNames())


class RunCheckpoint:
    """A possible checkpoint. Its manifest is read once, when it is first needed.

    Args:
        path: The path of its directory, or its address in a store.
        step: The step in its name.
        read: Reads the manifest; None: from its folder.
        save_id: In a store, the number and id in its objects' names; None: the manifest has the number.
        open_folder: Opens its folder; `LocalFolder` if it is known to be in a directory.
    """

    def __init__(
        self,
        path: str,
        step: int,
        read: Callable[[], CheckpointManifest] | None = None,
        *,
        save_id: SaveId | None = None,
        open_folder: Callable[[str], Folder] = folder_at,
    ) -> None:
        self.path = path
        self.step = step
        self.save_id = save_id
        self._open_folder = open_folder
        self._kept: tuple[CheckpointManifest | None, HfshardError | None] | None = None
        self._read = read or (lambda: read_manifest(self.folder()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r}, step={self.step})"

    @classmethod
    def of(
        cls,
        path: str,
        manifest: CheckpointManifest,
        *,
        save_id: SaveId | None = None,
    ) -> RunCheckpoint:
        """Return a checkpoint whose manifest is known."""
        return cls(path, manifest.step, lambda: manifest, save_id=save_id)

    def folder(self) -> Folder:
        """Open its folder; nothing is read yet, or kept of an earlier call."""
        return self._open_folder(self.path)

    def reread(self) -> RunCheckpoint:
        """Return the checkpoint that is there now, by the manifest in its folder."""
        return self._in(self.folder())

    def is_current(self) -> bool:
        """Return whether it is still there, and was not replaced by a run that is saving."""
        folder = self.folder()
        was = self.manifest
        now = self._in(folder).manifest
        if was is None or now is None:
            return was is now and folder.exists()
        return (now.save_number, now.files) == (was.save_number, was.files)

    def _in(self, folder: Folder) -> RunCheckpoint:
        read = partial(read_manifest, folder)
        return RunCheckpoint(self.path, self.step, read, open_folder=self._open_folder).read()

    def read(self) -> RunCheckpoint:
        """Read the manifest now, and return the checkpoint."""
        _ = self._outcome
        return self

    @property
    def manifest(self) -> CheckpointManifest | None:
        """The manifest; None if it cannot be read."""
        return self._outcome[0]

    def require_manifest(self) -> CheckpointManifest:
        """Return the manifest.

        Raises:
            DamagedCheckpointError: It cannot be read.
        """
        if self.manifest is None:
            raise self.problem or RuntimeError(f"'{self.path}' has no manifest.")
        return self.manifest

    @property
    def problem(self) -> HfshardError | None:
        """The reason why the manifest cannot be read; None if it can."""
        return self._outcome[1]

    @property
    def save_number(self) -> int:
        """The number of the save in the run; 0 if it cannot be read."""
        if self.save_id is not None:
            return self.save_id.number
        return 0 if self.manifest is None else self.manifest.save_number

    @property
    def age(self) -> tuple[bool, int, str, int]:
        """A key that sorts checkpoints by when they were saved; those without a known time come last."""
        return not self.is_finished, self.save_number, "" if self.save_id is None else self.save_id.id, self.step

    @property
    def is_unfinished(self) -> bool:
        """True without a manifest, which is written last: a save or copy has not got that far, or was killed."""
        return isinstance(self.problem, MissingShardError)

    @property
    def is_finished(self) -> bool:
        """True if its save was finished, by what the place shows without unnecessary reads."""
        return self.save_id is not None or self.manifest is not None

    @property
    def is_own(self) -> bool:
        """True if a save created it under this name; a user's copy is never removed."""
        return self.is_finished and is_own_name(os.path.basename(self.path), self.step)

    @property
    def _outcome(self) -> tuple[CheckpointManifest | None, HfshardError | None]:
        """The first read's outcome. Two threads may both read, since a lock would be one for all checkpoints.

        (`cached_property` has such a lock in Python 3.11: one slow manifest would stall the reads of all others.)
        """
        if self._kept is None:
            self._kept = self._outcome_of_read()
        return self._kept

    def _outcome_of_read(self) -> tuple[CheckpointManifest | None, HfshardError | None]:
        try:
            manifest = self._read()
            if manifest.step != self.step:
                raise DamagedCheckpointError(
                    f"'{self.path}' is the checkpoint of step {manifest.step}. Rename it to "
                    f"'{os.path.basename(checkpoint_path('', manifest.step))}', or move it elsewhere.",
                    path=self.path,
                    expected=self.step,
                    actual=manifest.step,
                )
        except HfshardError as error:
            return None, error
        return manifest, None


def checked_step(step: object) -> int:
    """Return a step as a plain int.

    Raises:
        InvalidArgumentError: It is not a number from 0, or is too large for the name of a directory.
    """
    try:
        number = operator.index(step) if not isinstance(step, bool) else -1  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 0 <= number <= _MAX_STEP:
        got = repr(step) if number.bit_length() < 1000 else f"one of {number.bit_length()} bits"
        raise InvalidArgumentError(f"step must be an integer from 0 to {_MAX_STEP}, got {got}.")
    return number


def checkpoint_path(root: str, step: int) -> str:
    """Return the path or address of the checkpoint of a step."""
    return os.path.join(root, f"checkpoint-{step:08d}")


def is_own_name(name: str, step: int) -> bool:
    """Return whether a save gives the checkpoint of a step this name."""
    return name == os.path.basename(checkpoint_path("", step))


def newest_first(found: Sequence[RunCheckpoint]) -> list[RunCheckpoint]:
    """Sort checkpoints: the one that was saved last comes first.

    Checkpoints whose manifest cannot be read come before all others: it is unknown when they were saved, and they must
    not be skipped silently.
    """
    return sorted(found, key=lambda one: one.age, reverse=True)


# The best checkpoint by a metric.


MetricMode = Literal["min", "max"]


def best_of(manifests: Sequence[CheckpointManifest], metric: str, mode: MetricMode) -> CheckpointManifest | None:
    """Find the checkpoint with the best value of a metric: the earliest of equal ones, never one without it or NaN.

    Args:
        manifests: The manifests of the complete checkpoints, in any order.
        metric: The name of the metric.
        mode: "min": lower is better; "max": higher is better.
    """
    known = [one for one in manifests if not math.isnan(one.metrics.get(metric, math.nan))]
    sign = 1 if mode == "min" else -1
    return min(known, key=lambda one: (sign * one.metrics[metric], one.save_number), default=None)
