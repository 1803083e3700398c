"""An optimizer's state by parameter name, in the dtypes that it had; it is restored completely or refused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from hfshard._util.text import list_some
from hfshard.errors import InvalidArgumentError, StateDictMismatchError
from hfshard.training.parts.nested import encode
from hfshard.training.parts.optimizers.tensors import exact, fill_options, lying_like, moved_like
from hfshard.training.parts.pending_loads import PendingLoad
from hfshard.training.parts.positions.holders import Names
from hfshard.training.parts.positions.ordered_state import find_in, find_ordered_state, one_per_parameter
from hfshard.training.parts.positions.reordering import Reordering, matched_positions
from hfshard.training.parts.same_class import check_class, check_options

_SHOWN = 5
"""How many names a message lists."""


def encode_optimizer(
    optimizer: Optimizer, names: Names, component: str, tensors: dict[str, torch.Tensor], prefix: str = ""
) -> dict[str, Any]:
    """Encode the state of an optimizer (see `nested.encode`); its tensors are named "<parameter>/<slot>".

    Args:
        optimizer: Any optimizer; it is not changed.
        names: The names of all parameters that it may have.
        component: Its name in the training state, for messages.
        tensors: Receives its tensors by name.
        prefix: Put before the names of the tensors.

    Raises:
        InvalidArgumentError: A parameter has no name.
        UnstorableTensorError: A value in its state can't be stored.
    """
    state_dict = optimizer.state_dict()
    position_names = _position_names(optimizer, state_dict, names, component)
    groups = []
    for number, (packed, group) in enumerate(zip(state_dict["param_groups"], optimizer.param_groups)):
        options = {key: value for key, value in packed.items() if key != "params"}
        groups.append(
            {
                "params": [_name_of(parameter, names, component, number) for parameter in group["params"]],
                "options": encode(options, f"{prefix}param_groups/{number}", tensors),
            }
        )
    state = {
        position_names[key]: encode(value, f"{prefix}{position_names[key]}", tensors)
        for key, value in state_dict["state"].items()
        if key in position_names
    }
    others = {key: value for key, value in state_dict["state"].items() if key not in position_names}
    more = {key: value for key, value in state_dict.items() if key not in ("state", "param_groups")}
    return {
        "class": type(optimizer).__qualname__,
        "groups": groups,
        "state": state,
        "others": encode(others, f"{prefix}others", tensors),
        "more": encode(more, f"{prefix}more", tensors),
    }


def plan_optimizer(optimizer: Optimizer, saved: dict[str, Any], names: Names, component: str, path: str) -> PendingLoad:
    """Check a state against an optimizer, and return what loads it.

    Args:
        optimizer: Built as for the run that was saved; parameters and groups may be in another order. It is not changed
            before the load.
        saved: What `encode_optimizer` returned, decoded. Of another program's its class is None; and `by_position` is
            true if its parameters got their names by their order.
        names: The names of the parameters that it has now.
        component: Its name in the training state, for messages.
        path: The checkpoint's, for messages.

    Raises:
        StateDictMismatchError: It is of another class, or its groups have other parameters; or these stand in another
            order, and a part of the state depends on it.
    """
    _check_form(saved)
    check_class(saved["class"], optimizer, "optimizer", component, path)
    if saved["class"] is None:
        check_options(optimizer, [group["options"] for group in saved["groups"]], component, path)
    current = optimizer.state_dict()
    position_names = _position_names(optimizer, current, names, component)
    matched = _matched_groups(optimizer, saved["groups"], names, component, path)
    positions = {name: position for position, name in position_names.items()}
    unknown = [name for name in saved["state"] if name not in positions]
    if unknown:
        shown = list_some(unknown, _SHOWN, quote=True)
        raise StateDictMismatchError(
            f"The checkpoint '{path}' has a state of {shown}, which '{component}' does not train. "
            "Give the optimizer the parameters that it had.",
            path=path,
            unexpected_keys=tuple(unknown),
        )
    state = {positions[name]: value for name, value in saved["state"].items()} | saved["others"]
    _refuse_ordered_state(optimizer, saved, names, component, path)
    groups = [
        {**now, **moved_like(_options_in_order(optimizer, number, before, names, component, path), now)}
        | {**_kept_options(now), "params": now["params"]}
        for number, (now, before) in enumerate(zip(current["param_groups"], matched))
    ]
    loaded = {**saved["more"], "state": state, "param_groups": groups}
    if type(optimizer).load_state_dict is Optimizer.load_state_dict:
        _twin(optimizer).load_state_dict(loaded)

    before = dict(vars(optimizer))

    filled: list[Callable[[], None]] = []

    def load() -> None:
        held, options = optimizer.state, [*_groups(optimizer)]
        optimizer.load_state_dict(loaded)
        filled.append(fill_options([*_groups(optimizer)], options))
        for parameter in _all_parameters(optimizer):
            kept = saved["state"].get(names[id(parameter)])
            if kept is not None and parameter in optimizer.state:
                slots = exact(optimizer.state[parameter], kept, held.get(parameter))
                if isinstance(slots, dict):
                    slots = {key: lying_like(parameter, value) for key, value in slots.items()}
                optimizer.state[parameter] = slots

    def undo() -> None:
        vars(optimizer).update(before)
        for put_back in filled:
            put_back()

    return PendingLoad(component, load, undo)


def _twin(optimizer: Optimizer) -> Optimizer:
    """Another optimizer of the same parameters and attributes, which loads a state for itself, and calls no hooks.

    (`copy.copy` leaves out the attributes of a user's class, which its `__setstate__` may need.)
    """
    twin: Optimizer = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    for hooks in ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"):
        vars(twin)[hooks] = OrderedDict()
    return twin


def group_names(optimizer: Optimizer, names: Names, component: str) -> list[list[str]]:
    """The names of the parameters in each group of an optimizer.

    Raises:
        InvalidArgumentError: A parameter has no name.

    Example:
        assert group_names(optimizer, parameter_names(model), "optimizer") == [["weight", "bias"]]
    """
    return [
        [_name_of(one, names, component, number) for one in group["params"]]
        for number, group in enumerate(_groups(optimizer))
    ]


def _check_form(saved: dict[str, Any]) -> None:
    """Refuse what `encode_optimizer` does not write, before it changes anything.

    Raises:
        TypeError, KeyError: It is something else.
    """
    groups = saved["groups"]
    if not isinstance(groups, list) or not all(isinstance(group["params"], list) for group in groups):
        raise TypeError("the groups, or the names of a group's parameters, must be lists")
    dicts = [saved["state"], saved["others"], saved["more"]]
    dicts += [group["options"] for group in groups]
    names = [name for group in groups for name in group["params"]]
    if not all(isinstance(one, dict) for one in dicts) or not all(isinstance(name, str) for name in names):
        raise TypeError("a state, a group or its options is not a dict, or a parameter's name is not text")


def _position_names(
    optimizer: Optimizer, state_dict: Mapping[str, Any], names: Names, component: str
) -> dict[Any, str]:
    """Map the keys of parameters in an optimizer's state dict to their names."""
    return {
        key: _name_of(parameter, names, component, number)
        for number, (packed, group) in enumerate(zip(state_dict["param_groups"], optimizer.param_groups))
        for key, parameter in zip(packed["params"], group["params"])
    }


def _name_of(parameter: torch.Tensor, names: Names, component: str, group: int) -> str:
    if id(parameter) not in names:
        raise InvalidArgumentError(
            f"Group {group} of '{component}' has a parameter of shape {list(parameter.shape)} that belongs to no "
            "module of the training state, and so has no name. Pass its module too: TrainingState(..., other=module)."
        )
    return names[id(parameter)]


def _matched_groups(
    optimizer: Optimizer, saved: list[dict[str, Any]], names: Names, component: str, path: str
) -> list[dict[str, Any]]:
    """Find the saved group for each of the optimizer's groups: the one with the same parameters, in any order."""
    current = group_names(optimizer, names, component)
    positions = matched_positions(current, [group["params"] for group in saved])
    if positions is not None:
        return [saved[position] for position in positions]
    before = {name: number for number, group in enumerate(saved) for name in group["params"]}
    now = {name: number for number, group in enumerate(current) for name in group}
    missing = [name for name in now if name not in before]
    unexpected = [name for name in before if name not in now]
    parts = []
    if len(saved) != len(current):
        parts.append(f"it had {len(saved)} groups of parameters, and has {len(current)}")
    if missing:
        parts.append(f"{list_some(missing, _SHOWN, quote=True)} {_were(missing)} not trained by it")
    if unexpected:
        shown = list_some(unexpected, _SHOWN, quote=True)
        parts.append(f"{shown} {_were(unexpected)} trained by it, and {_are(unexpected)} not now")
    moved = [name for name in now if name in before and before[name] != now[name]]
    if moved and not (missing or unexpected):
        shown = list_some(moved, _SHOWN, quote=True)
        change = f"'{moved[0]}': {before[moved[0]]}, now {now[moved[0]]}"
        parts.append(f"{shown} {_were(moved)} in another group ({change})")
    raise StateDictMismatchError(
        f"The groups of '{component}' are not those of the checkpoint '{path}': {'; '.join(parts)}. "
        "Build the optimizer with the same parameters in the same groups, or pass strict=False to let it start afresh.",
        path=path,
        missing_keys=tuple(missing),
        unexpected_keys=tuple(unexpected),
    )


def _refuse_ordered_state(optimizer: Optimizer, saved: dict[str, Any], names: Names, component: str, path: str) -> None:
    """Refuse a state that is not of one parameter, but of all in their order, where that is another one now."""
    before = [group["params"] for group in saved["groups"]]
    if group_names(optimizer, names, component) == before:
        return
    if saved.get("by_position"):
        raise _ordered("state", optimizer, [name for group in before for name in group], component, path)
    parameters = {names[id(one)]: one for one in _all_parameters(optimizer)}
    place = find_ordered_state(saved, parameters)
    if isinstance(optimizer, LBFGS) and saved["state"]:
        place = f"state.{next(iter(saved['state']))}"
    if place is not None:
        raise _ordered(place, optimizer, [name for group in before for name in group], component, path)


def _ordered(
    place: str, optimizer: Optimizer, in_order: list[str], component: str, path: str
) -> StateDictMismatchError:
    return StateDictMismatchError(
        f"The '{place}' of '{component}' ({type(optimizer).__qualname__}) depends on the order of its parameters, "
        f"which is another one than in the checkpoint '{path}'. Give it the parameters in the order of that run "
        f"({list_some(in_order, _SHOWN, quote=True)}), or pass strict=False to let it start afresh.",
        path=path,
    )


def _options_in_order(
    optimizer: Optimizer, number: int, saved: dict[str, Any], names: Names, component: str, path: str
) -> dict[str, Any]:
    """The saved options of a group; those with an entry for each parameter in the order of now."""
    group = _groups(optimizer)[number]
    current = [names[id(one)] for one in group["params"]]
    if current == saved["params"]:
        return dict(saved["options"])
    before = {name: position for position, name in enumerate(saved["params"])}
    is_one_each = one_per_parameter(group["params"])
    reordering = Reordering(
        part=component,
        owners=f"parameters of its group {number}",
        path=path,
        positions=tuple(before[name] for name in current),
        counts=frozenset({len(current)}),
        known=frozenset({"param_names"}),
    )
    # What has a default is the same for groups of any size: betas are not one for each of two parameters.
    own = {key: value for key, value in saved["options"].items() if key not in optimizer.defaults}
    place = find_in(own, lambda value: hasattr(value, "shape") and is_one_each(value), f"group {number}")
    if place is not None:
        raise _ordered(place, optimizer, saved["params"], component, path)
    options: dict[str, Any] = saved["options"] | reordering.apply(own, group, f".group {number}")
    return options


def _groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    return optimizer.param_groups


def _all_parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in _groups(optimizer):
        yield from group["params"]


def _kept_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Options that depend on the current order of the parameters."""
    return {"param_names": group["param_names"]} if "param_names" in group else {}


def _were(names: list[str]) -> str:
    return "was" if len(names) == 1 else "were"


def _are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"
