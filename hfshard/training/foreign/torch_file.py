"""Reads the general checkpoint of tutorials: a dict of state dicts, epoch and loss, in one file of torch.save."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hfshard.errors import DamagedCheckpointError
from hfshard.format.parts_of_ranks import refuse_partitioned_file
from hfshard.training.foreign.checkpoint import NO_RNG, NO_STEP, ForeignCheckpoint, ForeignRequest
from hfshard.training.foreign.pickles.plain_files import read_plain_file
from hfshard.training.foreign.torch_keys import is_generators, sort_entries, step_of
from hfshard.training.parts.nested_types import NotStored


def is_torch_file(path: object) -> bool:
    """Whether a place is a file, which only other programs save runs in."""
    return isinstance(path, str) and os.path.isfile(path)


def read_torch_file(path: str, request: ForeignRequest) -> ForeignCheckpoint:
    """Read a file of torch.save, and find the parts of a run in it.

    Args:
        path: The file.
        request: What is wanted.

    Raises:
        UnsafePickleError: It asks for what runs code; or, with strict, for more than plain data.
        DamagedCheckpointError: It is not whole, or no dict of states.
        StateDictMismatchError: A part may be one of several entries.
        CheckpointNotFoundError: Its weights are in other files, in parts.
    """
    file = read_plain_file(path, os.path.dirname(path) or os.curdir, strict=request.strict, verify=request.verify)
    if not isinstance(file.value, Mapping):
        raise DamagedCheckpointError(
            f"'{path}' holds a {type(file.value).__name__}, not a dict of states by name. Load it with torch, and save "
            "it as {'model': ..., 'optimizer': ..., 'epoch': ...}.",
            path=path,
        )
    refuse_partitioned_file(file.value, path)
    found = sort_entries(file.value, request.kinds, request.keys, path)
    components = {}
    for name, (at, state) in found.components.items():
        is_module = request.kinds.get(name, "module" if name == "model" else None) == "module"
        components[name] = state if is_module else file.copied(state, at)
    extra = {key: file.copied(one, key) for key, one in found.extra.items() if not isinstance(one, NotStored)}
    step, key = step_of(extra)
    lacking = [NO_RNG]
    if held := [f"'{name}'" for name in extra if is_generators(name)]:
        lacking = [f"{NO_RNG[:-1]}; the file holds {', '.join(held)}, left in restored.extra and not set)"]
    if key in ("", "epoch"):
        lacking.append(f"the number of steps (that of the epoch, {step}, is taken)" if key else NO_STEP)
    return ForeignCheckpoint(
        path=path,
        files={path: file.identity},
        step=step,
        components=components,
        extra=extra,
        lacking=tuple(lacking),
        differences=file.left_out(),
    )
