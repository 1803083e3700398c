"""The checkpoints of a run in the order in which they were saved: the terminal, JSON and pages show this list."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from hfshard._util.addresses import is_address
from hfshard._util.text import list_some
from hfshard._util.threads import in_threads
from hfshard.checkpoint.verifier import Problem
from hfshard.errors import CheckpointNotFoundError, HfshardError
from hfshard.stores.open_store import open_store
from hfshard.training.run.find_checkpoint import files_at, run_place
from hfshard.training.run.manifest import (
    CHECKPOINT,
    MANIFEST,
    CheckpointManifest,
    MetricMode,
    RunCheckpoint,
    best_of,
    is_own_name,
)
from hfshard.training.run.reports import as_problems, is_checkpoint

_MOST_FOLDERS: Final = 32
"""Folders that are looked into for a message."""

_LISTINGS_AT_ONCE: Final = 16

_SHOWN: Final = 5
"""Names of runs in a message."""

Check = Callable[[RunCheckpoint], Sequence[Problem]]


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """One checkpoint of a run, as the list shows it."""

    path: str
    step: int
    problems: tuple[Problem, ...]
    is_verified: bool
    save_number: int | None = None
    saved: datetime | None = None
    size: int | None = None
    """Bytes of all its files."""
    metrics: dict[str, float] = field(default_factory=dict)
    files: int | None = None
    is_latest: bool = False
    is_best: bool = False
    is_unfinished: bool = False
    """Whether it has no manifest; its problem says so."""

    @property
    def is_damaged(self) -> bool:
        """Whether it was finished, and something is wrong with it."""
        return bool(self.problems) and not self.is_unfinished

    @property
    def state(self) -> str:
        """What there is to say about it, in words."""
        if self.is_unfinished:
            return "UNFINISHED"
        words = ["DAMAGED"] if self.problems else ["whole"] if self.is_verified else []
        words += ["latest"] if self.is_latest else []
        return ", ".join(words + (["best"] if self.is_best else []))


def checkpoints_of(root: str) -> list[RunCheckpoint]:
    """Find the checkpoints of a run in the order in which they were saved; those that do not say come last.

    Raises:
        CheckpointNotFoundError: There is none, or it is one checkpoint.
    """
    if is_checkpoint(root):
        raise CheckpointNotFoundError(
            f"'{root}' is one checkpoint, not a run. To check it, run: hfshard verify {root}", path=root
        )
    # A store is listed as deep as it is only if it has folders of a run.
    may_be_run = not is_address(root) or any(map(CHECKPOINT.fullmatch, _folders_in(root)))
    found = run_place(root).checkpoints()[::-1] if may_be_run else []
    if not found:
        runs = _runs_below(root)
        hint = "Check the path."
        if runs:
            hint = (
                f"Runs are in its folders {list_some(runs, _SHOWN)}"
                if len(runs) > 1
                else f"A run is in its folder {runs[0]}"
            )
            hint += f", as shown by: hfshard checkpoints {root.rstrip('/')}/{runs[0]}"
        raise CheckpointNotFoundError(f"There is no training checkpoint in '{root}'. {hint}", path=root)
    return found


def _runs_below(root: str) -> list[str]:
    """Name the folders that are runs; no more than some are looked into, each by one listing."""
    folders = _folders_in(root)[:_MOST_FOLDERS]
    listed = in_threads(lambda name, _: _folders_in(f"{root.rstrip('/')}/{name}"), folders, _LISTINGS_AT_ONCE)
    return [name for name, below in zip(folders, listed, strict=True) if any(map(_is_of_run, below))]


def _is_of_run(folder: str) -> bool:
    match = CHECKPOINT.fullmatch(folder)
    return match is not None and is_own_name(folder, int(match[1]))


def _folders_in(place: str) -> list[str]:
    """Name the folders directly in a place."""
    if is_address(place):
        return open_store(place).folders()
    try:
        with os.scandir(place) as entries:
            return sorted(one.name for one in entries if one.is_dir())
    except OSError:
        return []  # it can't be read, which those who read it say


def list_checkpoints(
    found: Sequence[RunCheckpoint],
    check: Check | None = None,
    *,
    best: str | None = None,
    metric_mode: MetricMode = "min",
) -> list[ListedCheckpoint]:
    """List checkpoints with what is known of each.

    Args:
        found: What `checkpoints_of` returned.
        check: Tells what is wrong with one whose manifest can be read; None: that is not looked for.
        best: The metric by which one is the best.
        metric_mode: Which value of it.
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
    files = files_at(found.path)
    return ListedCheckpoint(
        found.path,
        found.step,
        problems,
        is_verified,
        save_number=manifest.save_number,
        saved=files.saved_at(),
        size=files.size(MANIFEST) + sum(digest.size or 0 for digest in manifest.files.values()),
        metrics=manifest.metrics,
        files=len(manifest.files) + 1,
        is_latest=manifest.save_number == latest and not problems,
        is_best=manifest is best,
    )
