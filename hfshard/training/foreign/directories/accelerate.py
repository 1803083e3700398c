"""Reads the directories that Accelerate's `save_state` writes, without Accelerate."""

from __future__ import annotations

import re
from typing import Any, Final

from hfshard.training.foreign.checkpoint import NO_STEP, ForeignCheckpoint, ForeignRequest
from hfshard.training.foreign.directories.files import ForeignDirectory, names_in
from hfshard.training.foreign.directories.rng_states import ACCELERATE_KEYS, states_of_rank

_WEIGHTS: Final = re.compile(r"(?:pytorch_)?(model(?:_\d+)?)\.(?:safetensors|bin)")
_PICKLES: Final = re.compile(r"((?:optimizer|scheduler)(?:_\d+)?)\.bin|(scaler)\.pt|(custom_checkpoint_\d+)\.pkl")
_LOADERS: Final = re.compile(r"(dl_state_dict(?:_\d+)?)\.bin")
_SAMPLERS: Final = re.compile(r"sampler(?:_\d+)?\.bin")
_RNG: Final = re.compile(r"random_states_(\d+)\.pkl")
_MARKS: Final = re.compile(r"random_states_\d+\.pkl|(?:optimizer|scheduler)(?:_\d+)?\.bin")

_IN_EXTRA: Final = ", but for .extra['dl_state_dict'], which the loaders that Accelerate has prepared take"


def is_accelerate_directory(place: object) -> bool:
    """Whether a place is a directory in which `Accelerator.save_state` has saved, or a part of one."""
    return any(_MARKS.fullmatch(name) for name in names_in(place))


def read_accelerate_directory(path: str, request: ForeignRequest) -> ForeignCheckpoint:
    """Read what `Accelerator.save_state` has saved.

    Parts are named after their files: "model", "model_1", "optimizer", "custom_checkpoint_0". The state of a stateful
    loader, "dl_state_dict", is in `extra`: only a loader that Accelerate has prepared takes it, which no TrainingState
    does.

    Args:
        path: The directory.
        request: What is wanted of it.

    Raises:
        DamagedCheckpointError: A file is damaged.
        UnsafePickleError: A file can't be read without running code.
        StateDictMismatchError: It was saved by FSDP or DeepSpeed, in parts.
    """
    directory = ForeignDirectory(path, request)
    parts: dict[str, Any] = {}
    loaders: dict[str, Any] = {}
    for name in sorted(directory.names):
        if match := _WEIGHTS.fullmatch(name):
            parts[match.group(1)] = directory.weights(match.group(1))
        elif match := _PICKLES.fullmatch(name):
            parts[next(filter(None, match.groups()))] = directory.pickle(name)
        elif match := _LOADERS.fullmatch(name):
            loaders[match.group(1)] = directory.pickle(name)
    lacking = [NO_STEP, "the position in the data" + (_IN_EXTRA if loaders else "")]
    lacking += [
        f"the order of shuffled data, as '{name}' is a pickle of Accelerate's own classes, which is not read"
        for name in sorted(directory.names)
        if _SAMPLERS.fullmatch(name)
    ]
    states = states_of_rank(directory, _RNG, ACCELERATE_KEYS)
    if "accelerator" in request.kinds and "step" in states.others:
        parts["accelerator"] = {"step": states.others["step"]}  # how many batches it has counted, see `prepared_state`
    return ForeignCheckpoint(
        path=path,
        files=directory.files,
        files_of_rank=directory.files_of_rank,
        has_order=directory.has_order,
        step=None,
        components=directory.components(parts),
        extra=loaders or None,
        rng=states.rng,
        lacking=(*lacking, *states.lacking),
        differences=tuple(directory.differences),
    )
