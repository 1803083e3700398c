"""Modules under DeepSpeed ZeRO-3: this rank's part of each parameter, which an empty tensor replaces in the module."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeGuard

import torch
import torch.distributed as dist
from torch import nn

from hfshard.errors import HfshardError, InvalidArgumentError, UnstorableTensorError
from hfshard.tensors.flat_tensor import FlatLayout, FlatTensor, PartOfParameter
from hfshard.tensors.parameter_names import strip_wrappers, unwrap, without_wrappers, wrapped_prefixes
from hfshard.tensors.stored_tensor import PARTITIONED, is_torch_tensor_type, storage_id


@dataclass(frozen=True, slots=True, eq=False)
class PartitionedParameter(PartOfParameter):
    """A parameter of which each rank has an interval, equally long on all but the last ones.

    Source: DeepSpeed `runtime/zero/partition_parameters.py`, `_partition_param`.
    """

    @classmethod
    def of(cls, parameter: Any) -> PartitionedParameter:
        """Describe a parameter, without contacting another rank."""
        elements = int(parameter.ds_numel)
        ranks = tuple(dist.get_process_group_ranks(parameter.ds_process_group))
        flat = FlatLayout(ranks, is_cut=True, elements=elements, first=0)
        start, stop = flat.held(elements, dist.get_rank())
        shape = tuple(parameter.ds_shape)
        tensor = FlatTensor(parameter.ds_tensor.detach()[: stop - start], shape, flat)
        master = _master_of(parameter)
        return cls(
            parameter,
            tensor,
            tensor if master is None else tensor.with_local(master.detach()[: stop - start]),
            is_whole=not is_partitioned(parameter),
            is_gathered=_is_gathered(parameter),
        )

    def load(self, values: torch.Tensor) -> None:
        """Copy this rank's part into the optimizer's memory and DeepSpeed's; a complete parameter gets all values."""
        if self.is_whole:
            with torch.no_grad():
                self.parameter.data.copy_(values)
        PartOfParameter.load(self, values)

    def take_loaded(self) -> None:
        """Copy what was loaded to where DeepSpeed reads it; forget the copies that it has gathered within a node."""
        self.tensor.fill(self.target)
        if getattr(self.parameter, "ds_secondary_tensor", None) is not None:
            self.parameter.ds_secondary_tensor = None


def _master_of(parameter: Any) -> torch.Tensor | None:
    optimizer = getattr(parameter, "_z3_optimizer", None)
    if optimizer is None or optimizer.get_param_id(parameter) not in optimizer.grad_position:
        return None
    found: torch.Tensor = optimizer._get_fp32_opt_state_partition(parameter, release_swap_buffers=False)[0]
    return found


def partitioned_parameters(model: nn.Module, purpose: Purpose = "save") -> dict[str, PartitionedParameter]:
    """Describe each parameter that ZeRO-3 has partitioned, by its names without the prefixes of wrappers.

    A save needs no part of a parameter of which every rank has all; a load fills its part, too.

    Args:
        model: Not changed.
        purpose: What the parameters are needed for.

    Returns:
        One for all names of a tied parameter.

    Raises:
        As `reject_partitioned`, for a parameter whose part on this rank cannot be told.
    """
    model = unwrap(model)
    found: dict[int, PartitionedParameter] = {}
    names: dict[str, PartitionedParameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not hasattr(parameter, PARTITIONED) or (purpose == "save" and not is_partitioned(parameter)):
            continue
        if not _has_ranks(parameter):
            reject_partitioned(model, purpose)
            continue
        if id(parameter) not in found:
            if _problem_of(parameter) and _is_gathered(parameter):
                continue
            _reject_untold(name, parameter, purpose)
            found[id(parameter)] = PartitionedParameter.of(parameter)
        names[name] = found[id(parameter)]
    wrapped = wrapped_prefixes(model) if names else set[str]()
    return {without_wrappers(name, wrapped): one for name, one in names.items()}


def with_partitioned(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a module's state dict with a `FlatTensor` for each one that ZeRO-3 has partitioned.

    Raises:
        As `reject_partitioned`, for copies of partitioned parameters, and for those whose part cannot be told.
    """
    found = dict(tensors)
    if "deepspeed" in sys.modules and dist.is_available() and dist.is_initialized():
        empty = {name: value for name, value in tensors.items() if is_partitioned(value) or _is_empty(value)}
        owners = _owners({storage_id(value) for value in empty.values()})
        parts: dict[int, FlatTensor] = {}
        for name, value in empty.items():
            parameter = owners.get(storage_id(value))
            if parameter is not None and _has_ranks(parameter):
                _reject_untold(name, parameter, "save")
                if id(parameter) not in parts:
                    parts[id(parameter)] = PartitionedParameter.of(parameter).tensor
                found[name] = parts[id(parameter)]
    reject_partitioned(found)
    return found


def has_partitioned(model: nn.Module) -> bool:
    """Return whether ranks of a process group have parts of a module, so that they must save and load it together.

    Inside a block of `GatheredParameters` for all of them, one rank may do it.
    """
    parameters = [one for one in model.parameters() if hasattr(one, PARTITIONED) and _has_ranks(one)]
    return any(map(is_partitioned, parameters)) or (bool(parameters) and not any(map(_is_gathered, parameters)))


def refresh_masters(model: nn.Module) -> None:
    """Let DeepSpeed step on the weights that were loaded into its engine, or a module in it, except under ZeRO-3.

    Otherwise its next step brings the old ones back. ZeRO-3 has the loaded ones already.
    """
    if any(base.__name__ == "DeepSpeedEngine" for base in type(model).__mro__):
        refresh = getattr(model.optimizer, "refresh_fp32_params", None)
        if refresh is not None and not hasattr(model.optimizer, "fp32_partitioned_groups_flat"):
            refresh()
        return
    for parameter in model.parameters():
        master = getattr(parameter, "_hp_mapping", None)  # of ZeRO 1 and 2: this rank's part, if it has one
        if master is not None:
            master.update_hp()


def _is_gathered(parameter: Any) -> bool:
    """Return whether a parameter is complete within a block of `GatheredParameters`, and not always."""
    return not is_partitioned(parameter) and not getattr(parameter, "ds_persist", False)


def _has_ranks(parameter: Any) -> bool:
    return hasattr(parameter, "ds_process_group") and dist.is_initialized()


def _reject_untold(name: str, parameter: Any, purpose: Purpose) -> None:
    """Reject a parameter of which this rank's part is not known, or not in memory."""
    problem = _problem_of(parameter)
    if problem:
        kind, verb, remedy = _WORDS[purpose]
        raise kind(f"Cannot {verb} {name!r}: DeepSpeed ZeRO-3 {problem}. {remedy}", fqn=name)


def _problem_of(parameter: Any) -> str:
    part = parameter.ds_tensor
    ranks = dist.get_process_group_ranks(parameter.ds_process_group)
    optimizer = getattr(parameter, "_z3_optimizer", None)
    if getattr(part, "final_location", None) == "nvme" or getattr(optimizer, "swap_optimizer", False):
        return "has moved parts of it to NVMe"
    if hasattr(part, "ds_quant_scale"):
        return "has quantized it (zero_quantized_nontrainable_weights)"
    if hasattr(parameter, "comm"):
        return "has partitioned it within groups of ranks (mics_shard_size)"
    if len(ranks) != dist.get_world_size():
        return f"has partitioned it over ranks {ranks} alone"
    if part.numel() != -(-parameter.ds_numel // len(ranks)):
        return f"has given this rank {part.numel()} of its {parameter.ds_numel} elements"
    return ""


Purpose = Literal["save", "load", "run"]
"""Use of the parameters: a save, a load into them, or a save or restore of a training run."""

RUN_REMEDY: Final = (
    "Save and restore this run with engine.save_checkpoint(directory) and engine.load_checkpoint(directory), which "
    "keep every rank's part; or shard the model with torch.distributed.fsdp.fully_shard, whose runs hfshard saves."
)

_WORDS: Final[dict[Purpose, tuple[type[HfshardError], str, str]]] = {
    "save": (
        UnstorableTensorError,
        "save",
        "Nothing was written. Gather the parameters on every rank during the save: with "
        "deepspeed.zero.GatheredParameters(list(model.parameters())): hfshard.save_model(model, directory). Or pass "
        "state_dict=accelerator.get_state_dict(model), which gathers them if the DeepSpeed config sets "
        "stage3_gather_16bit_weights_on_model_save to true; Trainer does the same. Without hfshard, "
        "engine.save_16bit_model(directory) saves them. ZeRO stages 1 and 2 do not partition parameters.",
    ),
    "load": (
        InvalidArgumentError,
        "load into",
        "Nothing was loaded. Load before deepspeed.initialize() and outside of deepspeed.zero.Init(). Or gather the "
        "parameters on every rank during the load: with deepspeed.zero.GatheredParameters(list(model.parameters()), "
        "modifier_rank=0): hfshard.load_model(model, path); then, if there is an engine, call "
        "engine.optimizer.refresh_fp32_params(), or its next step restores the old weights.",
    ),
    "run": (InvalidArgumentError, "save or restore a run with", f"Nothing was changed. {RUN_REMEDY}"),
}
"""Purpose -> the error, the verb, and what to do."""


def is_partitioned(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether a tensor belongs to ZeRO-3 and cannot be read now. A gathered parameter can be read.

    Source: DeepSpeed `runtime/zero/partition_parameters.py`, `ZeroParamStatus`. The flat tensors that a partitioned
    optimizer has in place of its parameters have a `ds_id` and no `ds_status`.
    """
    if not isinstance(value, torch.Tensor) or not hasattr(value, PARTITIONED):
        return False
    status = getattr(getattr(value, "ds_status", None), "name", None)
    return status != "AVAILABLE" and getattr(value, "ds_numel", None) != 0


def reject_partitioned(held: nn.Module | Mapping[str, Any], purpose: Purpose = "save") -> None:
    """Refuse a module or a state dict with parameters that ZeRO-3 has partitioned.

    `state_dict()` of such a module returns empty tensors without DeepSpeed's attributes. They are recognized by the
    memory or the name that they share with a partitioned parameter of any module in this process.

    Args:
        held: Not changed.
        purpose: What the parameters are needed for.

    Raises:
        UnstorableTensorError: One cannot be read, and the purpose is "save".
        InvalidArgumentError: One cannot be read, for any other purpose.
    """
    if isinstance(held, nn.Module):
        names = _names_in_module(held)
    else:
        names = [name for name, value in held.items() if is_partitioned(value)] or _empty_copies(held)
    if not names:
        return
    kind, verb, remedy = _WORDS[purpose]
    more = len(names) - 1
    others = f" and {more} more parameter{'' if more == 1 else 's'}" if more else ""
    raise kind(
        f"Cannot {verb} {names[0]!r}{others}: DeepSpeed ZeRO-3 has partitioned {'them' if more else 'it'} across the "
        f"ranks, and this process has an empty tensor in place of {'each' if more else 'it'}. {remedy}",
        fqn=names[0],
    )


def _empty_copies(tensors: Mapping[str, Any]) -> list[str]:
    """Find the empty tensors that a state dict has in place of partitioned parameters.

    One that `state_dict()` returned shares the parameter's storage. A copy of it (`.cpu()`, `.clone()`, a description
    on the meta device) has the parameter's name, possibly with another prefix.
    """
    if "deepspeed" not in sys.modules:
        return []
    empty = {name: value for name, value in tensors.items() if _is_empty(value)}
    if not empty:
        return []
    storages: set[int] = set()
    full_names: set[str] = set()
    for name, parameter in _partitioned_in_process():
        full_names |= {name, strip_wrappers(name)}
        storages.add(storage_id(parameter))
    endings = {ending for name in full_names for ending in _endings(name)}
    return [
        name
        for name, tensor in empty.items()
        if storage_id(tensor) in storages or name in endings or not full_names.isdisjoint(_endings(name))
    ]


def _names_in_module(model: nn.Module) -> list[str]:
    found = [name for name, parameter in model.named_parameters() if is_partitioned(parameter)]
    wrapped = wrapped_prefixes(model) if found else set[str]()
    return [without_wrappers(name, wrapped) for name in found]


def _is_empty(value: Any) -> bool:
    """Return whether a value is what DeepSpeed leaves of a partitioned parameter: a plain tensor of shape (0,)."""
    return (
        is_torch_tensor_type(value)
        and not value.is_nested
        and value.layout is torch.strided
        and tuple(value.shape) == (0,)
    )


def _partitioned_in_process() -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each partitioned parameter of the process, by its name in the outermost module."""
    if gc.get_freeze_count():
        gc.unfreeze()  # what gc.freeze() has put aside is in no list: the empty tensors would be saved
    yield from _partitioned_among(gc.get_objects())


def _owners(storages: Set[int]) -> dict[int, torch.Tensor]:
    """Find the partitioned parameters that have these storages; what the process froze stays so if it has none."""
    found: dict[int, torch.Tensor] = {}
    if storages:
        found = {storage_id(parameter): parameter for _, parameter in _partitioned_among(gc.get_objects())}
        if not storages <= found.keys() and gc.get_freeze_count():
            found = {storage_id(parameter): parameter for _, parameter in _partitioned_in_process()}
    return found


def _partitioned_among(objects: Iterable[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    modules = [one for one in objects if issubclass(type(one), nn.Module)]
    children = {id(child) for module in modules for child in (vars(module).get("_modules") or {}).values()}
    for module in modules:
        if id(module) not in children and "_modules" in vars(module):
            yield from (named for named in module.named_parameters() if is_partitioned(named[1]))


def _endings(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.partition(".")[2]
