"""Conversion of another program's checkpoint without the model: what is by position gets names, or is rejected."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from hfshard._util.arguments import wraps_os_errors
from hfshard.constants import CONFIG_NAME, DEFAULT_MAX_SHARD_SIZE, GENERATION_CONFIG_NAME
from hfshard.errors import CheckpointNotFoundError, HfshardError, InvalidArgumentError
from hfshard.foreign.find_foreign import open_foreign_run
from hfshard.format.file_names import MODEL_BASE
from hfshard.format.index import Checksum
from hfshard.pickles.plain_values import NotStored
from hfshard.places.place import place_to_save
from hfshard.saving.save_request import request_from_state_dict
from hfshard.tensors.parameter_names import strip_compiled, without_common_wrappers
from hfshard.tensors.tied import find_shared_tensors
from hfshard.training.interop.foreign_checkpoint import ForeignCheckpoint, ForeignRequest
from hfshard.training.interop.foreign_optimizer import (
    are_sorted_by_name,
    check_positions,
    names_by_order,
    stated_names,
    unknown_owners,
    with_names,
)
from hfshard.training.interop.foreign_readers import (
    is_optimizer_state,
    is_partitioned_directory,
    is_state_dict,
    reader_of,
)
from hfshard.training.interop.named_run import is_unread
from hfshard.training.run.find_checkpoint import open_run
from hfshard.training.run.manifest import checked_step, checkpoint_path, folder_at
from hfshard.training.run.run_writer import RunWriter, check_names
from hfshard.training.state.collect_state import Components, RankState, SavePayload, collect, rank_prefix, save_options
from hfshard.training.state.nested import encode
from hfshard.training.state.optimizer import BY_OPTIONS, encode_by_name

_OF_MODEL: Final = (CONFIG_NAME, GENERATION_CONFIG_NAME)
"""Companions that belong to the model, as in its own saves."""

_NO_POSITION: Final = "the position in the data"
_SCHEDULER: Final = re.compile(r"scheduler(?:_\d+)?")


@dataclass(frozen=True, slots=True)
class ConvertedRun:
    """A checkpoint that was created from another program's."""

    path: str
    """Its directory."""
    step: int
    parts: tuple[str, ...]
    """The names of its parts."""
    lacking: tuple[str, ...]
    """Descriptions of what the other program's checkpoint lacks, as in `RestoredStep`."""
    differences: tuple[str, ...]
    """Descriptions of what was left out. Always empty with strict."""


def is_foreign_run(place: str) -> bool:
    """Return whether a place has an optimizer state that another program saved; False if it cannot be read.

    Example:
        if is_foreign_run("checkpoint.pth.tar"):
            convert_foreign("checkpoint.pth.tar", "run")
    """
    reader = reader_of(place)
    if reader is None:
        return False
    is_in_parts = is_partitioned_directory(place)
    try:
        if is_in_parts:
            return open_foreign_run(place) is not None
        found = reader(place, ForeignRequest(strict=False, verify="structure"))
    except HfshardError:  # the next reader reports what is wrong; weights alone would hide that of an optimizer
        return is_in_parts
    return any(is_optimizer_state(value) for value in found.components.values())


@wraps_os_errors("root")
def convert_foreign(
    path: str,
    root: str | os.PathLike[str],
    *,
    keys: Mapping[str, str] | None = None,
    in_order: Callable[[ForeignCheckpoint], ForeignCheckpoint] = lambda foreign: foreign,
    step: int | None = None,
    strict: bool = True,
    max_shard_size: int | str = DEFAULT_MAX_SHARD_SIZE,
    checksum: Checksum = "xxh3",
    progress: bool | None = None,
) -> ConvertedRun:
    """Create a checkpoint of a run from what another program has saved.

        convert_foreign("checkpoint.pth.tar", "run")
        CheckpointManager("run").restore_latest(state)

    Args:
        path: The file or directory.
        root: The run's directory, created if it is missing.
        keys, strict: As in `CheckpointManager.restore`.
        in_order: Puts what was read into the order of its model, as `trainer_names.reorder_by_model` does.
        step: The checkpoint's step; None: the step that the file has, else its epoch, else 0.
        max_shard_size, checksum, progress: As in `CheckpointManager`.

    Raises:
        CheckpointNotFoundError: The path is not another program's checkpoint.
        InvalidArgumentError: It has no weights; it is not known which parameter a state of its optimizer belongs to; or
            the run has a checkpoint of this step. Nothing was written.
        UnsafePickleError, DamagedCheckpointError: It cannot be read.
    """
    root = place_to_save(root, "root").address
    reader = reader_of(path)
    if reader is None:
        raise CheckpointNotFoundError(f"'{path}' is not another program's checkpoint. Check the path.", path=path)
    read = reader(path, ForeignRequest(keys=keys or {}, strict=strict))
    _reject_unknown_names(read)
    foreign = in_order(read)
    number = checked_step(foreign.step or 0 if step is None else step)
    if not any(words.startswith(_NO_POSITION) for words in foreign.lacking):
        foreign = replace(foreign, lacking=(*foreign.lacking, _NO_POSITION))
    files = {name: raw for name, raw in foreign.companions.items() if name not in _OF_MODEL}
    writer = RunWriter(open_run(root), None, None, progress)
    try:
        with _payload(foreign, max_shard_size, checksum, progress) as payload, writer.turn("convert"):
            check_names(files, payload)
            target = checkpoint_path(root, number)
            if os.path.lexists(target) or folder_at(target).exists():
                raise InvalidArgumentError(f"'{target}' already exists. Pass another run, or another step.", path=root)
            writer.begin()
            foreign.confirm()
            saved = writer.write(number, payload, {}, files, blocking=True)
    finally:
        writer.close()
    return ConvertedRun(saved.path, number, tuple(foreign.components), foreign.lacking, foreign.differences)


@contextmanager
def _payload(
    foreign: ForeignCheckpoint, max_shard_size: int | str, checksum: Checksum, progress: bool | None
) -> Iterator[SavePayload]:
    """Yield what is written; tensors of a run by name are read while the block runs."""
    weights = _weights_of(foreign)
    components = Components({}, {}, {})
    for name, value in foreign.components.items():
        kind, encoded = _encoded(name, value, foreign, weights, components)
        components.encoded[name] = {"kind": kind, "state": encoded}
    tensors: dict[str, torch.Tensor] = {}
    nested = {"rng": encode(foreign.rng, f"{rank_prefix(0)}rng", tensors), "components": {}}
    options = save_options(max_shard_size, checksum, progress)
    payload = collect(components, None, [RankState(nested, tensors)], foreign.extra, options, foreign.lacking)
    only_tensors = {key: one for key, one in weights.items() if isinstance(one, torch.Tensor)}
    of_model = {name: foreign.companions[name] for name in _OF_MODEL if name in foreign.companions}
    request = request_from_state_dict(only_tensors, options)
    request = replace(request, config=of_model.pop(CONFIG_NAME, None), model_files=of_model)
    requests = {MODEL_BASE: request, **payload.requests}
    with ExitStack() as opened:
        if foreign.named is not None:
            for base, one in requests.items():
                unread = {name: tensor for name, tensor in one.tensors.items() if is_unread(tensor)}
                raw = opened.enter_context(foreign.named.raw(unread))
                requests[base] = replace(one, tensors={**one.tensors, **raw})
        yield replace(payload, requests=requests).of_one_process()


def _weights_of(foreign: ForeignCheckpoint) -> dict[str, Any]:
    """Return the model's state by names without wrappers."""
    stored: Mapping[str, Any] = foreign.components.get("model", {})
    if not is_state_dict(stored):
        raise InvalidArgumentError(
            f"'{foreign.path}' has no weights under a usual key. Nothing was written. Name their key: keys={{'model': "
            "...}.",
            path=foreign.path,
        )
    names = {name: strip_compiled(short) for name, short in without_common_wrappers(stored).items()}
    return {names[name]: value for name, value in stored.items()}


def _reject_unknown_names(foreign: ForeignCheckpoint) -> None:
    """Reject an optimizer whose groups state names that the weights do not have: no restore would know them."""
    weights = _weights_of(foreign)
    for component, value in foreign.components.items():
        groups = value["param_groups"] if is_optimizer_state(value) else []
        unknown = [one for own in stated_names(groups, weights, {}) or () for one in own if one not in weights]
        if unknown:
            raise unknown_owners(
                component, foreign.path, f"its groups name '{unknown[0]}', which is not one of the weights"
            )


def _encoded(
    name: str, value: Any, foreign: ForeignCheckpoint, weights: Mapping[str, Any], components: Components
) -> tuple[str, Any]:
    """Return the kind of a part, and its state in hfshard's form."""
    if name == "model":
        others = {key: one for key, one in weights.items() if not isinstance(one, torch.Tensor)}
        return "module", encode(others, name, components.tensors)
    if is_optimizer_state(value):
        check_positions(value, name, foreign.path)
        optimizers = [one for one in foreign.components.values() if is_optimizer_state(one)]
        if len(optimizers) > 1 and sum(map(is_state_dict, foreign.components.values())) > 1:
            raise unknown_owners(name, foreign.path, "there are several optimizers and models")
        stated = stated_names(value["param_groups"], weights, find_shared_tensors(weights))
        by_order = stated is None
        names = _names_by_order(name, value, foreign, weights) if stated is None else stated
        own = name == "optimizer"
        tensors = components.optimizer_tensors if own else components.tensors
        named = with_names(value, names)
        encoded = {"class": None, **encode_by_name(named, tensors, "" if own else f"{name}/")}
        return "optimizer", {**encoded, **({BY_OPTIONS: True} if named[BY_OPTIONS] else {}), "by_position": by_order}
    if _SCHEDULER.fullmatch(name):
        state = encode(dict(value), name, components.tensors, lambda one: one if isinstance(one, NotStored) else None)
        return "scheduler", {"class": None, "state": state}
    return "module" if is_state_dict(value) else "stateful", encode(value, name, components.tensors)


def _names_by_order(
    component: str, saved: Mapping[str, Any], foreign: ForeignCheckpoint, weights: Mapping[str, Any]
) -> list[list[str]]:
    if not foreign.has_order:
        raise unknown_owners(component, foreign.path, "its weights, in safetensors, are not in the model's order")
    if are_sorted_by_name(list(weights)):
        raise unknown_owners(component, foreign.path, "its weights were sorted by name, so their order is unknown")
    return [names_by_order(saved, weights, component, foreign.path)]
