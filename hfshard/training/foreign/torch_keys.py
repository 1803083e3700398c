"""Under which keys programs save the parts of a run with torch.save."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from hfshard.errors import InvalidArgumentError, StateDictMismatchError
from hfshard.training.state import PartKind

_ALIASES: Final[Mapping[str, tuple[str, ...]]] = {
    "model": ("state_dict", "net", "network", "module", "weights", "params"),
    "optimizer": ("optim", "optim_state_dict", "opt", "optimizer_states", "optimizers"),
    "scheduler": ("lr_scheduler", "lr_scheduler_state_dict", "lr_sched", "sched", "lr_schedulers", "schedulers"),
    "scaler": ("grad_scaler", "amp_scaler", "loss_scaler", "amp", "MixedPrecision"),
    "ema": ("model_ema", "ema_model", "model_ema_state_dict"),
}
"""Part -> keys under which tutorials and much used programs save it, besides those of its own name."""

_USUAL: Final[Mapping[str, PartKind]] = {
    "model": "module",
    "optimizer": "optimizer",
    "scheduler": "scheduler",
    "scaler": "stateful",
    "ema": "module",
}
"""The parts that are looked for where there is no state to say which."""

_FORMS: Final = ("{}", "{}_state_dict", "{}_state", "{}_dict", "state_dict_{}")
"""How a key is made of a part's own name."""

_LISTS: Final = frozenset({"optimizer_states", "optimizers", "lr_schedulers", "schedulers"})
"""Keys that have a list of states, as Lightning saves them."""

_STEPS: Final = ("global_step", "step", "iteration", "iter", "num_updates", "steps")
"""Keys of the number of optimizer steps, the surest first."""

_GENERATORS: Final = re.compile(
    r"(?:\w+_)?(?:rng(?:_?states?)?|random_?states?)(?:_(?:all|dict|cpu|cuda|gpu|torch|numpy|np|python))?",
    re.IGNORECASE,
)
"""Keys of the states of random number generators, which are in as many forms as there are programs."""


@dataclass(frozen=True, slots=True)
class SortedEntries:
    """The entries of a file, sorted."""

    components: dict[str, tuple[str, Any]]
    """Part -> where it is in the file, and its state."""
    extra: dict[str, Any]


def sort_entries(
    value: Mapping[str, Any], kinds: Mapping[str, PartKind], keys: Mapping[str, str], path: str
) -> SortedEntries:
    """Find the parts of a run in a dict.

    Args:
        value: What the file holds, with stand-ins.
        kinds: The parts that are wanted: name -> kind. Empty: all that are known.
        keys: Name of a part -> where its state lies, with dots for what is nested.
        path: The file's, for messages.

    Returns:
        The parts by the names of the request; those that nobody asked for under their own keys.

    Raises:
        StateDictMismatchError: A part may be one of several entries; or `keys` names one that is not there.
        InvalidArgumentError: `keys` names a part that is not wanted, or not known.
    """
    kinds, known = (kinds, "no part of the TrainingState") if kinds else (_USUAL, "none of the parts that are known")
    unknown = [name for name in keys if name not in kinds]
    if unknown:
        raise InvalidArgumentError(f"keys names '{unknown[0]}', which is {known}: {', '.join(kinds)}.")
    if is_weights(value) and not keys:
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
    """Whether a key is one of those under which programs save random number generators: "rng_state", "cuda_rng"."""
    return _GENERATORS.fullmatch(key) is not None


def step_of(extra: Mapping[str, Any]) -> tuple[int | None, str]:
    """The step among what a file holds besides its parts, and under which key: of the epochs if there is no other."""
    for key in (*_STEPS, "epoch"):
        number = _whole_number(extra.get(key))
        if number is not None:
            return number, key
    return None, ""


def is_optimizer_state(value: Any) -> bool:
    """Whether a value is what the `state_dict()` of an optimizer returns."""
    if not isinstance(value, Mapping) or not isinstance(value.get("state"), Mapping):
        return False
    groups = value.get("param_groups")
    return isinstance(groups, list) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups
    )


def is_weights(value: Any) -> bool:
    """Whether a value is the state dict of a module: names with tensors, and maybe states that are none."""
    if not isinstance(value, Mapping) or not value or not all(isinstance(key, str) for key in value):
        return False
    others = [key for key, one in value.items() if not isinstance(one, torch.Tensor)]
    return len(others) < len(value) and all(key.endswith("_extra_state") for key in others)


def _entries(value: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The entries of a dict, and those of lists of states: "optimizer_states.0"."""
    for key, one in value.items():
        if key in _LISTS and isinstance(one, list):
            yield from ((f"{key}.{number}", item) for number, item in enumerate(one))
        else:
            yield str(key), one


def _only_candidate(
    name: str, kind: PartKind, entries: Mapping[str, Any], keys: Mapping[str, str], path: str
) -> str | None:
    """The entry that is a part: the one of its name if there is one, else the only one under a usual key."""
    fits = [at for at in _in_order(_keys_of(name), entries) if _fits(entries[at], kind)]
    exact = [at for at in fits if at.split(".")[0] == name]
    free = [at for at in exact or fits if at not in keys.values()]
    if len(free) > 1:
        listed = ", ".join(f"'{at}'" for at in free)
        raise StateDictMismatchError(
            f"'{name}' may be one of several entries of '{path}': {listed}. Nothing was restored. Say which: "
            f"restore(..., keys={{'{name}': '{free[0]}'}}).",
            path=path,
        )
    if not free:
        return None
    at = free[0]
    return f"{at}.state_dict" if _is_nested(entries[at], kind) else at


def _keys_of(name: str) -> list[str]:
    """The keys under which a part of this name is saved."""
    return [*(form.format(name) for form in _FORMS), *_ALIASES.get(name, ())]


def _in_order(keys: list[str], entries: Mapping[str, Any]) -> list[str]:
    """The entries under some keys, or in lists under them, each once."""
    found: dict[str, None] = {}
    for key in keys:
        found |= {at: None for at in entries if at == key or (key in _LISTS and at.startswith(f"{key}."))}
    return list(found)


def _fits(value: Any, kind: PartKind) -> bool:
    """Whether an entry has the form of a part's state."""
    if kind == "module":
        return is_weights(value) or _is_nested(value, kind)
    if kind == "optimizer":
        return is_optimizer_state(value)
    return isinstance(value, Mapping)


def _is_nested(value: Any, kind: PartKind) -> bool:
    return kind == "module" and isinstance(value, Mapping) and is_weights(value.get("state_dict"))


def _is_part(at: str, value: Any) -> bool:
    """Whether an entry that nobody asked for is the state of a part, which a restore would leave out."""
    if is_generators(at):
        return False
    usual = {key for name in ("scheduler", "scaler") for key in _keys_of(name)}
    is_state = at.split(".")[0] in usual and isinstance(value, Mapping) and len(value) > 0
    return is_state or is_optimizer_state(value) or is_weights(value) or _is_nested(value, "module")


def _is_taken(at: str, taken: set[str]) -> bool:
    return any(one == at or one.startswith(f"{at}.") for one in taken)


def _at(value: Any, at: str, path: str) -> Any:
    """The entry at a path with dots; keys that have dots themselves are found too."""
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
        f"'{path}' has no entry '{at}' where keys names one, and nothing was restored. There is: {known:.500}.",
        path=path,
    )


def _whole_number(value: Any) -> int | None:
    """A count of steps: an int, or a tensor or a number of numpy's with one; None for anything else."""
    if isinstance(value, torch.Tensor) or (hasattr(value, "dtype") and hasattr(value, "item")):
        value = value.item() if getattr(value, "ndim", 1) == 0 else None
    is_whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return value if is_whole else None
