"""Finds the names of an optimizer's parameters from the weights beside it, where no model is there to ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hfshard.errors import InvalidArgumentError
from hfshard.tensors.tied import find_shared_tensors
from hfshard.training.foreign.optimizers import LIKE_THEIR_PARAMETER

_STATISTICS = ("running_mean", "running_var")
"""Buffers of torch's normalizations, which are no parameters though they look like them."""


def names_by_order(saved: Mapping[str, Any], weights: Mapping[str, Any], component: str, path: str) -> list[str]:
    """The names of an optimizer's parameters, if there is only one way in which they can be the weights in their order.

    Args:
        saved: What its `state_dict()` returned, with one group.
        weights: The model's, in their order.
        component: The optimizer's name, for messages.
        path: The file's, for messages.

    Raises:
        InvalidArgumentError: It has several groups; or there is no such way, or several.
    """
    groups = saved["param_groups"]
    if len(groups) != 1:
        raise unknown_owners(component, path, f"its {len(groups)} groups have numbers for parameters, not names")
    names = _possible_parameters(weights)
    shapes = [_shape_of(saved["state"].get(position)) for position in groups[0]["params"]]
    first = _match(shapes, names, weights)
    last = _match(shapes[::-1], names[::-1], weights)
    if first is None or last is None:
        raise unknown_owners(
            component, path, f"its {len(shapes)} parameters are not {len(names)} of the weights in order"
        )
    if first != last[::-1]:
        other = next(one for one, another in zip(first, last[::-1]) if one != another)
        raise unknown_owners(component, path, f"its {len(shapes)} parameters may be with or without '{other}'")
    return first


def _possible_parameters(weights: Mapping[str, Any]) -> list[str]:
    """Weights that can be trained; of several names for one tensor that by which a run knows it, where the first is."""
    tensors = {name: one for name, one in weights.items() if isinstance(one, torch.Tensor)}
    kept_of = find_shared_tensors(tensors)
    return [
        name
        for name in dict.fromkeys(kept_of.get(name, name) for name in tensors)
        if (tensors[name].is_floating_point() or tensors[name].is_complex()) and not _is_statistic(name, tensors)
    ]


def _is_statistic(name: str, tensors: Mapping[str, torch.Tensor]) -> bool:
    prefix, _, last = name.rpartition(".")
    return last in _STATISTICS and (f"{prefix}.num_batches_tracked" if prefix else "num_batches_tracked") in tensors


def _shape_of(slots: Any) -> tuple[int, ...] | None:
    """The shape of the parameter that a state is of; None where it does not tell."""
    for slot, value in slots.items() if isinstance(slots, Mapping) else ():
        if slot in LIKE_THEIR_PARAMETER and isinstance(value, torch.Tensor):
            return tuple(value.shape)
    return None


def _match(
    shapes: Sequence[tuple[int, ...] | None], names: Sequence[str], weights: Mapping[str, Any]
) -> list[str] | None:
    """The first names in order that have the shapes; None where there are none.

    There is only one way to choose them if the first ones from the other end are the same.
    """
    found: list[str] = []
    for name in names:
        if len(found) < len(shapes) and shapes[len(found)] in (None, tuple(weights[name].shape)):
            found.append(name)
    return found if len(found) == len(shapes) else None


def unknown_owners(component: str, path: str, why: str) -> InvalidArgumentError:
    """The error for an optimizer whose parameters can't be named, and why."""
    return InvalidArgumentError(
        f"'{path}' can't be converted without the model: of '{component}' it is not known whose state is whose, as "
        f"{why}. Build the model and the optimizer as in that run, and do it in Python: "
        f"manager.restore(state, {path!r}); manager.save(step, state). Or take the weights alone: "
        "hfshard convert --weights.",
        path=path,
    )
