"""The settings in a ResumableDataLoader's state, and checks that a state and numbers fit a loader."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import torch
from torch.utils.data import DataLoader

from hfshard.errors import InvalidArgumentError, StateDictMismatchError

STATE_FORMAT: Final = 1
_PLACES: Final = ("epoch", "batch")
_SETTINGS: Final = {
    "seed": "seed",
    "sampler": "sampler",
    "num_samples": "length of the dataset",
    "batch_size": "batch_size",
    "drop_last": "drop_last",
    "batches": "number of batches in an epoch",
}
"""Settings that must be the same at a resume -> what messages call them."""


def settings_of(loader: DataLoader[Any], seed: int) -> dict[str, Any]:
    """Return the settings that a position depends on: ints, bools and a str."""
    is_users_batches = loader.batch_size is None and loader.batch_sampler is not None
    by = loader.batch_sampler if is_users_batches else loader.sampler
    return {
        "seed": seed,
        "sampler": type(by).__name__,
        "num_samples": length_of(loader.dataset),
        "batch_size": getattr(by, "batch_size", None) if is_users_batches else loader.batch_size,
        "drop_last": bool(getattr(by, "drop_last", False)) if is_users_batches else loader.drop_last,
        "batches": None if is_users_batches else length_of(loader),  # a batch sampler may give fewer in some epochs
    }


def after_epoch(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state of a loader that was at an epoch's last batch, at the beginning of the next epoch.

    Other loaders' states are returned as they are.
    """
    if not {"indexes_crc32", *_PLACES, *_SETTINGS} <= state_dict.keys():
        return state_dict
    return {**state_dict, "epoch": state_dict["epoch"] + 1, "batch": 0, "indexes_crc32": None}


def check_state(state_dict: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Check that a state fits a loader with these settings.

    Raises:
        StateDictMismatchError: A value differs; the message says which, and what to do.
    """
    if not isinstance(state_dict, Mapping) or state_dict.get("format") != STATE_FORMAT:
        found = state_dict.get("format") if isinstance(state_dict, Mapping) else type(state_dict).__name__
        raise StateDictMismatchError(
            f"This is not a ResumableDataLoader's state of format {STATE_FORMAT} (found: {found!r}). Resume with"
            " the loader that the checkpoint was saved with, or without the loader's state.",
            expected=STATE_FORMAT,
            actual=found,
        )
    if missing := [name for name in (*_PLACES, *_SETTINGS) if name not in state_dict]:
        raise StateDictMismatchError(
            f"The data loader's state has no {', '.join(missing)}. Resume from another checkpoint.",
            missing_keys=tuple(missing),
        )
    for name, title in _SETTINGS.items():
        was = state_dict[name]
        now = settings[name]
        if was != now:
            raise StateDictMismatchError(
                f"The data loader can't resume: the checkpoint was saved with {title} {was!r}, and this loader has"
                f" {now!r}. Build the loader as it was then; or leave it out, restore(state, ...,"
                f" without=['loader']), and begin an epoch with loader.set_epoch({state_dict['epoch']}).",
                expected=was,
                actual=now,
            )
    for name in _PLACES:
        if type(state_dict[name]) is not int or state_dict[name] < 0:
            raise StateDictMismatchError(
                f"The data loader's state has {name} {state_dict[name]!r}, which is not a position. Resume from"
                " another checkpoint.",
                actual=state_dict[name],
            )
    if settings["batches"] is not None and state_dict["batch"] > settings["batches"]:
        raise StateDictMismatchError(
            f"The data loader's state is at batch {state_dict['batch']} of {settings['batches']}. Resume from"
            " another checkpoint.",
            expected=settings["batches"],
            actual=state_dict["batch"],
        )


def length_of(sized: Any) -> int | None:
    """Return the length of an object; None if it has none."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def checked_seed(seed: int, generator: torch.Generator | None) -> int:
    """Return the seed as a plain int; the generator's if there is one."""
    seed = checked_int(seed, "seed")
    if generator is None:
        return seed
    if seed:
        raise InvalidArgumentError(
            f"A ResumableDataLoader takes seed={seed} or a generator, whose seed here is {generator.initial_seed()},"
            " not both."
        )
    return int(generator.initial_seed())


def checked_int(value: Any, name: str) -> int:
    """Return a number, which may be numpy's or a tensor, as a plain int that can be stored."""
    if not isinstance(value, bool):
        with suppress(TypeError):
            return operator.index(value)
    raise InvalidArgumentError(f"The {name} of a ResumableDataLoader must be an int, got {value!r}.", actual=value)
