"""Runs under DeepSpeed ZeRO: what each rank has of masters and moments, by the names of the parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from hfshard.errors import InvalidArgumentError, StateDictMismatchError
from hfshard.tensors.flat_tensor import FlatLayout, FlatTensor, PartOfParameter
from hfshard.tensors.parameter_names import unwrap, without_wrappers, wrapped_prefixes
from hfshard.tensors.state_dict import assign, parts_of_parameters
from hfshard.tensors.zero3 import RUN_REMEDY, PartitionedParameter, refresh_masters
from hfshard.training.state.optimizer import with_groups
from hfshard.training.state.pending_loads import PendingLoad
from hfshard.training.state.reordering import is_same

Masters = Mapping[int, FlatTensor]
"""Id of a parameter -> what ZeRO 1 or 2 steps on for it, if every rank has all of the parameter itself."""


def named_masters(module: nn.Module, masters: Masters) -> dict[str, FlatTensor]:
    """Return those of a module's parameters, by name; tied names share one."""
    return {name: masters[id(one)] for name, one in _named_parameters(module).items() if id(one) in masters}


def names_of_whole(module: nn.Module, masters: Masters) -> set[str]:
    """Name the parameters of a module that have parts on the ranks, while each rank needs all of them."""
    return {name for name, part in _parts_of(module).items() if part.is_whole} | named_masters(module, masters).keys()


def spread_parameters(module: nn.Module) -> dict[int, FlatTensor]:
    """Return this rank's parts of a module's parameters, by the ids of what its optimizer has."""
    return {id(one.parameter): one.target for one in _parts_of(module).values()}


def assign_run_tensors(module: nn.Module, tensors: Mapping[str, Any], masters: Masters) -> None:
    """Do what `assign` does; of parameters that have parts on the ranks, the optimizer gets this rank's, too.

    Args:
        module: Unwrapped; changed.
        tensors: What `collect_run_tensors` names: all of those in `names_of_whole`, else this rank's part.
        masters: Those of the training state; changed.
    """
    own = _named_parameters(module) if masters else {}
    for name in own.keys() & tensors.keys():
        if id(own[name]) in masters:
            masters[id(own[name])].fill(tensors[name])
    assign(module, tensors)
    if not masters:
        refresh_masters(module)


def keep_parts(module: nn.Module, masters: Masters) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (tensor, copy) of the memory that `assign_run_tensors` changes beside the parameters and buffers."""
    parts = [part for part in _parts_of(module).values() if isinstance(part, PartitionedParameter)]
    held = [one for part in parts for one in (part.tensor.local, part.target.local, part.parameter.data)]
    held += [masters[id(one)].local for one in module.parameters() if id(one) in masters]
    known = (getattr(one, "_hp_mapping", None) for one in module.parameters())
    held += [one.hp_fragment for one in known if one is not None and not masters]
    return [(one, one.clone()) for one in held]


def _parts_of(module: nn.Module) -> dict[str, PartOfParameter]:
    return {name: one for name, one in parts_of_parameters(module, "run").items() if not one.is_gathered}


def _named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    module = unwrap(module)
    wrapped = wrapped_prefixes(module)
    named = module.named_parameters(remove_duplicate=False)
    return {without_wrappers(name, wrapped): parameter for name, parameter in named}


# The optimizer: DeepSpeed's has flat tensors of many parameters each, in place of these.


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """The place of a parameter in the flat tensors of an optimizer: in its masters, and in each of its moments."""

    parameter: Any
    number: int
    """Of the flat tensor."""
    part_of: Callable[[torch.Tensor], FlatTensor]
    """Returns this rank's part, in the memory of a flat tensor."""


@dataclass(frozen=True, slots=True, eq=False)
class _Flats:
    """The flat tensors with which one of DeepSpeed's optimizers steps."""

    masters: list[torch.Tensor]
    group_of: list[int]
    """The number of each one's group."""
    places: list[_Place]
    """In the order of the parameters in the groups."""


def is_of_deepspeed(part: object) -> bool:
    """Return whether an optimizer is DeepSpeed's, or was given to it and steps on its flat tensors."""
    if any(base.__name__ == "ZeROOptimizer" for base in type(part).__mro__):
        return True
    return isinstance(part, Optimizer) and any(hasattr(flat, "ds_id") and flat.dim() == 1 for flat in part.state)


class NamedOptimizer:
    """An optimizer that DeepSpeed steps with, as one of the model's parameters.

    Attributes:
        optimizer: Of the class of the one that was given to DeepSpeed, with its groups and copies of their options; it
            has the model's parameters, and for each a state of this rank's parts. It shares memory with DeepSpeed.
        masters: See `Masters`.
    """

    def __init__(self, name: str, base: Optimizer, flats: _Flats, *, is_whole: bool) -> None:
        self._base, self._flats = base, flats
        groups: list[dict[str, Any]] = [{**group, "params": []} for group in base.param_groups]
        state: defaultdict[Any, Any] = defaultdict(dict)
        self.masters: dict[int, FlatTensor] = {}
        for place in flats.places:
            groups[flats.group_of[place.number]]["params"].append(place.parameter)
            flat = flats.masters[place.number]
            if is_whole:
                self.masters[id(place.parameter)] = place.part_of(flat.detach())
            for slot, value in base.state.get(flat, {}).items():
                state[place.parameter][slot] = _part_of_slot(name, slot, value, flat, place)
        self.optimizer = with_groups(base, groups, state)

    def linked(self, load: PendingLoad, name: str, path: str) -> PendingLoad:
        """Let DeepSpeed's optimizer follow a load of the named one, and its undo.

        Args:
            load: Of the named optimizer.
            name: Its name in the training state, for messages.
            path: The checkpoint's path, for messages.
        """
        base = self._base
        groups = [dict(group) for group in base.param_groups]
        states = {flat: dict(base.state.get(flat, {})) for flat in self._flats.masters}

        def load_both() -> None:
            load.load()
            filled = [self._filled(number, flat, name, path) for number, flat in enumerate(self._flats.masters)]
            for group, loaded in zip(base.param_groups, self.optimizer.param_groups, strict=True):
                group.update({key: value for key, value in loaded.items() if key != "params"})
            base.state.update(zip(self._flats.masters, filled, strict=True))

        def undo() -> None:
            if load.undo is not None:
                load.undo()
            for group, before in zip(base.param_groups, groups, strict=True):
                group.clear()
                group.update(before)
            base.state.update(states)

        return PendingLoad(load.name, load_both, undo)

    def _filled(self, number: int, flat: torch.Tensor, name: str, path: str) -> dict[str, Any]:
        """Create the state of a flat tensor from what was loaded for its parameters; its padding is zero."""
        common: dict[str, Any] | None = None
        held: dict[str, Any] = {}
        for place in self._flats.places:
            if place.number != number:
                continue
            alike: dict[str, Any] = {}
            for slot, value in self.optimizer.state.get(place.parameter, {}).items():
                if isinstance(value, FlatTensor) or (torch.is_tensor(value) and value.dim()):
                    held.setdefault(slot, torch.zeros_like(flat, dtype=value.dtype, requires_grad=False))
                    place.part_of(held[slot]).fill(value)
                    alike[slot] = None
                else:
                    alike[slot] = value
            common = alike if common is None else common
            if not is_same(alike, common):
                raise StateDictMismatchError(
                    f"The parameters of a group of '{name}' have not made the same steps in the checkpoint '{path}', "
                    f"but DeepSpeed makes them together. Nothing was restored. Pass without=['{name}'].",
                    path=path,
                )
        counts = {slot: value for slot, value in (common or {}).items() if value is not None}
        return held | {slot: value.clone() if torch.is_tensor(value) else value for slot, value in counts.items()}


def _part_of_slot(name: str, slot: str, value: Any, flat: torch.Tensor, place: _Place) -> Any:
    if not torch.is_tensor(value):
        return value
    if value.dim() == 0:
        return value.detach().clone()  # one of the flat tensor is one of each parameter in it
    if value.shape != flat.shape:
        raise InvalidArgumentError(
            f"Cannot save or restore a run with '{name}': its {slot!r} has the shape {list(value.shape)} for "
            f"{list(flat.shape)} of parameters, so it is not known which are whose. {RUN_REMEDY}"
        )
    return place.part_of(value.detach())


def named_optimizers(
    optimizers: Mapping[str, Optimizer], engines: Mapping[str, Any], modules: Collection[nn.Module]
) -> dict[str, NamedOptimizer]:
    """Find the parameters of the optimizers that DeepSpeed steps with; others are left out.

    Args:
        optimizers: Those of the training state, by name.
        engines: DeepSpeed's optimizers among them, which the state's ones were given to.
        modules: Those of the training state.

    Raises:
        InvalidArgumentError: They cannot be found, or more belongs to the run than is saved.
    """
    known = [*_engines(modules), *engines.values()]
    return {
        name: _named_optimizer(name, part, next((one for one in known if one.optimizer is part), None), modules)
        for name, part in optimizers.items()
        if is_of_deepspeed(part) or any(one.optimizer is part for one in known)
    }


def _engines(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Yield DeepSpeed's optimizers that modules know, as an engine does, and a parameter under ZeRO-3."""
    for module in modules:
        own = getattr(module, "optimizer", None)
        if any(base.__name__ == "ZeROOptimizer" for base in type(own).__mro__):
            yield own
        for parameter in module.parameters():
            zero = getattr(parameter, "_z3_optimizer", None)
            if zero is not None:
                yield zero
                break


def _named_optimizer(name: str, base: Optimizer, zero: Any, modules: Iterable[nn.Module]) -> NamedOptimizer:
    parts = {id(one.parameter): one for module in modules for one in _parts_of(module).values()}
    is_stage_3 = hasattr(zero, "fp32_partitioned_groups_flat")
    if not is_stage_3 and not (hasattr(zero, "round_robin_bit16_offsets") and dist.is_initialized()):
        raise InvalidArgumentError(
            f"Cannot save or restore a run with '{name}' ({type(base).__qualname__}): DeepSpeed ZeRO has partitioned "
            f"its state across the ranks. Nothing was changed. {RUN_REMEDY}"
        )
    problem = ""
    if zero.dynamic_loss_scale:
        problem = "its loss scale, which changes from step to step under fp16, would be lost. Train with bf16"
    elif is_stage_3 and any(id(one) not in parts for group in zero.fp16_groups for one in group):
        problem = "a block of GatheredParameters may change its parameters. Call this outside of it"
    elif zero.micro_step_id > 0:
        problem = "gradients of earlier micro-batches are in it. Call this after engine.step()"
    elif not is_stage_3 and {dist.get_world_size()} != {*map(dist.get_world_size, zero.real_dp_process_group)}:
        problem = "its parameters are partitioned over some of the ranks alone"
    if problem:
        raise InvalidArgumentError(f"Cannot save or restore a run with '{name}' now: {problem}. {RUN_REMEDY}")
    flats = _flats_of_stage_3(zero, parts) if is_stage_3 else _flats_of_stages_1_and_2(zero)
    return NamedOptimizer(name, base, flats, is_whole=not is_stage_3)


def _flats_of_stage_3(zero: Any, parts: Mapping[int, PartOfParameter]) -> _Flats:
    """Each flat tensor has this rank's parts of some parameters, one after another."""
    places = []
    for number, parameters in enumerate(zero.fp16_groups):
        for parameter in parameters:
            part = parts[id(parameter)].target
            _, first, _ = zero.grad_position[zero.get_param_id(parameter)]

            def part_of(flat: torch.Tensor, part: FlatTensor = part, first: int = first) -> FlatTensor:
                return part.with_local(flat.narrow(0, first, part.local.numel()))

            places.append(_Place(parameter, number, part_of))
    groups = [zero.sub_group_to_group_id[number] for number in range(len(zero.fp16_groups))]
    return _Flats(list(zero.fp32_partitioned_groups_flat), groups, places)


def _flats_of_stages_1_and_2(zero: Any) -> _Flats:
    """The parameters of a group lie one after another in one flat tensor, of which each rank has an equal part."""
    places = []
    ranks = tuple(range(dist.get_world_size()))
    for number, parameters in enumerate(zero.bit16_groups):
        in_flat = zip(zero.round_robin_bit16_groups[number], zero.round_robin_bit16_offsets[number], strict=True)
        first_of = {id(parameter): first for parameter, first in in_flat}
        elements = zero.bit16_groups_flat[number].numel()
        for parameter in parameters:
            layout = FlatLayout(ranks, is_cut=True, elements=elements, first=first_of[id(parameter)])
            shape = tuple(parameter.shape)

            def part_of(flat: torch.Tensor, shape: Sequence[int] = shape, layout: FlatLayout = layout) -> FlatTensor:
                return FlatTensor.within(flat, shape, layout, dist.get_rank())

            places.append(_Place(parameter, number, part_of))
    masters = list(zero.single_partition_of_fp32_groups)
    return _Flats(masters, list(range(len(masters))), places)
