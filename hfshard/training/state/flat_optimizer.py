"""Optimizers of parameters under FSDP1: their state by the names of the parameters in flat ones, and back."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from hfshard.errors import InvalidArgumentError, StateDictMismatchError
from hfshard.format.index import sha256_of
from hfshard.tensors.flat_tensor import FlatTensor
from hfshard.tensors.fsdp1 import FlatMember, FlatParameter, flat_parameters
from hfshard.training.state.optimizer import with_groups
from hfshard.training.state.reordering import Names
from hfshard.training.state.training_state import TrainingState

Exchange = Callable[[str, bytes], Iterable[bytes]]
"""Sends a message under a name to all ranks, and returns those of all."""


def with_named_states(state: TrainingState, exchange: Exchange | None = None) -> TrainingState:
    """Return a copy of a state that FSDP1 has flattened, whose optimizers have, by each parameter, parts of its state.

    A rank has a state only of parameters of which it has elements. The counts of the others come from the ranks that
    have their first elements.

    Args:
        state: Not changed.
        exchange: Every rank must call then, with the same optimizers; None: this rank's states alone.

    Raises:
        InvalidArgumentError: A state is not element by element; or the ranks disagree about one.
    """
    flats = _flats_of(state)
    names = state.parameter_names()
    named = copy.copy(state)
    named.components = {
        name: _named(part, name, flats, names, exchange) if state.kinds[name] == "optimizer" else part
        for name, part in state.components.items()
    }
    return named


def _flats_of(state: TrainingState) -> list[FlatParameter]:
    return list(chain.from_iterable(map(flat_parameters, state.naming_modules().values())))


def _named(
    optimizer: Optimizer, component: str, flats: Sequence[FlatParameter], names: Names, exchange: Exchange | None
) -> Optimizer:
    members = {id(member.parameter): member for flat in flats for member in flat.members}
    whole = {id(flat.variable): flat for flat in flats if flat.is_trained}
    groups: list[dict[str, Any]] = []
    slots: dict[torch.Tensor, Any] = {}
    for group in optimizer.param_groups:
        parameters = []
        for variable in group["params"]:
            inside, offsets = [members.get(id(variable))], [0]
            if id(variable) in whole:
                inside, offsets = [*whole[id(variable)].members], [*whole[id(variable)].offsets]
            held = optimizer.state.get(variable)
            for member, offset in zip(inside, offsets, strict=True):
                parameter = variable if member is None else member.parameter
                parameters.append(parameter)
                if held and (member is None or any(isinstance(one, FlatTensor) for one in held.values())):
                    slots[parameter] = held
                elif held and member is not None and member.tensor.local.numel():
                    slots[parameter] = _slots(held, variable, member, offset, component)
        groups.append({**group, "params": parameters})
    in_order = list(chain.from_iterable(group["params"] for group in groups))
    flattened = [members[id(one)] for one in in_order if id(one) in members]
    if exchange is not None:
        trained = [[names.get(id(one), "") for one in group["params"]] for group in groups]
        _share(slots, flattened, trained, component, names, exchange)
    return with_groups(optimizer, groups, {one: slots[one] for one in in_order if one in slots})


def _slots(held: Any, variable: torch.Tensor, member: FlatMember, offset: int, component: str) -> dict[str, Any]:
    """Return a parameter's state, in which parts stand for the tensors of the size of what the optimizer trains."""
    found: dict[str, Any] = {}
    for key, value in held.items():
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor and not isinstance(value, FlatTensor) and value.dim() and value.shape == variable.shape:
            count = member.tensor.local.numel()
            found[key] = member.tensor.with_local(value.detach().reshape(-1)[offset : offset + count])
        elif isinstance(value, FlatTensor | bool | int | float | str | None):
            found[key] = value
        elif is_tensor and not value.dim():
            found[key] = value.detach().clone()  # one of the flat parameter is one of each in it
        else:
            raise InvalidArgumentError(
                f"Cannot save '{component}': its '{key}' for '{member.name}' is neither one number nor as long as the "
                "part that this rank has, so what it means for the whole parameter is unknown under "
                "FullyShardedDataParallel. Use fully_shard, or another optimizer."
            )
    return found


def _share(
    slots: dict[torch.Tensor, Any],
    flattened: Sequence[FlatMember],
    trained: Sequence[Sequence[str]],
    component: str,
    names: Names,
    exchange: Exchange,
) -> None:
    """Add the state of parameters of which this rank has no elements; check that the ranks train the same ones."""
    rank = torch.distributed.get_rank()
    own = {names[id(one.parameter)]: _description(slots.get(one.parameter)) for one in flattened}
    first = {}
    for one in flattened:
        start, stop = one.tensor.flat.held(one.tensor.numel(), rank)
        if start == 0 and stop:
            first[names[id(one.parameter)]] = own[names[id(one.parameter)]]
    everywhere: dict[str, Any] = {}
    digest = sha256_of(json.dumps(trained).encode())
    for raw in exchange(component, json.dumps([digest, first]).encode()):
        other, states = json.loads(raw)
        if other != digest:
            raise InvalidArgumentError(
                f"The ranks have other parameters in the groups of '{component}': under FullyShardedDataParallel, the "
                "shapes of parameters are those of a rank's parts. Choose the groups by name, or before the model is "
                "wrapped."
            )
        everywhere |= states
    for one in flattened:
        name = names[id(one.parameter)]
        described = everywhere.get(name)
        if one.tensor.local.numel():
            if json.loads(json.dumps(own[name])) != described:
                raise InvalidArgumentError(
                    f"Rank {rank} has another state of '{name}' in '{component}' than the rank with its first element: "
                    f"{own[name]}, not {described}. Step the optimizer on all ranks."
                )
        elif described is not None:
            slots[one.parameter] = {key: _made(value, one) for key, value in described.items()}


def _description(held: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Describe a parameter's state: the dtypes of tensors with elements of it, and the other values themselves."""
    if held is None:
        return None
    found: dict[str, Any] = {}
    for key, value in held.items():
        if isinstance(value, torch.Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            found[key] = [dtype, None if isinstance(value, FlatTensor) else value.item()]
        else:
            found[key] = value
    return found


def _made(described: Any, member: FlatMember) -> Any:
    if not isinstance(described, list):
        return described
    dtype, value = described
    if value is None:
        return member.tensor.with_local(member.tensor.local.new_empty(0, dtype=getattr(torch, dtype)))
    return torch.tensor(value, dtype=getattr(torch, dtype))


# Restores: what was saved by name, in the terms of an optimizer that was built.


def with_flat_groups(state: TrainingState, saved: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return saved parts whose optimizers' groups name each flat parameter once, by the first parameter in it.

    Args:
        state: The state that is restored.
        saved: Name of a part -> its entry.
    """
    names = state.parameter_names()
    others = [
        {
            names[id(member.parameter)]
            for member in flat.members
            if names[id(member.parameter)] != names[id(flat.variable)]
        }
        for flat in _flats_of(state)
        if flat.is_trained
    ]
    found = dict(saved)
    for name in state.of_kind("optimizer") if others else ():
        if saved.get(name, {}).get("kind") == "optimizer":
            groups = []
            for group in saved[name]["state"]["groups"]:
                dropped = set().union(*(one for one in others if one <= set(group["params"])))
                groups.append({**group, "params": [one for one in group["params"] if one not in dropped]})
            found[name] = {**saved[name], "state": {**saved[name]["state"], "groups": groups}}
    return found


def local_states(
    state: TrainingState, component: str, saved: dict[str, Any], names: Names, path: str
) -> dict[str, Any]:
    """Return the saved state of an optimizer with this rank's tensors, in the terms of what it trains.

    Args:
        state: The state that is restored.
        component: The optimizer's name.
        saved: Its state by names, decoded; its groups are those of `with_flat_groups`.
        names: The names of the parameters.
        path: The checkpoint's path, for messages.

    Raises:
        StateDictMismatchError: Parameters of one flat parameter have different counts, or only some have a state.
    """
    slots = dict(saved["state"])
    for flat in _flats_of(state):
        if flat.is_trained:
            inside = [names[id(member.parameter)] for member in flat.members]
            held = [slots.pop(name) for name in inside if name in slots]
            if held:
                slots[names[id(flat.variable)]] = _joined(flat, inside, held, component, path)
            continue
        for member in flat.members:
            name = names[id(member.parameter)]
            if name in slots and not member.tensor.local.numel():
                del slots[name]
            elif name in slots:
                shape = member.parameter.shape
                slots[name] = {
                    key: value.local.reshape(shape) if isinstance(value, FlatTensor) else value
                    for key, value in slots[name].items()
                }
    return {**saved, "state": slots}


def _joined(
    flat: FlatParameter, inside: Sequence[str], held: Sequence[Mapping[str, Any]], component: str, path: str
) -> dict[str, Any]:
    keys = [*held[0]]
    joined: dict[str, Any] = {}
    for key in keys if all([*one] == keys for one in held) and len(held) == len(inside) else ():
        values = [one[key] for one in held]
        if all(isinstance(value, FlatTensor) for value in values):
            joined[key] = values[0].local.new_zeros(flat.padded)
            for value, offset in zip(values, flat.offsets, strict=True):
                joined[key][offset : offset + value.local.numel()] = value.local
        elif all(value == values[0] for value in values):
            joined[key] = values[0]
    if [*joined] != keys:
        raise StateDictMismatchError(
            f"'{component}' has one state for {', '.join(inside)}, which are in one flat parameter, but the checkpoint "
            f"'{path}' has other counts for some, or a state of some only. Wrap the model with use_orig_params=True.",
            path=path,
        )
    return joined
