"""Reads the `checkpoint-500/` that transformers' Trainer has saved, without transformers."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from typing import Any, Final

from hfshard.errors import DamagedCheckpointError, remedy
from hfshard.training.foreign.checkpoint import NO_STEP, ForeignCheckpoint, ForeignRequest
from hfshard.training.foreign.directories.files import ForeignDirectory, names_in
from hfshard.training.foreign.directories.rng_states import TRAINER_KEYS, states_of_rank

_STATE: Final = "trainer_state.json"
"""Trainer's own progress."""

_PICKLES: Final = {"optimizer": "optimizer.pt", "scheduler": "scheduler.pt", "scaler": "scaler.pt"}
"""Part -> its file. training_args.bin is not read: it is a pickle of transformers' own classes."""

_RNG: Final = re.compile(r"rng_state(?:_(\d+))?\.pth")


def is_trainer_directory(place: object) -> bool:
    """Whether a place is a directory in which Trainer alone has saved a checkpoint, or a part of one."""
    return not names_in(place).isdisjoint({_STATE, "optimizer.pt", "scheduler.pt"})


def read_trainer_directory(path: str, request: ForeignRequest) -> ForeignCheckpoint:
    """Read a checkpoint that Trainer has saved.

    Args:
        path: Its directory.
        request: What is wanted of it.

    Raises:
        DamagedCheckpointError: A file is damaged.
        UnsafePickleError: A file can't be read without running code.
        StateDictMismatchError: It was saved by FSDP or DeepSpeed, in parts.
    """
    directory = ForeignDirectory(path, request)
    parts = {"model": directory.weights(), **{part: directory.pickle(name) for part, name in _PICKLES.items()}}
    progress = directory.json(_STATE) or {}
    states = states_of_rank(directory, _RNG, TRAINER_KEYS)
    step = _checked(progress, "global_step", int, path)
    return ForeignCheckpoint(
        path=path,
        files=directory.files,
        files_of_rank=directory.files_of_rank,
        has_order=directory.has_order,
        step=step,
        components=directory.components(parts),
        companions=directory.companions({_STATE}),
        extra=progress,
        rng=states.rng,
        epochs=_checked(progress, "epoch", float, path),
        lacking=states.lacking if step is not None else (NO_STEP, *states.lacking),
        differences=tuple(directory.differences),
    )


def _checked(progress: Mapping[str, Any], key: str, kind: type, path: str) -> Any:
    """A number from 0 in Trainer's own progress; None where it has none.

    Raises:
        DamagedCheckpointError: It is something else.
    """
    value = progress.get(key)
    if value is None:
        return None
    is_number = type(value) in (int, kind) and math.isfinite(value) and value >= 0
    if not is_number:
        file = os.path.join(path, _STATE)
        raise DamagedCheckpointError(
            f"'{file}' is damaged: its {key} is {value!r:.50}, which is no number from 0. {remedy(file)}", path=file
        )
    return kind(value)
