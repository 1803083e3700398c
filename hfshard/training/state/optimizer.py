"""An optimizer's state by parameter name, in the dtypes that it had; it is restored completely or rejected."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from hfshard._util.text import shorten_list
from hfshard.errors import InvalidArgumentError, StateDictMismatchError, UnstorableTensorError
from hfshard.tensors.flat_tensor import PartOfTensor
from hfshard.training.state.nested import encode, find_in
from hfshard.training.state.pending_loads import PendingLoad, check_options, class_mismatch
from hfshard.training.state.reordering import (
    Names,
    Reordering,
    find_ordered_state,
    get_entry,
    is_per_parameter,
    matched_positions,
    with_items,
)

_SHOWN = 5
"""The number of names that a message lists."""

BY_OPTIONS = "by_options"
"""Key of a state in which each group has the parameters with equal options: it was saved without groups."""


def encode_optimizer(
    optimizer: Optimizer, names: Names, component: str, tensors: dict[str, torch.Tensor], prefix: str = ""
) -> dict[str, Any]:
    """Encode the state of an optimizer with `nested.encode`; its tensors are named "<parameter>/<slot>".

    Args:
        optimizer: Any optimizer; it is not changed.
        names: The names of all parameters that it may have.
        component: Its name in the training state, for messages.
        tensors: Receives its tensors by name.
        prefix: Prepended to the names of the tensors.

    Raises:
        InvalidArgumentError: A parameter has no name.
        UnstorableTensorError: A value in its state cannot be stored, or torch cannot load it again.
    """
    named = by_name(optimizer.state_dict(), group_names(optimizer, names, component), left_out=("params",))
    if _loads_as_torch(optimizer):
        for name, value in chain(named["state"].items(), named["others"].items()):
            _reject_unloadable(value, component, name)
    encoded = encode_by_name(named, tensors, prefix)
    return {"class": type(optimizer).__qualname__, **encoded, "gradients": _note_gradients(optimizer, names)}


def by_name(saved: Mapping[str, Any], groups: Sequence[Sequence[str]], *, left_out: Collection[str]) -> dict[str, Any]:
    """Return what an optimizer's `state_dict()` returned in the form that is stored: by the names of parameters.

    Args:
        saved: That state.
        groups: The names of each group's parameters.
        left_out: Keys of a group that are not options.
    """
    owners = names_of_positions(saved, groups)
    return {
        "groups": [
            {"params": list(own), "options": {key: one for key, one in group.items() if key not in left_out}}
            for group, own in zip(saved["param_groups"], groups)
        ],
        "state": {owners[key]: value for key, value in saved["state"].items() if key in owners},
        "others": {key: value for key, value in saved["state"].items() if key not in owners},
        "more": {key: value for key, value in saved.items() if key not in ("state", "param_groups")},
    }


def names_of_positions(saved: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> dict[Any, str]:
    """Map the key of each parameter in what an optimizer's `state_dict()` returned to its name."""
    pairs = zip(saved["param_groups"], groups)
    return {key: name for group, own in pairs for key, name in zip(group["params"], own)}


def encode_by_name(named: Mapping[str, Any], tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, Any]:
    """Encode what `by_name` returned, as `encode_optimizer` does."""
    return {
        "groups": [
            {**group, "options": encode(group["options"], f"{prefix}param_groups/{number}", tensors)}
            for number, group in enumerate(named["groups"])
        ],
        "state": {name: encode(value, f"{prefix}{name}", tensors) for name, value in named["state"].items()},
        "others": encode(named["others"], f"{prefix}others", tensors),
        "more": encode(named["more"], f"{prefix}more", tensors),
    }


def plan_optimizer(optimizer: Optimizer, saved: dict[str, Any], names: Names, component: str, path: str) -> PendingLoad:
    """Check a state against an optimizer, and return the load that applies it.

    Args:
        optimizer: Built as for the run that was saved; parameters and groups may be in another order. It is not changed
            before the load.
        saved: What `encode_optimizer` returned, decoded. For another program's state, the class is None; and
            `by_position` is true if its parameters got their names by their order.
        names: The names of the parameters that it has now.
        component: Its name in the training state, for messages.
        path: The checkpoint's path, for messages.

    Raises:
        StateDictMismatchError: The state is of another class, or its groups have other parameters; or these are in
            another order, and a part of the state depends on it.
    """
    _check_form(saved)
    if saved["class"] is None:
        check_options(optimizer, [group["options"] for group in saved["groups"]], component, path)
    elif saved["class"] != type(optimizer).__qualname__:
        raise class_mismatch(saved["class"], optimizer, "optimizer", component, path)
    current = optimizer.state_dict()
    built = group_names(optimizer, names, component)
    is_same_order = built == [group["params"] for group in saved["groups"]]
    matched = saved["groups"] if is_same_order else _matched_groups(built, saved["groups"], component, path)
    positions = {name: position for position, name in names_of_positions(current, built).items()}
    unknown = [name for name in saved["state"] if name not in positions]
    if unknown:
        shown = shorten_list(unknown, _SHOWN, quote=True)
        raise StateDictMismatchError(
            f"The checkpoint '{path}' has a state of {shown}, which '{component}' does not train. Pass the optimizer "
            "the parameters that it had.",
            path=path,
            unexpected_keys=tuple(unknown),
        )
    state = {positions[name]: value for name, value in saved["state"].items()} | saved["others"]
    if not is_same_order:
        _reject_ordered_state(optimizer, saved, names, component, path)
    groups = [
        {**now, **to_devices_of(_options_in_order(optimizer, number, before, names, component, path), now)}
        | {key: now[key] for key in ("param_names", "params") if key in now}
        for number, (now, before) in enumerate(zip(current["param_groups"], matched))
    ]
    loaded = {**saved["more"], "state": state, "param_groups": groups}
    if _loads_as_torch(optimizer):
        _twin(optimizer).load_state_dict(loaded)

    before = dict(vars(optimizer))

    filled: list[Callable[[], None]] = []

    def load() -> None:
        held, options = optimizer.state, [*optimizer.param_groups]
        optimizer.load_state_dict(loaded)
        filled.append(fill_options([*optimizer.param_groups], options))
        for parameter in trained_parameters(optimizer):
            kept = saved["state"].get(names[id(parameter)])
            if kept is not None and parameter in optimizer.state:
                slots = exact(optimizer.state[parameter], kept, held.get(parameter))
                if isinstance(slots, dict):
                    slots = {key: with_memory_format_of(parameter, value) for key, value in slots.items()}
                optimizer.state[parameter] = slots

    def undo() -> None:
        vars(optimizer).update(before)
        for put_back in filled:
            put_back()

    return PendingLoad(component, load, undo)


def _loads_as_torch(optimizer: Optimizer) -> bool:
    return type(optimizer).load_state_dict is Optimizer.load_state_dict


def _reject_unloadable(state: Any, component: str, name: Any) -> None:
    """Reject a state that torch's `load_state_dict` cannot load: it builds what can be iterated from a generator."""
    found: list[Any] = []

    def is_unloadable(value: Any) -> bool:
        if isinstance(value, torch.Tensor | dict) or not isinstance(value, Iterable):
            return False
        build: Callable[[Iterator[Any]], object] = type(value)
        try:
            build(item for item in value)
        except TypeError:
            found.append(value)
        return bool(found)

    place = find_in(state, is_unloadable)
    if place is not None:
        kind = f"{type(found[0]).__module__}.{type(found[0]).__qualname__}".removeprefix("builtins.")
        what = f"'{place}' in the state of '{name}'" if place else f"The state of '{name}'"
        raise UnstorableTensorError(
            f"{what} in '{component}' is a {kind}, which torch's load_state_dict cannot load. Nothing was saved. "
            "Keep a tensor or a list there instead.",
            fqn=f"{name}/{place}",
            actual=kind,
        )


def _twin(optimizer: Optimizer) -> Optimizer:
    """Build another optimizer of the same parameters and attributes, which loads a state alone and calls no hooks.

    (`copy.copy` omits the attributes of a user's class, which its `__setstate__` may need.)
    """
    twin: Optimizer = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    for hooks in ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"):
        vars(twin)[hooks] = OrderedDict()
    return twin


def group_names(optimizer: Optimizer, names: Names, component: str) -> list[list[str]]:
    """Return the names of the parameters in each group of an optimizer.

    Raises:
        InvalidArgumentError: A parameter has no name.

    Example:
        assert group_names(optimizer, parameter_names(model), "optimizer") == [["weight", "bias"]]
    """
    return [
        [_name_of(one, names, component, number) for one in group["params"]]
        for number, group in enumerate(optimizer.param_groups)
    ]


def regroup(saved: dict[str, Any], optimizer: Optimizer, names: Names, component: str, path: str) -> dict[str, Any]:
    """Return a state whose groups are those that were built, as far as another program has not saved them.

    Frozen parameters join the group of the others that they were built with: frameworks leave them out.

    Args:
        saved: As `plan_optimizer` has it. With `BY_OPTIONS`, each group has the parameters with equal options.
        optimizer: The one that was built; it is not changed.
        names, component, path: As in `plan_optimizer`.

    Raises:
        StateDictMismatchError: The parameters of a group had different options.
    """
    built = group_names(optimizer, names, component)
    if saved["class"] is None:
        saved = {**saved, "groups": _with_frozen(saved["groups"], optimizer, built)}
    if not saved.get(BY_OPTIONS):
        return saved
    before = {name: group for group in saved["groups"] for name in group["params"]}
    if before.keys() != {name for own in built for name in own}:
        return saved  # `plan_optimizer` names those that differ
    for number, own in enumerate(built):
        other = next((name for name in own if before[name] is not before[own[0]]), None)
        if other is not None:
            raise StateDictMismatchError(
                f"Group {number} of '{component}' has '{own[0]}' and '{other}', which had different options in "
                f"'{path}'. Build the optimizer with the groups of the saved run, or pass strict=False to leave it as "
                "built.",
                path=path,
                fqn=other,
            )
    groups = [{**before[own[0]], "params": list(own)} for own in built if own]
    return {**saved, "groups": groups}


def _with_frozen(
    groups: Sequence[Mapping[str, Any]], optimizer: Optimizer, built: Sequence[Sequence[str]]
) -> list[dict[str, Any]]:
    """Return the groups with the frozen parameters that they lack."""
    owners = {name: number for number, group in enumerate(groups) for name in group["params"]}
    added: list[list[str]] = [[] for _ in groups]
    for group, own in zip(optimizer.param_groups, built):
        number = next((owners[name] for name in own if name in owners), None)
        if number is not None:
            are_frozen = zip(own, (not one.requires_grad for one in group["params"]))
            added[number] += [name for name, is_frozen in are_frozen if is_frozen and name not in owners]
    return [{**group, "params": [*group["params"], *more]} for group, more in zip(groups, added)]


def with_groups(optimizer: Optimizer, groups: list[dict[str, Any]], state: Mapping[Any, Any]) -> Optimizer:
    """Return a copy of an optimizer that has other parameters, in other memory than what it steps on.

    Args:
        optimizer: Not changed.
        groups: The copy's groups.
        state: The state of each parameter that has one.
    """
    named: Optimizer = object.__new__(type(optimizer))
    vars(named).update(vars(optimizer))
    named.param_groups = groups
    named.state = defaultdict(dict, state)
    return named


def _check_form(saved: dict[str, Any]) -> None:
    """Reject what `encode_optimizer` does not write, by a TypeError or KeyError, before it changes anything."""
    groups = saved["groups"]
    if not isinstance(groups, list) or not all(isinstance(group["params"], list) for group in groups):
        raise TypeError("the groups, or the names of a group's parameters, must be lists")
    dicts = [saved["state"], saved["others"], saved["more"]]
    dicts += [group["options"] for group in groups]
    names = [name for group in groups for name in group["params"]]
    if not all(isinstance(one, dict) for one in dicts) or not all(isinstance(name, str) for name in names):
        raise TypeError("a state, a group or its options is not a dict, or a parameter's name is not text")


def _name_of(parameter: torch.Tensor, names: Names, component: str, group: int) -> str:
    if id(parameter) not in names:
        raise InvalidArgumentError(
            f"Group {group} of '{component}' has a parameter of shape {list(parameter.shape)} that belongs to no "
            "module of the training state, and so has no name. Pass its module too: TrainingState(..., other=module)."
        )
    return names[id(parameter)]


def _matched_groups(
    current: Sequence[Sequence[str]], saved: list[dict[str, Any]], component: str, path: str
) -> list[dict[str, Any]]:
    """Find the saved group for each of the optimizer's groups: the one with the same parameters, in any order."""
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
        parts.append(f"{shorten_list(missing, _SHOWN, quote=True)} {_were(missing)} not trained by it")
    if unexpected:
        shown = shorten_list(unexpected, _SHOWN, quote=True)
        parts.append(f"{shown} {_were(unexpected)} trained by it, and {_are(unexpected)} not now")
    moved = [name for name in now if name in before and before[name] != now[name]]
    if moved and not (missing or unexpected):
        shown = shorten_list(moved, _SHOWN, quote=True)
        change = f"'{moved[0]}': {before[moved[0]]}, now {now[moved[0]]}"
        parts.append(f"{shown} {_were(moved)} in another group ({change})")
    raise StateDictMismatchError(
        f"The groups of '{component}' differ from the checkpoint '{path}': {'; '.join(parts)}. Build the optimizer "
        "with the same parameters in the same groups, or pass strict=False to leave it as built.",
        path=path,
        missing_keys=tuple(missing),
        unexpected_keys=tuple(unexpected),
    )


def _reject_ordered_state(optimizer: Optimizer, saved: dict[str, Any], names: Names, component: str, path: str) -> None:
    """Reject a state that belongs not to one parameter but to all in their order, which has changed."""
    before = [group["params"] for group in saved["groups"]]
    if saved.get("by_position"):
        raise _ordered("state", optimizer, [name for group in before for name in group], component, path)
    parameters = {names[id(one)]: one for one in trained_parameters(optimizer)}
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
        f"which differs from the checkpoint '{path}'. Pass it the parameters in the order of the saved run "
        f"({shorten_list(in_order, _SHOWN, quote=True)}), or pass strict=False to leave it as built.",
        path=path,
    )


def _options_in_order(
    optimizer: Optimizer, number: int, saved: dict[str, Any], names: Names, component: str, path: str
) -> dict[str, Any]:
    """Return the saved options of a group; those with an entry for each parameter are in the current order."""
    group = optimizer.param_groups[number]
    current = [names[id(one)] for one in group["params"]]
    if current == saved["params"]:
        return dict(saved["options"])
    before = {name: position for position, name in enumerate(saved["params"])}
    is_one_each = is_per_parameter(group["params"])
    reordering = Reordering(
        part=component,
        owners=f"parameters of its group {number}",
        path=path,
        positions=tuple(before[name] for name in current),
        counts=frozenset({len(current)}),
        known=frozenset({"param_names"}),
    )
    # An option with a default is the same for groups of any size: betas are not one for each of two parameters.
    own = {key: value for key, value in saved["options"].items() if key not in optimizer.defaults}
    place = find_in(own, lambda value: hasattr(value, "shape") and is_one_each(value), f"group {number}")
    if place is not None:
        raise _ordered(place, optimizer, saved["params"], component, path)
    options: dict[str, Any] = saved["options"] | reordering.apply(own, group, f".group {number}")
    return options


def trained_parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters in the groups of an optimizer.

    Example:
        count = sum(one.numel() for one in trained_parameters(optimizer))
    """
    for group in optimizer.param_groups:
        yield from group["params"]


# Which parameters have a gradient after a step: the next one skips those without, and decays those whose gradient is
# zero, which `zero_grad(set_to_none=False)` leaves. The values need no place in a checkpoint.


def _note_gradients(optimizer: Optimizer, names: Names) -> dict[str, int]:
    """Return the name of each parameter with a gradient -> its number of sparse dimensions, 0 if it is dense."""
    return {
        names[id(one)]: one.grad.sparse_dim() if one.grad.is_sparse else 0
        for one in trained_parameters(optimizer)
        if one.grad is not None
    }


def match_gradients(optimizer: Optimizer, names: Names, saved: Mapping[str, int]) -> dict[int, int]:
    """Return the id of each parameter that had a gradient -> the number of its sparse dimensions.

    Args:
        optimizer: The one that was built; it is not changed.
        names: The names of the parameters that it has now.
        saved: "gradients" of what `encode_optimizer` returned; empty for a checkpoint without it.

    Raises:
        ValueError, AttributeError: `encode_optimizer` does not write that.
    """
    found = {}
    for one in trained_parameters(optimizer):
        sparse_dim = saved.get(names[id(one)])
        if sparse_dim is not None:
            found[id(one)] = range(one.ndim + 1).index(sparse_dim)  # a ValueError for any other value
    return found


def zero_gradient(parameter: torch.Tensor, sparse_dim: int) -> torch.Tensor:
    """Create a gradient of zeros, in the layout of the one that the parameter had."""
    zeros = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
    return zeros.to_sparse(sparse_dim) if sparse_dim else zeros


def _were(names: list[str]) -> str:
    return "was" if len(names) == 1 else "were"


def _are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


# Tensors of an optimizer's state as they were saved: dtypes, devices and the order in memory.


def to_devices_of(options: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved options, with tensors (a learning rate) on the devices of the current ones."""
    moved = dict(options)
    for key, value in options.items():
        if isinstance(value, torch.Tensor) and isinstance(now := group.get(key), torch.Tensor):
            moved[key] = value.to(now.device)
    return moved


def fill_options(groups: Sequence[dict[str, Any]], held: Sequence[Mapping[str, Any]]) -> Callable[[], None]:
    """Copy tensors of options into those that the groups had: the program may have references to them, and change them.

    Args:
        groups: The groups as loaded; the previous groups' tensors replace the loaded ones that fit into them. A tensor
            that several groups shared is not kept if their values differ now.
        held: The previous groups, in the same order.

    Returns:
        A function that restores the old values.
    """
    uses: dict[int, list[tuple[torch.Tensor, dict[str, Any], str]]] = {}
    for options, group in zip(groups, held, strict=False):
        for key, own in group.items():
            if isinstance(own, torch.Tensor) and isinstance(options.get(key), torch.Tensor):
                uses.setdefault(id(own), []).append((own, options, key))
    before: list[tuple[torch.Tensor, torch.Tensor]] = []
    for found in uses.values():
        own = found[0][0]
        values = [options[key] for _, options, key in found]
        if any((one.shape, one.dtype) != (own.shape, own.dtype) or not torch.equal(one, values[0]) for one in values):
            continue
        before.append((own, own.detach().clone()))
        _fill(own, values[0])
        for _, options, key in found:
            options[key] = own

    def put_back() -> None:
        for own, numbers in before:
            _fill(own, numbers)

    return put_back


def _fill(tensor: torch.Tensor, numbers: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(numbers)


def exact(loaded: Any, saved: Any, now: Any = None) -> Any:
    """Undo what `load_state_dict` did: torch casts a state to the dtype of its parameter, and moves it to its device.

    It also builds each container anew, as a plain dict or without its length, and text from a generator's name.

    Args:
        loaded: A parameter's state after `load_state_dict`.
        saved: The state that was passed to it.
        now: The previous state of the optimizer, if any: what it kept on another device than the parameter's stays
            there.
    """
    if isinstance(loaded, torch.Tensor) and isinstance(saved, torch.Tensor):
        device = now.device if isinstance(now, torch.Tensor) else loaded.device
        return (loaded if loaded.dtype == saved.dtype else saved).to(device)
    if isinstance(loaded, dict) and isinstance(saved, dict):
        found = copy.copy(saved)
        found.clear()
        for key, value in loaded.items():
            found[key] = exact(value, saved[key], get_entry(now, key)) if key in saved else value
        return found
    is_alike = type(loaded) is type(saved)
    if is_alike and isinstance(saved, list | tuple | deque) and len(loaded) == len(saved):
        return with_items(saved, lambda number, item: exact(loaded[number], item, get_entry(now, number)))
    return saved if is_alike and isinstance(saved, str) else loaded


def with_memory_format_of(parameter: torch.Tensor, value: Any) -> Any:
    """Give a state the memory format of its parameter: fused optimizers go through memory, not through indexes."""
    if not isinstance(value, torch.Tensor) or isinstance(value, PartOfTensor):
        return value
    if value.shape != parameter.shape or value.stride() == parameter.stride():
        return value
    alike = torch.empty_like(parameter, dtype=value.dtype, device=value.device, requires_grad=False)
    return alike.copy_(value) if alike.stride() == parameter.stride() else value


# Optimizers that step by an inner one: its state is saved, and what they share stays shared.


def reject_unsaved(optimizer: Optimizer, component: str, parts: Iterable[object]) -> None:
    """Reject an optimizer with an inner one whose state is neither in its state_dict nor saved as another part.

    Args:
        optimizer: Any optimizer.
        component: Its name in the training state, for messages.
        parts: All parts of the training state.

    Raises:
        InvalidArgumentError: The state would be lost, or each rank has a part of it.
    """
    reject_sharded_state(optimizer, component)
    saved = {id(part) for part in parts}
    inner = {name: one for name, one in _inner_optimizers(optimizer) if one.state and id(one) not in saved}
    keys = set(_keys_in(optimizer.state_dict())) if inner else set()
    for name, one in inner.items():
        slots = {key: value for held in one.state.values() if isinstance(held, dict) for key, value in held.items()}
        lost = [key for key, value in slots.items() if value is not None and key not in keys]
        if lost:
            raise InvalidArgumentError(
                f"'{component}' ({type(optimizer).__qualname__}) steps with its {name} ({type(one).__qualname__}), but "
                f"its state_dict lacks that one's {shorten_list(lost, _SHOWN, quote=True)}, so a resume would lose "
                f"them. Pass that optimizer too: TrainingState(..., inner=optimizer.{name})."
            )


def reject_sharded_state(optimizer: Optimizer, component: str) -> None:
    """Reject an optimizer whose state is in parts on the ranks, without names.

    Raises:
        InvalidArgumentError: It is a ZeroRedundancyOptimizer.
    """
    if any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__):
        raise InvalidArgumentError(
            f"'{component}' is a ZeroRedundancyOptimizer: each rank has only a part of its state, and the whole exists "
            "only as of its last consolidation. Shard the model and use a plain optimizer instead: "
            "torch.distributed.fsdp.fully_shard(model)."
        )


def link_inner_optimizers(load: PendingLoad, optimizer: Optimizer, optimizers: Iterable[Optimizer]) -> PendingLoad:
    """Let an optimizer's inner optimizers, and those that share its groups, follow its load and its undo.

    A load creates new groups: optimizers that had the same list of groups have the same again, so that a learning rate
    which a scheduler sets reaches both.

    Args:
        load: The optimizer's load.
        optimizer: It is not changed before the load.
        optimizers: All optimizers of the training state.
    """
    groups = optimizer.param_groups
    sharing = [one for one in optimizers if one is not optimizer and one.param_groups is groups]
    partners = {id(one): one for one in [*sharing, *(one for _, one in _inner_optimizers(optimizer))]}
    if not partners:
        return load
    joined = [one for one in partners.values() if one.param_groups is groups]
    before = [(one, dict(vars(one))) for one in partners.values()]

    def load_all() -> None:
        load.load()
        lists = [one.param_groups for one in (optimizer, *joined)]
        loaded = next((held for held in lists if held is not groups), groups)  # one may pass its load on to another
        for one in (optimizer, *joined):
            if one.param_groups is not loaded:
                one.param_groups = loaded

    def undo() -> None:
        if load.undo is not None:
            load.undo()
        for one, attributes in before:
            vars(one).update(attributes)

    return PendingLoad(load.name, load_all, undo)


def _inner_optimizers(optimizer: Optimizer) -> Iterator[tuple[str, Optimizer]]:
    """Yield the optimizers among the attributes of one, or in lists and dicts there, each with its place."""
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer):
            yield name, value
        elif isinstance(value, list | tuple):
            yield from ((f"{name}[{at}]", one) for at, one in enumerate(value) if isinstance(one, Optimizer))
        elif isinstance(value, dict):
            yield from ((f"{name}[{key!r:.50}]", one) for key, one in value.items() if isinstance(one, Optimizer))


def _keys_in(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value
        value = value.values()
    elif not isinstance(value, list | tuple):
        return
    for item in value:
        yield from _keys_in(item)
