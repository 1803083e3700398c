"""Which checkpoints of other programs can be read, and by what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from hfshard.training.foreign.checkpoint import ForeignCheckpoint, ForeignRequest
from hfshard.training.foreign.directories.accelerate import is_accelerate_directory, read_accelerate_directory
from hfshard.training.foreign.directories.runs import is_run_directory, refuse_run_directory
from hfshard.training.foreign.directories.trainer import is_trainer_directory, read_trainer_directory
from hfshard.training.foreign.torch_file import is_torch_file, read_torch_file

Reader = Callable[[str, ForeignRequest], ForeignCheckpoint]

_READERS: Final[tuple[tuple[Callable[[Any], bool], Reader], ...]] = (
    (is_torch_file, read_torch_file),
    (is_run_directory, refuse_run_directory),
    (is_trainer_directory, read_trainer_directory),
    (is_accelerate_directory, read_accelerate_directory),
)
"""What tells whether a place is of a kind, and reads it. The first one that says yes reads."""


def reader_of(place: object) -> Reader | None:
    """Find what reads another program's checkpoint; None where the place is none, or one of ours.

    Args:
        place: A path, or anything else that `CheckpointManager.restore` takes as a step.
    """
    return next((reader for is_of_kind, reader in _READERS if is_of_kind(place)), None)
