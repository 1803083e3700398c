"""List the checkpoints of a run in the order in which they were saved, and the space that each takes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, Final, Literal

from hfshard._util.text import shorten_list
from hfshard._util.threads import run_in_threads
from hfshard.checkpoint.reports import Problem
from hfshard.constants import SAFETENSORS_SUFFIX
from hfshard.errors import CheckpointNotFoundError, HfshardError
from hfshard.format.file_names import MODEL_BASE, WeightNames
from hfshard.format.index import FileDigest
from hfshard.places.place import place_to_save
from hfshard.training.run.find_checkpoint import as_problems, is_checkpoint, may_be_run, open_run
from hfshard.training.run.manifest import (
    CHECKPOINT,
    MANIFEST,
    CheckpointManifest,
    MetricMode,
    RunCheckpoint,
    best_of,
    folder_at,
    is_own_name,
)
from hfshard.training.state.collect_state import STATE_BASE

_MOST_FOLDERS: Final = 32
"""The most folders that are listed for a message."""

_LISTINGS_AT_ONCE: Final = 16

_SHOWN: Final = 5
"""The most names of runs in a message."""

Check = Callable[[RunCheckpoint], Sequence[Problem]]

Part = Literal["model", "optimizer", "state", "other"]
"""Tensors of the model, of the optimizer, and of other restored state (random numbers, scalers, moving averages), and
all other files: configs, tokenizers, state without tensors."""


@dataclass(frozen=True, slots=True)
class PartSize:
    """The files of one part of a checkpoint."""

    part: Part
    nbytes: int
    files: int


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """One checkpoint of a run, as shown in the list."""

    path: str
    step: int
    problems: tuple[Problem, ...]
    is_verified: bool
    save_number: int | None = None
    saved: datetime | None = None
    parts: tuple[PartSize, ...] = ()
    """The largest first; none if it has no manifest that can be read."""
    metrics: dict[str, float] = field(default_factory=dict)
    is_latest: bool = False
    is_best: bool = False
    is_unfinished: bool = False
    """Whether it has no manifest; its problem says so."""

    @property
    def size(self) -> int | None:
        """The bytes of all its files; None if they are unknown."""
        return sum(part.nbytes for part in self.parts) if self.parts else None

    @property
    def files(self) -> int | None:
        """The number of its files; None if it is unknown."""
        return sum(part.files for part in self.parts) if self.parts else None

    @property
    def is_damaged(self) -> bool:
        """True if it was finished, but has problems."""
        return bool(self.problems) and not self.is_unfinished

    @property
    def states(self) -> tuple[str, ...]:
        """The words that apply to it, of "damaged", "unfinished", "latest" and "best"."""
        words = {
            "damaged": self.is_damaged,
            "unfinished": self.is_unfinished,
            "latest": self.is_latest,
            "best": self.is_best,
        }
        return tuple(word for word, is_so in words.items() if is_so)

    @property
    def saved_text(self) -> str:
        """The time of the save in UTC, to the minute; "" if it is unknown."""
        return "" if self.saved is None else f"{self.saved:%Y-%m-%d %H:%M}"

    def as_json(self) -> dict[str, Any]:
        """Return everything but the parts, for `--format json`."""
        values = asdict(self)
        del values["parts"]
        return {
            **values,
            "saved": None if self.saved is None else self.saved.isoformat(),
            "size": self.size,
            "metrics": {name: value if abs(value) < math.inf else str(value) for name, value in self.metrics.items()},
            "files": self.files,
            "is_damaged": self.is_damaged,
        }


def metrics_text(metrics: Mapping[str, float]) -> str:
    """Describe metrics by name: "accuracy 0.5, loss 0.125"."""
    return ", ".join(f"{name} {value:.6g}" for name, value in sorted(metrics.items()))


def checkpoints_of(root: str) -> list[RunCheckpoint]:
    """Find the checkpoints of a run in the order in which they were saved; ones without that information come last."""
    if is_checkpoint(folder_at(root)):
        raise CheckpointNotFoundError(
            f"'{root}' is one checkpoint, not a run. To check it, run: hfshard verify {root}", path=root
        )
    found = open_run(root).checkpoints()[::-1] if may_be_run(root) else []
    if not found:
        runs = _runs_below(root)
        hint = "Check the path."
        if runs:
            several = f"Its folders {shorten_list(runs, _SHOWN)} contain runs."
            hint = several if len(runs) > 1 else f"Its folder {runs[0]} contains a run."
            hint += f" To list its checkpoints, run: hfshard checkpoints {root.rstrip('/')}/{runs[0]}"
        raise CheckpointNotFoundError(f"There is no training checkpoint in '{root}'. {hint}", path=root)
    return found


def _runs_below(root: str) -> list[str]:
    """List the folders that are runs; only the first `_MOST_FOLDERS` are checked, each by one listing."""
    folders = _folders_in(root)[:_MOST_FOLDERS]
    listed = run_in_threads(lambda name, _: _folders_in(f"{root.rstrip('/')}/{name}"), folders, _LISTINGS_AT_ONCE)
    return [name for name, below in zip(folders, listed, strict=True) if any(map(_is_of_run, below))]


def _is_of_run(folder: str) -> bool:
    match = CHECKPOINT.fullmatch(folder)
    return match is not None and is_own_name(folder, int(match[1]))


def _folders_in(place: str) -> list[str]:
    """List the folders directly in a place."""
    return place_to_save(place, "path").folder().folders()


def list_checkpoints(
    found: Sequence[RunCheckpoint],
    check: Check | None = None,
    *,
    best: str | None = None,
    metric_mode: MetricMode = "min",
) -> list[ListedCheckpoint]:
    """Describe checkpoints for the list.

    Args:
        found: The result of `checkpoints_of`.
        check: Finds the problems of a checkpoint whose manifest can be read; None: no check.
        best: The metric that selects the best checkpoint.
        metric_mode: Whether its lowest or highest value is the best.
    """
    problems = {one.path: _problems_of(one, check) for one in found}
    whole = [one.manifest for one in found if one.manifest is not None and not problems[one.path]]
    latest = max((one.save_number for one in whole), default=None)
    best_one = best_of(whole, best, metric_mode) if best is not None else None
    return [_list_one(one, problems[one.path], latest, best_one, is_verified=check is not None) for one in found]


def _problems_of(found: RunCheckpoint, check: Check | None) -> tuple[Problem, ...]:
    if found.manifest is None:
        errors: list[HfshardError] = [] if found.problem is None else [found.problem]
        return tuple(as_problems(errors, found.path))
    return () if check is None else tuple(check(found))


def _list_one(
    found: RunCheckpoint,
    problems: tuple[Problem, ...],
    latest: int | None,
    best: CheckpointManifest | None,
    *,
    is_verified: bool,
) -> ListedCheckpoint:
    manifest = found.manifest
    if manifest is None:
        return ListedCheckpoint(found.path, found.step, problems, is_verified, is_unfinished=found.is_unfinished)
    manifest_file = found.folder().find(MANIFEST)
    return ListedCheckpoint(
        found.path,
        found.step,
        problems,
        is_verified,
        save_number=manifest.save_number,
        saved=None if manifest_file is None else manifest_file.modified,
        parts=parts_of(manifest, 0 if manifest_file is None else manifest_file.size),
        metrics=manifest.metrics,
        is_latest=manifest.save_number == latest and not problems,
        is_best=manifest is best,
    )


# Space that a run's checkpoints take: the size of each part, and what is shared with earlier checkpoints.


_NAMES: Final[dict[Part, WeightNames]] = {
    "model": WeightNames(base=MODEL_BASE),
    "optimizer": WeightNames(base="optimizer"),
    "state": WeightNames(base=STATE_BASE),
}


def unchanged_bytes(found: Sequence[RunCheckpoint]) -> dict[str, int]:
    """Measure what each checkpoint of a run, in the order of saves, shares with earlier ones, if it has a manifest.

    Returns:
        Path -> the bytes of weight files that an earlier checkpoint also has: in a directory, the same file on disk (a
        hard link), which takes no space of its own; in a store, one with the same checksums, which was copied there.
    """
    unchanged = {}
    seen: set[object] = set()
    for one in found:
        if one.manifest is None:
            continue
        files = {name: record for name, record in one.manifest.files.items() if name.endswith(SAFETENSORS_SUFFIX)}
        identities = {name: _identity_of(one.path, name, record) for name, record in files.items()}
        unchanged[one.path] = sum(files[name].size or 0 for name, identity in identities.items() if identity in seen)
        seen |= {identity for identity in identities.values() if identity is not None}
    return unchanged


def parts_of(manifest: CheckpointManifest, manifest_bytes: int) -> tuple[PartSize, ...]:
    """Measure the parts of one checkpoint, the largest first; the manifest's own file is of the part "other"."""
    sizes: dict[Part, list[int]] = {"other": [manifest_bytes]}
    for name, record in manifest.files.items():
        sizes.setdefault(part_of(name), []).append(record.size or 0)
    parts = [PartSize(part, sum(files), len(files)) for part, files in sizes.items()]
    return tuple(sorted(parts, key=lambda part: -part.nbytes))


def part_of(name: str) -> Part:
    """Find the part of a checkpoint that a file belongs to, by its name."""
    for part, names in _NAMES.items():
        if name in (names.single, names.index) or names.is_shard(name):
            return part
    return "other"


def _identity_of(path: str, name: str, record: FileDigest) -> object:
    """Return a key that is equal for files that are the same, or None if it cannot be determined."""
    if not place_to_save(path, "path").is_read_from_disk:
        return (record.size, record.sha256, record.xxh3, record.fingerprint) if record.is_verifiable else None
    try:
        status = os.stat(os.path.join(path, name))
    except OSError:  # missing: the list says that it is damaged
        return None
    return (status.st_dev, status.st_ino)
