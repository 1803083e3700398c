"""Names for the parameters in another program's optimizer state, which has them by position."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import torch
from torch.optim import Optimizer

from hfshard._util.text import shorten_list
from hfshard.errors import DamagedCheckpointError, InvalidArgumentError, StateDictMismatchError
from hfshard.tensors.parameter_names import match_prefixes
from hfshard.tensors.tied import find_shared_tensors
from hfshard.training.state.optimizer import BY_OPTIONS, by_name, group_names, trained_parameters
from hfshard.training.state.pending_loads import check_options
from hfshard.training.state.reordering import Names

LIKE_THEIR_PARAMETER: Final = frozenset(
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta")
    + ("sum", "prev", "ax")
)
"""Slots of torch's optimizers, and of many others, that have the shape of their parameter."""

_SHOWN: Final = 5


def named_optimizer_state(
    optimizer: Optimizer,
    saved: Mapping[str, Any],
    names: Names,
    kept_of: Mapping[str, str],
    in_file: Sequence[str],
    component: str,
    path: str,
) -> dict[str, Any]:
    """Convert an optimizer's state to the form that `encode_optimizer` writes, decoded: by name.

    Names come from `param_names`, if the groups have them. Otherwise torch has the parameters by position: those of
    each group are taken to be those of the group that was built. If the weights next to the state are in another order
    than the model's, and not sorted by name, a group that was built in the model's order may have had the file's order
    in that run. Then the shapes of the states must decide.

    Args:
        optimizer: The one that was built; it is not changed.
        saved: What the other one's `state_dict()` returned.
        names: The names of the parameters that the optimizer has now.
        kept_of: Each name of a tied parameter -> the one that is among `names`.
        in_file: These names in the order in which the file has the weights; empty if it has none.
        component: The optimizer's name in the training state, for messages.
        path: The file's path, for messages.

    Raises:
        DamagedCheckpointError: It is not what an optimizer saves.
        StateDictMismatchError: It is the state of another optimizer, of other groups, or of parameters in another
            order, so that it is not known which state belongs to which parameter.
    """
    check_positions(saved, component, path)
    built = group_names(optimizer, names, component)
    groups = saved["param_groups"]
    check_options(optimizer, groups, component, path)
    shapes = {names[id(one)]: tuple(one.shape) for one in trained_parameters(optimizer)}
    stated = stated_names(groups, shapes, kept_of)
    if stated is None:
        _check_counts(groups, built, component, path)
        in_model = list(dict.fromkeys(names.values()))
        stated = []
        for group, own in zip(groups, built):
            states = [saved["state"].get(position, {}) for position in group["params"]]
            stated.append(_names_of_group(own, states, shapes, in_model, in_file, component, path))
    named = with_names(saved, stated)
    _check_shapes(named["state"], shapes, component, path)
    return named


def with_names(saved: Mapping[str, Any], names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return an optimizer's state in the form that `encode_optimizer` writes, decoded, with no class.

    Args:
        saved: What its `state_dict()` returned.
        names: The names of each group's parameters.
    """
    state = {key: value for key, value in saved.items() if key != BY_OPTIONS}
    named = by_name(state, names, left_out=("params", "param_names"))
    return {"class": None, **named, BY_OPTIONS: bool(saved.get(BY_OPTIONS))}


def check_positions(saved: Mapping[str, Any], component: str, path: str) -> None:
    """Reject a state in which parameters have no numbers, share one, or have anything other than a dict of slots.

    Raises:
        DamagedCheckpointError: The state is such a one.
    """
    positions = [position for group in saved["param_groups"] for position in group["params"]]
    if not all(type(position) in (int, str) for position in positions) or len(set(positions)) < len(positions):
        what = "its groups do not have a number for each parameter"
    elif not all(isinstance(saved["state"].get(position, {}), Mapping) for position in positions):
        what = "a parameter's state is not a dict"
    else:
        return
    raise DamagedCheckpointError(
        f"'{path}' is damaged: its '{component}' is not what an optimizer saves ({what}). Use another checkpoint.",
        path=path,
    )


def stated_names(
    groups: Sequence[Mapping[str, Any]], known: Collection[str], kept_of: Mapping[str, str]
) -> list[list[str]] | None:
    """Return the names that the groups state themselves, without wrappers; None if not all of them do.

    Args:
        groups: The `param_groups` of a state.
        known: The names of the model's parameters.
        kept_of: Each name of a tied parameter -> the one by which it is known.
    """
    names = [group.get("param_names") for group in groups]
    are_stated = [
        isinstance(own, list) and len(own) == len(group["params"]) and all(isinstance(one, str) for one in own)
        for own, group in zip(names, groups)
    ]
    if not all(are_stated):
        return None
    flat = [one for own in names for one in own or ()]
    all_names = {**{name: name for name in known}, **kept_of}
    matched = match_prefixes(flat, all_names)
    if not all_names.keys() >= set(matched.values()):  # for example names of `model.generator.named_parameters()`
        prefixes = {name.removesuffix(flat[0]) for name in all_names if name.endswith((f".{flat[0]}", f":{flat[0]}"))}
        fitting = [one for one in prefixes if {all_names.get(f"{one}{name}") for name in flat} == set(known)]
        matched = {name: f"{one}{name}" for one in fitting for name in flat} or matched
    return [[all_names.get(matched[one], matched[one]) for one in own or ()] for own in names]


def _check_counts(
    groups: Sequence[Mapping[str, Any]], built: Sequence[Sequence[str]], component: str, path: str
) -> None:
    before = [len(group["params"]) for group in groups]
    now = [len(group) for group in built]
    if before != now:
        raise StateDictMismatchError(
            f"The groups of '{component}' had {before} parameters in '{path}', but have {now} now. Build the optimizer "
            "with the same parameters in the same groups, or pass strict=False to leave it as built.",
            path=path,
            expected=before,
            actual=now,
        )


def _names_of_group(
    built: Sequence[str],
    states: Sequence[Mapping[str, Any]],
    shapes: Mapping[str, tuple[int, ...]],
    in_model: Sequence[str],
    in_file: Sequence[str],
    component: str,
    path: str,
) -> list[str]:
    """Return the names that a group's positions had in the file, whose states are by position."""
    own = set(built)
    before = [name for name in in_file if name in own]
    in_both = set(before)
    now = [name for name in in_model if name in in_both]
    is_told_nothing = len(before) < len(built) and not _owners(built, states)
    if before == now or are_sorted_by_name(in_file) or is_told_nothing:
        return list(built)
    why = ""
    if list(built) == now and before != sorted(before):
        fitting = [one for one in (before, now) if _misfit(dict(zip(one, states)), shapes) is None] or [before]
        if len(fitting) == 1 or _owners(before, states) == _owners(now, states):
            return fitting[0]
        why = ", and the states fit both orders"
    raise StateDictMismatchError(
        f"'{path}' lists the parameters of '{component}' by position, but its weights are in another order than the "
        f"model's ({shorten_list(before, _SHOWN, quote=True)}; now {shorten_list(now, _SHOWN, quote=True)}){why}: the "
        "states cannot be matched to parameters. Build the model and its optimizer's groups in the order of the saved "
        "run. Or pass strict=False, which leaves the optimizer's state out and reports it; if its groups still have "
        "the saved order, its own load_state_dict can load that state by position.",
        path=path,
    )


def _owners(names: Sequence[str], states: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the parameters whose states have any value."""
    return [name for name, slots in zip(names, states) if any(value is not None for value in slots.values())]


def are_sorted_by_name(names: Sequence[str]) -> bool:
    """Return whether weights were sorted by name, so that their order does not show the model's.

    In a model's order the weight of a layer comes before its bias.

        assert are_sorted_by_name(["0.bias", "0.weight"])
    """
    known = set(names)
    is_told = any(name.endswith("bias") and f"{name.removesuffix('bias')}weight" in known for name in names)
    return is_told and list(names) == sorted(names)


def _check_shapes(state: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], component: str, path: str) -> None:
    """Reject a state that has another parameter's shape."""
    if (found := _misfit(state, shapes)) is not None:
        name, slot, shape = found
        raise StateDictMismatchError(
            f"'{slot}' of '{name}' has shape {shape} in '{path}', but the parameter has {list(shapes[name])}: "
            f"'{component}' had other parameters, or had them in another order. Build it as in the saved run, or pass "
            "strict=False to leave it as built.",
            path=path,
            fqn=name,
        )


def _misfit(state: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, str, list[int]] | None:
    """Find a parameter, and a slot of its state that has another parameter's shape; None if all fit."""
    for name, slots in state.items():
        shape = shapes.get(name)
        for slot, value in slots.items() if isinstance(slots, Mapping) else ():
            if shape is None or not isinstance(value, torch.Tensor) or tuple(value.shape) == shape:
                continue
            if slot in LIKE_THEIR_PARAMETER or sorted(value.shape) == sorted(shape):
                return name, slot, list(value.shape)
    return None


# Names of an optimizer's parameters from the weights next to it, without a model.


_STATISTICS = ("running_mean", "running_var")
"""Buffers of torch's normalizations, which look like parameters."""


def names_by_order(saved: Mapping[str, Any], weights: Mapping[str, Any], component: str, path: str) -> list[str]:
    """Find the names of an optimizer's parameters, if the weights in their order allow only one assignment.

    Args:
        saved: What its `state_dict()` returned, with one group.
        weights: The model's weights, in their order.
        component: The optimizer's name, for messages.
        path: The file's path, for messages.

    Raises:
        InvalidArgumentError: It has several groups; or there is no such assignment, or several.
    """
    groups = saved["param_groups"]
    if len(groups) != 1:
        raise unknown_owners(component, path, f"its {len(groups)} groups have numbers, not names, for parameters")
    names = _possible_parameters(weights)
    shapes = [_shape_of(saved["state"].get(position)) for position in groups[0]["params"]]
    first = _match(shapes, names, weights)
    last = _match(shapes[::-1], names[::-1], weights)
    if first is None or last is None:
        raise unknown_owners(
            component, path, f"its {len(shapes)} parameters do not match the {len(names)} weights in order"
        )
    if first != last[::-1]:
        other = next(one for one, another in zip(first, last[::-1]) if one != another)
        raise unknown_owners(component, path, f"its {len(shapes)} parameters match with or without '{other}'")
    return first


def _possible_parameters(weights: Mapping[str, Any]) -> list[str]:
    """List trainable weights. A tensor of several names appears at the first, by the one under which a run knows it."""
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
    """Return the shape of the parameter that a state belongs to; None if the state does not show it."""
    for slot, value in slots.items() if isinstance(slots, Mapping) else ():
        if slot in LIKE_THEIR_PARAMETER and isinstance(value, torch.Tensor):
            return tuple(value.shape)
    return None


def _match(
    shapes: Sequence[tuple[int, ...] | None], names: Sequence[str], weights: Mapping[str, Any]
) -> list[str] | None:
    """Find the first names in order that have the shapes; None if there are none.

    There is only one way to choose them if the first ones from the other end are the same.
    """
    found: list[str] = []
    for name in names:
        if len(found) < len(shapes) and shapes[len(found)] in (None, tuple(weights[name].shape)):
            found.append(name)
    return found if len(found) == len(shapes) else None


def unknown_owners(component: str, path: str, why: str) -> InvalidArgumentError:
    """Build the error for an optimizer whose parameters cannot be named, with the reason."""
    return InvalidArgumentError(
        f"Cannot convert '{path}' without the model: the states of '{component}' cannot be matched to parameters, "
        f"because {why}. Build the model and the optimizer as in the saved run, and convert in Python: "
        f"manager.restore(state, {path!r}); manager.save(step, state). Or convert only the weights: hfshard convert "
        "--weights.",
        path=path,
    )
