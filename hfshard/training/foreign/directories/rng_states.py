"""The states of random number generators that transformers' Trainer and Accelerate save, in the form that ours have."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from hfshard.errors import DamagedCheckpointError, remedy
from hfshard.training.foreign.checkpoint import NO_RNG
from hfshard.training.foreign.directories.files import ForeignDirectory
from hfshard.training.parts.rng import check_rng_state

TRAINER_KEYS: Final[Mapping[str, str]] = {
    "python": "python",
    "numpy": "numpy",
    "cpu": "torch",
    "cuda": "cuda",
    "xpu": "xpu",
}
"""Trainer's names -> ours."""

ACCELERATE_KEYS: Final[Mapping[str, str]] = {
    "random_state": "python",
    "numpy_random_seed": "numpy",
    "torch_manual_seed": "torch",
    "torch_cuda_manual_seed": "cuda",
    "torch_xpu_manual_seed": "xpu",
}
"""Accelerate's names -> ours."""

_COUNTS: Final = frozenset({"step"})
"""What else Accelerate's file has."""


@dataclass(frozen=True, slots=True)
class RankStates:
    """What one process had for itself."""

    rng: dict[str, Any] | None
    """Its random number generators, in the form of `parts.rng.rng_state`; None where there are none for it."""
    others: dict[str, Any]
    """What else its file has: counts, and the generators of devices that are not restored."""
    lacking: tuple[str, ...]
    """What is not restored, in words."""


def states_of_rank(directory: ForeignDirectory, files: re.Pattern[str], keys: Mapping[str, str]) -> RankStates:
    """Read the random number generators of this rank, if so many processes saved theirs as there are now.

    Args:
        directory: Where they are.
        files: Matches the names of the files, with the rank as its group; without one it is the only one.
        keys: The names under which a file has the states -> ours.

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
        return RankStates(None, {}, (NO_RNG + held,))
    name = names[directory.request.rank]
    saved = directory.pickle(name, is_of_rank=True)
    rng = own_rng_state(saved, keys, os.path.join(directory.path, name))
    others = {str(key): value for key, value in saved.items() if key not in keys}
    lacking = [f"a use for '{key}' of '{name}'" for key in others if key not in _COUNTS]
    return RankStates(rng, others, tuple(lacking))


def own_rng_state(saved: Any, keys: Mapping[str, str], path: str) -> dict[str, Any]:
    """Turn the states of one process into what `set_rng_state` takes.

        state = own_rng_state(torch.load("rng_state.pth"), TRAINER_KEYS, "rng_state.pth")

    Args:
        saved: What the file holds, as plain values.
        keys: The names under which it has the states -> ours.
        path: The file's, for messages.

    Raises:
        DamagedCheckpointError: It is not what they save.
        StateDictMismatchError: numpy's global generator is another kind here.
    """
    try:
        states = {own: saved[name] for name, own in keys.items() if name in saved}
        state = {name: _CONVERTERS[name](value) for name, value in states.items()}
    except (LookupError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise DamagedCheckpointError(
            f"'{path}' is damaged: it does not hold the states of random number generators ({error!r:.200}). "
            f"{remedy(path)}",
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
