"""A checkpoint of a run as it is found: where it is, its step, and its manifest or what is wrong with that."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from hfshard.errors import DamagedCheckpointError, HfshardError, MissingShardError
from hfshard.training.run.manifest import CheckpointManifest

CHECKPOINT: Final = re.compile(r"checkpoint-(\d{1,18})")
"""What the folder of a checkpoint may be called."""


@dataclass(frozen=True, slots=True)
class RunCheckpoint:
    """What looks like a checkpoint."""

    path: str
    """Of its directory, or its address in a store."""
    step: int
    manifest: CheckpointManifest | None
    problem: HfshardError | None = None
    """Why its manifest can't be read; None where it can."""

    @property
    def is_unfinished(self) -> bool:
        """Whether it has no manifest, which comes last: a save or a copy has not got that far, or has been killed."""
        return isinstance(self.problem, MissingShardError)

    @property
    def is_own(self) -> bool:
        """Whether a save has made it under this name; a copy that a user has made is never removed."""
        return self.manifest is not None and is_own_name(os.path.basename(self.path), self.step)


def checkpoint_path(root: str, step: int) -> str:
    """The path or address of the checkpoint of a step."""
    return os.path.join(root, f"checkpoint-{step:08d}")


def is_own_name(name: str, step: int) -> bool:
    """Whether a save gives the checkpoint of a step this name."""
    return name == os.path.basename(checkpoint_path("", step))


def read_run_checkpoint(path: str, step: int, read: Callable[[], CheckpointManifest]) -> RunCheckpoint:
    """Read the manifest of one checkpoint, which must be of the step in its name.

    Args:
        path: Of the checkpoint.
        step: In its name.
        read: Reads the manifest.
    """
    try:
        manifest = read()
        if manifest.step != step:
            raise DamagedCheckpointError(
                f"'{path}' holds the checkpoint of step {manifest.step}. Rename it to "
                f"'{os.path.basename(checkpoint_path('', manifest.step))}', or move it elsewhere.",
                path=path,
                expected=step,
                actual=manifest.step,
            )
    except HfshardError as error:
        return RunCheckpoint(path, step, None, error)
    return RunCheckpoint(path, step, manifest)


def newest_first(found: Sequence[RunCheckpoint]) -> list[RunCheckpoint]:
    """Sort checkpoints: the one that was saved last comes first.

    Checkpoints whose manifest can't be read come before all others: nothing says when they were saved, and they must
    not be passed over silently.
    """
    return sorted(found, key=_age, reverse=True)


def _age(one: RunCheckpoint) -> tuple[bool, int, int]:
    return one.manifest is None, one.manifest.save_number if one.manifest else 0, one.step
