"""Readers for checkpoints of transformers' Trainer, Accelerate and tutorials' torch.save, without these programs."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Never

import torch

from hfshard.errors import (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    InvalidArgumentError,
    StateDictMismatchError,
    repair_hint,
)
from hfshard.foreign.find_foreign import find_foreign
from hfshard.format.parts_of_ranks import reject_partitioned_file
from hfshard.pickles.plain_values import NotStored, read_plain_file
from hfshard.training.interop.foreign_checkpoint import (
    KEYS_OF_RUNS,
    LACKS_RNG,
    NO_STEP,
    ForeignCheckpoint,
    ForeignDirectory,
    ForeignRequest,
    list_foreign_directory,
)
from hfshard.training.run.manifest import MANIFEST
from hfshard.training.state.rng import check_rng_state
from hfshard.training.state.training_state import PartKind

# Accelerate: the directories that its `save_state` writes, read without Accelerate.


_WEIGHTS: Final = re.compile(r"(?:pytorch_)?(model(?:_\d+)?)\.(?:safetensors|bin)")
_ACCELERATE_PICKLES: Final = re.compile(
    r"((?:optimizer|scheduler)(?:_\d+)?)\.bin|(scaler)\.pt|(custom_checkpoint_\d+)\.pkl"
)
_LOADERS: Final = re.compile(r"(dl_state_dict(?:_\d+)?)\.bin")
_SAMPLERS: Final = re.compile(r"sampler(?:_\d+)?\.bin")
_ACCELERATE_RNG: Final = re.compile(r"random_states_(\d+)\.pkl")
_MARKS: Final = re.compile(r"random_states_\d+\.pkl|(?:optimizer|scheduler)(?:_\d+)?\.bin")

_IN_EXTRA: Final = ", but for .extra['dl_state_dict'], which the loaders that Accelerate has prepared take"


def is_accelerate_directory(place: object) -> bool:
    """Return whether a place is a directory in which `Accelerator.save_state` has saved, or a part of one."""
    return any(_MARKS.fullmatch(name) for name in list_foreign_directory(place))


def read_accelerate_directory(path: str, request: ForeignRequest) -> ForeignCheckpoint:
    """Read what `Accelerator.save_state` has saved.

    Parts are named after their files: "model", "model_1", "optimizer", "custom_checkpoint_0". The state of a stateful
    loader, "dl_state_dict", is in `extra`: only a loader that Accelerate has prepared accepts it, and no TrainingState
    does.

    Args:
        path: The directory.
        request: What to read from it.

    Raises:
        DamagedCheckpointError: A file is damaged.
        UnsafePickleError: A file cannot be read without running code.
        StateDictMismatchError: It was saved by FSDP or DeepSpeed, in parts.
    """
    directory = ForeignDirectory(path, request)
    parts: dict[str, Any] = {}
    loaders: dict[str, Any] = {}
    for name in sorted(directory.names):
        if match := _WEIGHTS.fullmatch(name):
            parts[match.group(1)] = directory.weights(match.group(1))
        elif match := _ACCELERATE_PICKLES.fullmatch(name):
            parts[next(filter(None, match.groups()))] = directory.pickle(name)
        elif match := _LOADERS.fullmatch(name):
            loaders[match.group(1)] = directory.pickle(name)
    lacking = [NO_STEP] if directory.step is None else []
    lacking.append("the position in the data" + (_IN_EXTRA if loaders else ""))
    lacking += [
        f"the order of shuffled data, as '{name}' is a pickle of Accelerate's own classes, which is not read"
        for name in sorted(directory.names)
        if _SAMPLERS.fullmatch(name)
    ]
    states = states_of_rank(directory, _ACCELERATE_RNG, ACCELERATE_KEYS)
    if "accelerator" in request.kinds and "step" in states.others:
        parts["accelerator"] = {"step": states.others["step"]}  # counted batches, for `prepared_state`
    return directory.checkpoint(
        directory.components(parts),
        step=directory.step,
        extra={**directory.extra(), **loaders} or None,
        rng=states.rng,
        lacking=(*lacking, *states.lacking),
    )


# Trainer: the `checkpoint-500/` that it has saved, read without transformers.


_STATE: Final = "trainer_state.json"
"""Trainer's own progress."""

_TRAINER_PICKLES: Final = {"optimizer": "optimizer.pt", "scheduler": "scheduler.pt", "scaler": "scaler.pt"}
"""Part -> its file. training_args.bin is not read: it is a pickle of transformers' own classes."""

_TRAINER_RNG: Final = re.compile(r"rng_state(?:_(\d+))?\.pth")


def is_trainer_directory(place: object) -> bool:
    """Return whether a place is a directory in which Trainer alone has saved a checkpoint, or a part of one."""
    return not list_foreign_directory(place).isdisjoint({_STATE, "optimizer.pt", "scheduler.pt"})


def read_trainer_directory(path: str, request: ForeignRequest) -> ForeignCheckpoint:
    """Read a checkpoint that Trainer has saved.

    Args:
        path: Its directory.
        request: What to read from it.

    Raises:
        DamagedCheckpointError: A file is damaged.
        UnsafePickleError: A file cannot be read without running code.
        StateDictMismatchError: It was saved by FSDP or DeepSpeed, in parts.
    """
    directory = ForeignDirectory(path, request)
    parts = {"model": directory.weights(), **{part: directory.pickle(name) for part, name in _TRAINER_PICKLES.items()}}
    progress = directory.json(_STATE) or {}
    states = states_of_rank(directory, _TRAINER_RNG, TRAINER_KEYS)
    step = _checked(progress, "global_step", int, path)
    if step is None:
        step = directory.step
    return directory.checkpoint(
        directory.components(parts),
        step=step,
        companions=directory.companions({_STATE}),
        extra={**directory.extra(), **progress},
        rng=states.rng,
        epochs=_checked(progress, "epoch", float, path),
        lacking=states.lacking if step is not None else (NO_STEP, *states.lacking),
    )


def _checked(progress: Mapping[str, Any], key: str, kind: type, path: str) -> Any:
    """Return a number from 0 in Trainer's own progress; None if it has none. Anything else is damage."""
    value = progress.get(key)
    if value is None:
        return None
    is_number = type(value) in (int, kind) and math.isfinite(value) and value >= 0
    if not is_number:
        file = os.path.join(path, _STATE)
        raise DamagedCheckpointError(
            f"'{file}' is damaged: its {key} must be a number of at least 0, got {value!r:.50}. {repair_hint(file)}",
            path=file,
        )
    return kind(value)


# Directories in which the ranks of a framework have saved parts, and no program anything else.


def is_partitioned_directory(place: object) -> bool:
    """Return whether a place is a directory with tensors that another framework has saved in parts."""
    return bool(list_foreign_directory(place)) and find_foreign(str(place)) is not None


def read_partitioned_directory(path: str, request: ForeignRequest) -> ForeignCheckpoint:
    """Read a run that ranks have saved in parts.

    Args:
        path: The directory.
        request: What to read from it.

    Raises:
        InvalidArgumentError: It has weights alone, or an optimizer's state that cannot be matched to parameters.
        DamagedCheckpointError: The files do not fit together, or a file is damaged.
        UnsafePickleError: A pickle asks for anything but what the framework writes.
    """
    directory = ForeignDirectory(path, request)
    run = directory.named
    if run is None:
        raise InvalidArgumentError(
            f"'{path}' has the weights of a model alone, and no run. Load them: hfshard.load_model(model, {path!r}).",
            path=path,
        )
    parts = run.parts(request.kinds)
    keys = {name: key for name, key in request.keys.items() if name not in KEYS_OF_RUNS}
    found = sort_entries({**parts, **directory.extra()}, request.kinds, keys, path)
    components = {
        name: _with_numbers(state) if request.kinds.get(name, name) == "scheduler" else state
        for name, (_, state) in found.components.items()
    }
    step = directory.step if directory.step is not None else step_of(found.extra)[0]
    return directory.checkpoint(
        components,
        step=step,
        companions=directory.companions(()),
        extra=found.extra or None,
        lacking=(*([NO_STEP] if step is None else []), LACKS_RNG),
    )


def _with_numbers(state: Any) -> Any:
    """Return a scheduler's state in which numbers are keys again, which torch.distributed.checkpoint makes text."""
    if not isinstance(state, dict):
        return state
    if not state or not all(isinstance(key, str) and key.isdecimal() for key in state):
        return {key: _with_numbers(one) for key, one in state.items()}
    is_count = all(type(one) is int for one in state.values())
    return (Counter if is_count else dict)({int(key): one for key, one in state.items()})


# Directories that contain several checkpoints of another program: one of them must be named.


_NUMBER: Final = re.compile(r"(\d+)\Z")


def is_run_directory(place: object) -> bool:
    """Return whether a place is a directory that contains such directories, and no hfshard checkpoint."""
    return len(_checkpoints_below(place)) > 0


def reject_run_directory(path: str, request: ForeignRequest) -> Never:
    """Reject a directory of several checkpoints, and name one that could be meant.

    Raises:
        CheckpointNotFoundError: Always.
    """
    raise CheckpointNotFoundError(
        f"'{path}' is not a checkpoint, but contains checkpoints of another program. Pass one of them, such as "
        f"'{_checkpoints_below(path)[-1]}'.",
        path=path,
    )


def _checkpoints_below(place: Any) -> list[str]:
    """List the checkpoints of Trainer or Accelerate in a directory, those with the highest numbers last."""
    below = [os.path.join(place, name) for name in list_foreign_directory(place)]
    if any(os.path.lexists(os.path.join(path, MANIFEST)) for path in below):
        return []
    found = [path for path in below if is_trainer_directory(path) or is_accelerate_directory(path)]
    return sorted(found, key=lambda path: (int(match.group()) if (match := _NUMBER.search(path)) else -1, path))


# Random number generators: the states that Trainer and Accelerate save, converted to hfshard's form.


TRAINER_KEYS: Final[Mapping[str, str]] = {
    "python": "python",
    "numpy": "numpy",
    "cpu": "torch",
    "cuda": "cuda",
    "xpu": "xpu",
}
"""Trainer's names -> hfshard's."""

ACCELERATE_KEYS: Final[Mapping[str, str]] = {
    "random_state": "python",
    "numpy_random_seed": "numpy",
    "torch_manual_seed": "torch",
    "torch_cuda_manual_seed": "cuda",
    "torch_xpu_manual_seed": "xpu",
}
"""Accelerate's names -> hfshard's."""

_COUNTS: Final = frozenset({"step"})
"""Other keys in Accelerate's file."""


@dataclass(frozen=True, slots=True)
class RankStates:
    """State that one process had for itself."""

    rng: dict[str, Any] | None
    """Its random number generators, in the form of `state.rng.rng_state`; None if there are none for it."""
    others: dict[str, Any]
    """Everything else in its file: counts, and the generators of devices that are not restored."""
    lacking: tuple[str, ...]
    """Descriptions of what is not restored."""


def states_of_rank(directory: ForeignDirectory, files: re.Pattern[str], keys: Mapping[str, str]) -> RankStates:
    """Read this rank's random number generators, if the checkpoint has those of the same number of processes as now.

    Args:
        directory: The directory that contains them.
        files: Matches the names of the files, with the rank as its group; a file without a rank is the only one.
        keys: The names under which a file has the states -> hfshard's.

    Raises:
        DamagedCheckpointError, UnsafePickleError: Its file is damaged, or asks for more than plain data.
        StateDictMismatchError: numpy's global generator is another kind here.
    """
    matches = filter(None, map(files.fullmatch, directory.names))
    names = {int(match.group(1) or 0): match.group() for match in matches}
    here = directory.request.world_size
    if names.keys() != set(range(here)):
        are = "is" if here == 1 else "are"
        held = f" (it has those of {len(names)} processes, and here {are} {here})" if names else ""
        return RankStates(None, {}, (LACKS_RNG + held,))
    name = names[directory.request.rank]
    saved = directory.pickle(name, is_of_rank=True)
    rng = own_rng_state(saved, keys, os.path.join(directory.path, name))
    others = {str(key): value for key, value in saved.items() if key not in keys}
    lacking = [f"a use for '{key}' of '{name}'" for key in others if key not in _COUNTS]
    return RankStates(rng, others, tuple(lacking))


def own_rng_state(saved: Any, keys: Mapping[str, str], path: str) -> dict[str, Any]:
    """Convert the states of one process to what `set_rng_state` accepts.

        state = own_rng_state(torch.load("rng_state.pth"), TRAINER_KEYS, "rng_state.pth")

    Args:
        saved: The contents of the file, as plain values.
        keys: The names under which it has the states -> hfshard's.
        path: The file's path, for messages.

    Raises:
        DamagedCheckpointError: It is not what these programs save.
        StateDictMismatchError: numpy's global generator is another kind here.
    """
    try:
        state = {own: _CONVERTERS[own](saved[name]) for name, own in keys.items() if name in saved}
    except (LookupError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise DamagedCheckpointError(
            f"'{path}' is damaged: it does not contain random number generator states ({error!r:.200}). "
            f"{repair_hint(path)}",
            path=path,
        ) from error
    check_rng_state(state, path)
    return state


def _python(value: Any) -> dict[str, Any]:
    version, words, gauss = value
    return {"version": version, "words": torch.tensor(words, dtype=torch.uint32).view(torch.int32), "gauss": gauss}


def _numpy(value: Any) -> dict[str, Any]:
    kind, key, place, has_gauss, gauss = value
    return {"bit_generator": kind, "state": {"key": key, "pos": place}, "has_gauss": has_gauss, "gauss": gauss}


def _devices(value: Any) -> list[Any]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


_CONVERTERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "python": _python,
    "numpy": _numpy,
    "torch": lambda value: value,
    "cuda": _devices,
    "xpu": _devices,
}


# torch.save: the general checkpoint of tutorials, a dict of state dicts, epoch and loss, in one file.


def is_torch_file(path: object) -> bool:
    """Return whether a place is a file, as only other programs save runs."""
    return isinstance(path, str) and os.path.isfile(path)


def read_torch_file(path: str, request: ForeignRequest) -> ForeignCheckpoint:
    """Read a file of torch.save, and find the parts of a run in it.

    Args:
        path: The file.
        request: What to read from it.

    Raises:
        UnsafePickleError: It asks for something that runs code; or, with strict, for more than plain data.
        DamagedCheckpointError: It is incomplete, or not a dict of states.
        StateDictMismatchError: A part may be one of several entries.
        CheckpointNotFoundError: Its weights are in other files, in parts.
    """
    file = read_plain_file(path, os.path.dirname(path) or os.curdir, strict=request.strict, verify=request.verify)
    if not isinstance(file.value, Mapping):
        raise DamagedCheckpointError(
            f"'{path}' contains a {type(file.value).__name__}, not a dict of states by name. Load it with torch, and "
            "save it as {'model': ..., 'optimizer': ..., 'epoch': ...}.",
            path=path,
        )
    reject_partitioned_file(file.value, path)
    found = sort_entries(file.value, request.kinds, request.keys, path)
    components = {}
    for name, (at, state) in found.components.items():
        is_module = request.kinds.get(name, "module" if name == "model" else None) == "module"
        components[name] = state if is_module else file.copied(state, at)
    extra = {key: file.copied(one, key) for key, one in found.extra.items() if not isinstance(one, NotStored)}
    step, key = step_of(extra)
    lacking = [LACKS_RNG]
    if held := [f"'{name}'" for name in extra if is_generators(name)]:
        lacking = [f"{LACKS_RNG[:-1]}; the file holds {', '.join(held)}, left in restored.extra and not set)"]
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


Reader = Callable[[str, ForeignRequest], ForeignCheckpoint]

_READERS: Final[tuple[tuple[Callable[[Any], bool], Reader], ...]] = (
    (is_torch_file, read_torch_file),
    (is_run_directory, reject_run_directory),
    (is_trainer_directory, read_trainer_directory),
    (is_accelerate_directory, read_accelerate_directory),
    (is_partitioned_directory, read_partitioned_directory),
)
"""Pairs of a check whether a place is of a kind, and its reader. The first match reads."""


def reader_of(place: object) -> Reader | None:
    """Find the reader for another program's checkpoint; None if the place is not one, or is hfshard's.

    Args:
        place: A path, or anything else that `CheckpointManager.restore` accepts as a step.
    """
    return next((reader for is_of_kind, reader in _READERS if is_of_kind(place)), None)


# Keys under which programs save the parts of a run with torch.save.


_ALIASES: Final[Mapping[str, tuple[str, ...]]] = {
    "model": ("state_dict", "net", "network", "module", "weights", "params"),
    "optimizer": ("optim", "optim_state_dict", "opt", "optimizer_states", "optimizers"),
    "scheduler": ("lr_scheduler", "lr_scheduler_state_dict", "lr_sched", "sched", "lr_schedulers", "schedulers"),
    "scaler": ("grad_scaler", "amp_scaler", "loss_scaler", "amp", "MixedPrecision"),
    "ema": ("model_ema", "ema_model", "model_ema_state_dict"),
}
"""Part -> keys under which tutorials and widely used programs save it, besides those of its own name."""

_USUAL: Final[Mapping[str, PartKind]] = {
    "model": "module",
    "optimizer": "optimizer",
    "scheduler": "scheduler",
    "scaler": "stateful",
    "ema": "module",
}
"""The parts to look for if there is no state that names them."""

_FORMS: Final = ("{}", "{}_state_dict", "{}_state", "{}_dict", "state_dict_{}")
"""Forms of a key that is derived from a part's own name."""

_LISTS: Final = frozenset({"optimizer_states", "optimizers", "lr_schedulers", "schedulers"})
"""Keys that have a list of states, as Lightning saves them."""

_STEPS: Final = ("global_step", "step", "iteration", "iter", "num_updates", "steps")
"""Keys of the number of optimizer steps, the most reliable first."""

_PROGRESS: Final = "train_state"
"""Key under which torchtitan has it."""

_GENERATORS: Final = re.compile(
    r"(?:\w+_)?(?:rng(?:_?states?)?|random_?states?)(?:_(?:all|dict|cpu|cuda|gpu|torch|numpy|np|python))?",
    re.IGNORECASE,
)
"""Keys of the states of random number generators, whose form differs between programs."""


@dataclass(frozen=True, slots=True)
class SortedEntries:
    """The entries of a file, sorted."""

    components: dict[str, tuple[str, Any]]
    """Part -> its place in the file, and its state."""
    extra: dict[str, Any]


def sort_entries(
    value: Mapping[str, Any], kinds: Mapping[str, PartKind], keys: Mapping[str, str], path: str
) -> SortedEntries:
    """Find the parts of a run in a dict.

    Args:
        value: The contents of the file, with replacements for what was not read.
        kinds: The requested parts: name -> kind. Empty: all known ones.
        keys: Name of a part -> where its state is, with dots for nested ones.
        path: The file's path, for messages.

    Returns:
        The parts by the names of the request; those that were not requested under their own keys.

    Raises:
        StateDictMismatchError: A part may be one of several entries; or `keys` names a missing one.
        InvalidArgumentError: `keys` names a part that is not requested, or not known.
    """
    kinds, known = (kinds, "not a part of the TrainingState") if kinds else (_USUAL, "not a known part")
    unknown = [name for name in keys if name not in kinds]
    if unknown:
        raise InvalidArgumentError(f"keys names '{unknown[0]}', which is {known}. Name one of: {', '.join(kinds)}.")
    if is_state_dict(value) and not keys:
        return SortedEntries({"model": ("", value)}, {})
    entries = dict(_entries(value))
    found: dict[str, tuple[str, Any]] = {}
    for name, kind in kinds.items():
        at = keys[name] if name in keys else _only_candidate(name, kind, entries, keys, path)
        if at is not None:
            found[name] = at, _at(value, at, path)
    taken = {at for at, _ in found.values()}
    rest = {at: one for at, one in entries.items() if not _is_taken(at, taken)}
    parts = {at: one for at, one in rest.items() if _is_part(at, one)}
    extra = {at: one for at, one in rest.items() if at not in parts and one is not None}
    return SortedEntries(found | {at: (at, one) for at, one in parts.items()}, extra)


def is_generators(key: str) -> bool:
    """Return whether programs save random number generators under a key: "rng_state", "cuda_rng"."""
    return _GENERATORS.fullmatch(key) is not None


def step_of(extra: Mapping[str, Any]) -> tuple[int | None, str]:
    """Find the step in a file's other entries, and its key: the number of epochs if there is no other."""
    inner = extra.get(_PROGRESS)
    for key in (*_STEPS, "epoch"):
        for entries in (extra, inner if isinstance(inner, Mapping) else {}):
            number = _whole_number(entries.get(key))
            if number is not None:
                return number, key
    return None, ""


def is_optimizer_state(value: Any) -> bool:
    """Return whether a value is what an optimizer's `state_dict()` returns."""
    if not isinstance(value, Mapping) or not isinstance(value.get("state"), Mapping):
        return False
    groups = value.get("param_groups")
    return isinstance(groups, list) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups
    )


def is_state_dict(value: Any) -> bool:
    """Return whether a value is a module's state dict: names with tensors, possibly with extra states that are none."""
    if not isinstance(value, Mapping) or not value or not all(isinstance(key, str) for key in value):
        return False
    others = [key for key, one in value.items() if not isinstance(one, torch.Tensor)]
    return len(others) < len(value) and all(key.endswith("_extra_state") for key in others)


def _entries(value: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a dict, and those of lists of states: "optimizer_states.0"."""
    for key, one in value.items():
        if key in _LISTS and isinstance(one, list):
            yield from ((f"{key}.{number}", item) for number, item in enumerate(one))
        else:
            yield str(key), one


def _only_candidate(
    name: str, kind: PartKind, entries: Mapping[str, Any], keys: Mapping[str, str], path: str
) -> str | None:
    """Find the entry that is a part: the one of its name if there is one, else the only one under a usual key."""
    fits = [at for at in _in_order(_keys_of(name), entries) if _fits(entries[at], kind)]
    exact = [at for at in fits if at.split(".")[0] == name]
    free = [at for at in exact or fits if at not in keys.values()]
    if len(free) > 1:
        listed = ", ".join(f"'{at}'" for at in free)
        raise StateDictMismatchError(
            f"'{name}' could be any of several entries of '{path}': {listed}. Nothing was restored. Choose one: "
            f"restore(..., keys={{'{name}': '{free[0]}'}}).",
            path=path,
        )
    if not free:
        return None
    at = free[0]
    return f"{at}.state_dict" if _is_nested(entries[at], kind) else at


def _keys_of(name: str) -> list[str]:
    """Return the keys under which a part of this name is saved."""
    return [*(form.format(name) for form in _FORMS), *_ALIASES.get(name, ())]


def _in_order(keys: list[str], entries: Mapping[str, Any]) -> list[str]:
    """List the entries under some keys, or in lists under them, each once."""
    found = (at for key in keys for at in entries if at == key or (key in _LISTS and at.startswith(f"{key}.")))
    return list(dict.fromkeys(found))


def _fits(value: Any, kind: PartKind) -> bool:
    """Return whether an entry has the form of a part's state."""
    if kind == "module":
        return is_state_dict(value) or _is_nested(value, kind)
    if kind == "optimizer":
        return is_optimizer_state(value)
    return isinstance(value, Mapping)


def _is_nested(value: Any, kind: PartKind) -> bool:
    return kind == "module" and isinstance(value, Mapping) and is_state_dict(value.get("state_dict"))


def _is_part(at: str, value: Any) -> bool:
    """Return whether an entry that was not requested is the state of a part, which a restore would leave out."""
    if is_generators(at):
        return False
    usual = {key for name in ("scheduler", "scaler") for key in _keys_of(name)}
    is_state = at.split(".")[0] in usual and isinstance(value, Mapping) and len(value) > 0
    return is_state or is_optimizer_state(value) or is_state_dict(value) or _is_nested(value, "module")


def _is_taken(at: str, taken: set[str]) -> bool:
    return any(one == at or one.startswith(f"{at}.") for one in taken)


def _at(value: Any, at: str, path: str) -> Any:
    """Return the entry at a path with dots; keys that contain dots are found too."""
    if isinstance(value, Mapping) and at in value:
        return value[at]
    first, _, rest = at.partition(".")
    while rest:
        if isinstance(value, Mapping) and first in value:
            return _at(value[first], rest, path)
        if isinstance(value, list) and first.isdecimal() and int(first) < len(value):
            return _at(value[int(first)], rest, path)
        more, _, rest = rest.partition(".")
        first = f"{first}.{more}"
    if isinstance(value, list) and at.isdecimal() and int(at) < len(value):
        return value[int(at)]
    known = ", ".join(map(str, value)) if isinstance(value, Mapping) else f"a {type(value).__name__}"
    raise StateDictMismatchError(
        f"'{path}' has no entry '{at}', which keys names. It has: {known:.500}. Nothing was restored.",
        path=path,
    )


def _whole_number(value: Any) -> int | None:
    """Return a count of steps: an int, or a tensor or numpy number with one; None for anything else."""
    if isinstance(value, torch.Tensor) or (hasattr(value, "dtype") and hasattr(value, "item")):
        value = value.item() if getattr(value, "ndim", 1) == 0 else None
    is_whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return value if is_whole else None
