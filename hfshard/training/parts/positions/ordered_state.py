"""Finds state that depends on the order of parameters: vectors and lists of all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from hfshard.training.parts.positions.entries import entries_of, is_sequence


def find_in(value: Any, is_wanted: Callable[[Any], bool], at: str = "") -> str | None:
    """Find the first of the nested values that is wanted, and return where it is.

    Example:
        assert find_in({"d": [1, "x"]}, lambda one: isinstance(one, str)) == "d.1"
    """
    if is_wanted(value):
        return at
    for name, item in entries_of(value):
        place = find_in(item, is_wanted, f"{at}.{name}" if at else str(name))
        if place is not None:
            return place
    return None


def one_per_parameter(parameters: Collection[torch.Tensor]) -> Callable[[Any], bool]:
    """Return what tells whether a value may have an entry for each of some parameters, or for each of their elements.

    That is a list (or tuple, or dict of positions) of tensors that have the shapes of parameters, or one vector of all
    of them.
    """
    shapes = {tuple(one.shape) for one in parameters}
    trained = [one for one in parameters if one.requires_grad]
    totals = {sum(one.numel() for one in some) for some in (parameters, trained) if len(some) > 1}

    def has_shape(value: Any) -> bool:
        return find_in(value, lambda one: hasattr(one, "shape") and tuple(one.shape) in shapes) is not None

    def is_one_each(value: Any) -> bool:
        if hasattr(value, "shape"):
            return len(value.shape) == 1 and value.shape[0] in totals
        if not (is_sequence(value) or _has_numbers(value)) or len(value) < 2:
            return False
        return all(has_shape(item) for _, item in entries_of(value))

    return is_one_each


def _has_numbers(value: Any) -> bool:
    """Whether a dict has numbers as keys, as in an optimizer's state_dict: some parameters may have no state."""
    return isinstance(value, dict) and all(type(key) is int for key in value)


def find_ordered_state(saved: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]) -> str | None:
    """Find what depends on the order of an optimizer's parameters or groups, and return where it is.

    Args:
        saved: What `encode_optimizer` returned, decoded.
        parameters: All of the optimizer's, by name.
    """
    groups = [[parameters[name] for name in group["params"]] for group in saved["groups"]]
    counts = {len(parameters), len(groups), *map(len, groups)} - {0, 1}
    is_shared = len(saved["state"]) == 1 < len(parameters)  # the first parameter's stands for all, as LBFGS has it

    def counts_entries(value: Any) -> bool:
        shape = (len(value),) if is_sequence(value) else getattr(value, "shape", ())
        return not counts.isdisjoint(shape)

    is_one_of = [one_per_parameter(some) for some in (list(parameters.values()), *groups)]

    def is_of_all(value: Any) -> bool:
        return counts_entries(value) or any(is_one_each(value) for is_one_each in is_one_of)

    for name, slots in saved["state"].items():
        own = parameters[name]

        def is_of_others(value: Any, own: torch.Tensor = own) -> bool:
            shape = getattr(value, "shape", None)
            if is_shared and shape != own.shape and counts_entries(value):
                return True
            if shape is None or all(size == 1 or size in own.shape for size in shape):
                return False  # its own, or made of its dimensions: Adafactor's rows, Shampoo's matrices
            return int(math.prod(shape)) > (2 * own.numel() if own.is_complex() else own.numel())

        if (place := find_in(slots, is_of_others, f"state.{name}")) is not None:
            return place
    for part in ("others", "more"):
        if (place := find_in(saved[part], is_of_all, part)) is not None:
            return place
    return None
