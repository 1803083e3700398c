"""List the checkpoints of a run in the order in which they were saved, and the space that each takes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Literal

from hfshard._util.addresses import is_store_address
from hfshard._util.text import shorten_list
from hfshard._util.threads import run_in_threads
from hfshard.checkpoint.verifier import Problem
from hfshard.constants import SAFETENSORS_SUFFIX
from hfshard.errors import CheckpointNotFoundError, HfshardError
from hfshard.format.file_names import MODEL_BASE, WeightNames
from hfshard.format.index import FileDigest
from hfshard.stores.open_store import open_store
from hfshard.training.run.find_checkpoint import folder_at, open_run
from hfshard.training.run.manifest import (
    CHECKPOINT,
    MANIFEST,
    CheckpointManifest,
    MetricMode,
    RunCheckpoint,
    best_of,
    is_own_name,
)
from hfshard.training.run.reports import as_problems, is_checkpoint, may_be_run
from hfshard.training.state.collect_state import STATE_BASE

_MOST_FOLDERS: Final = 32
"""The most folders that are listed for a message."""

_LISTINGS_AT_ONCE: Final = 16

_SHOWN: Final = 5
"""The most names of runs in a message."""

Check = Callable[[RunCheckpoint], Sequence[Problem]]


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """One checkpoint of a run, as shown in the list."""

    path: str
    step: int
    problems: tuple[Problem, ...]
    is_verified: bool
    save_number: int | None = None
    saved: datetime | None = None
    size: int | None = None
    """The bytes of all its files."""
    metrics: dict[str, float] = field(default_factory=dict)
    files: int | None = None
    is_latest: bool = False
    is_best: bool = False
    is_unfinished: bool = False
    """Whether it has no manifest; its problem says so."""

    @property
    def is_damaged(self) -> bool:
        """True if it was finished, but has problems."""
        return bool(self.problems) and not self.is_unfinished

    @property
    def state(self) -> str:
        """The text that describes its state."""
        if self.is_unfinished:
            return "UNFINISHED"
        words = ["DAMAGED"] if self.problems else ["intact"] if self.is_verified else []
        words += ["latest"] if self.is_latest else []
        return ", ".join(words + (["best"] if self.is_best else []))


def checkpoints_of(root: str) -> list[RunCheckpoint]:
    """Find the checkpoints of a run in the order in which they were saved; ones without that information come last.

    Raises:
        CheckpointNotFoundError: There are no checkpoints, or `root` is a single checkpoint.
    """
    if is_checkpoint(root):
        raise CheckpointNotFoundError(
            f"'{root}' is one checkpoint, not a run. To check it, run: hfshard verify {root}", path=root
        )
    run = open_run(root)
    found = run.checkpoints()[::-1] if may_be_run(run) else []
    if not found:
        runs = _runs_below(root)
        hint = "Check the path."
        if runs:
            hint = (
                f"Its folders {shorten_list(runs, _SHOWN)} contain runs."
                if len(runs) > 1
                else f"Its folder {runs[0]} contains a run."
            )
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
    if is_store_address(place):
        return open_store(place).folders()
    try:
        with os.scandir(place) as entries:
            return sorted(one.name for one in entries if one.is_dir())
    except OSError:
        return []  # it cannot be read, which the code that reads it reports


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
        size=(0 if manifest_file is None else manifest_file.size)
        + sum(digest.size or 0 for digest in manifest.files.values()),
        metrics=manifest.metrics,
        files=len(manifest.files) + 1,
        is_latest=manifest.save_number == latest and not problems,
        is_best=manifest is best,
    )


# Space that a run's checkpoints take: the size of each part, and what is shared with earlier checkpoints.


Part = Literal["model", "optimizer", "state", "other"]
"""Tensors of the model, of the optimizer, and of other restored state (random numbers, scalers, moving averages), and
all other files: configs, tokenizers, state without tensors."""

_NAMES: Final[dict[Part, WeightNames]] = {
    "model": WeightNames(base=MODEL_BASE),
    "optimizer": WeightNames(base="optimizer"),
    "state": WeightNames(base=STATE_BASE),
}


@dataclass(frozen=True, slots=True)
class CheckpointSpace:
    """The bytes of one checkpoint of a run."""

    parts: dict[Part, int]
    """Bytes of the parts that it has, largest first."""
    unchanged: int
    """Bytes of weight files that an earlier checkpoint also has: in a directory, the same file on disk (a hard link),
    which takes no space of its own; in a store, one with the same checksums, which was copied there."""

    @property
    def total(self) -> int:
        """The bytes of all parts."""
        return sum(self.parts.values())

    @property
    def written(self) -> int:
        """The bytes that were written, or sent, for this checkpoint."""
        return self.total - self.unchanged


def spaces_of(found: Sequence[RunCheckpoint]) -> dict[str, CheckpointSpace]:
    """Measure the checkpoints of a run.

    Args:
        found: In the order in which they were saved; ones without a manifest are left out.

    Returns:
        Path -> its bytes.
    """
    spaces = {}
    seen: set[object] = set()
    for one in found:
        if one.manifest is None:
            continue
        files = {name: record for name, record in one.manifest.files.items() if name.endswith(SAFETENSORS_SUFFIX)}
        identities = {name: _identity_of(one.path, name, record) for name, record in files.items()}
        unchanged = sum(files[name].size or 0 for name, identity in identities.items() if identity in seen)
        seen |= {identity for identity in identities.values() if identity is not None}
        spaces[one.path] = CheckpointSpace(parts_of(one.path, one.manifest), unchanged)
    return spaces


def parts_of(path: str, manifest: CheckpointManifest) -> dict[Part, int]:
    """Measure the parts of one checkpoint, including the manifest file."""
    sizes: dict[Part, int] = {"other": folder_at(path).size(MANIFEST)}
    for name, record in manifest.files.items():
        part = part_of(name)
        sizes[part] = sizes.get(part, 0) + (record.size or 0)
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def counts_of(manifest: CheckpointManifest) -> Counter[Part]:
    """Count the files of each part of one checkpoint, including the manifest."""
    return Counter(part_of(name) for name in (*manifest.files, MANIFEST))


def part_of(name: str) -> Part:
    """Find the part of a checkpoint that a file belongs to, by its name."""
    for part, names in _NAMES.items():
        if name in (names.single, names.index) or names.is_shard(name):
            return part
    return "other"


def _identity_of(path: str, name: str, record: FileDigest) -> object:
    """Return a key that is equal for files that are the same, or None if it cannot be determined."""
    if is_store_address(path):
        return (record.size, record.sha256, record.xxh3, record.fingerprint) if record.is_verifiable else None
    try:
        status = os.stat(os.path.join(path, name))
    except OSError:  # missing: the list says that it is damaged
        return None
    return (status.st_dev, status.st_ino)
