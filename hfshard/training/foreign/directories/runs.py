"""Directories that hold several checkpoints of another program: one of them has to be named."""

from __future__ import annotations

import os
import re
from typing import Any, Final, Never

from hfshard.errors import CheckpointNotFoundError
from hfshard.training.foreign.checkpoint import ForeignRequest
from hfshard.training.foreign.directories.accelerate import is_accelerate_directory
from hfshard.training.foreign.directories.files import names_in
from hfshard.training.foreign.directories.trainer import is_trainer_directory
from hfshard.training.run.manifest import MANIFEST

_NUMBER: Final = re.compile(r"(\d+)\Z")


def is_run_directory(place: object) -> bool:
    """Whether a place is a directory of such directories, and of no checkpoint of ours."""
    return len(_checkpoints_below(place)) > 0


def refuse_run_directory(path: str, request: ForeignRequest) -> Never:
    """Say which checkpoint may be meant.

    Raises:
        CheckpointNotFoundError: Always.
    """
    raise CheckpointNotFoundError(
        f"'{path}' is not a checkpoint, but holds checkpoints of another program: give one of them, such as "
        f"'{_checkpoints_below(path)[-1]}'.",
        path=path,
    )


def _checkpoints_below(place: Any) -> list[str]:
    """The checkpoints of Trainer or Accelerate in a directory, those with the highest numbers last."""
    below = [os.path.join(place, name) for name in names_in(place)]
    if any(os.path.lexists(os.path.join(path, MANIFEST)) for path in below):
        return []
    found = [path for path in below if is_trainer_directory(path) or is_accelerate_directory(path)]
    return sorted(found, key=lambda path: (int(match.group()) if (match := _NUMBER.search(path)) else -1, path))
