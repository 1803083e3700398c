"""A model's named tensors, collected and assigned, also if they are offloaded or spread over the ranks."""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeGuard

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from hfshard.errors import HfshardError, InvalidArgumentError, UnstorableTensorError
from hfshard.tensors.flat_tensor import FlatTensor, PartOfTensor
from hfshard.tensors.fsdp1 import flat_parameter_names, flat_tensors, reshard, with_flat_tensors, without_gathering
from hfshard.tensors.parameter_names import strip_wrappers, unwrap, without_wrappers, wrapped_prefixes
from hfshard.tensors.stored_tensor import check_initialized, fits_its_storage, is_torch_tensor_type

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def collect_state_dict(model: nn.Module, purpose: Purpose = "save") -> dict[str, Any]:
    """Collect the model's state dict without the prefixes of wrappers.

    Wrappers are recognized by their class, not by name: a child that is really called `module` keeps its name. The
    tensors are the model's own, not copies; those that accelerate has offloaded are read from where they are, those
    that DeepSpeed has partitioned are `PartitionedParameter`s, and those under FSDP1 `FlatTensor`s.

    Args:
        model: Not changed.
        purpose: What the tensors are needed for.

    Raises:
        UnstorableTensorError: This rank's part of a parameter cannot be told, or a module is lazy.
        InvalidArgumentError: Such a part cannot be told, and the purpose is not "save".
    """
    model = unwrap(model)
    parts = {name: one for name, one in partitioned_parameters(model, purpose).items() if not one.is_whole}
    with without_gathering(model):
        state_dict = model.state_dict()
    state_dict.update((name, parts[name]) for name in parts.keys() & state_dict.keys())
    check_initialized(state_dict)
    fill_offloaded(model, state_dict)
    wrapped = wrapped_prefixes(model)
    return with_flat_tensors(model, {without_wrappers(name, wrapped): value for name, value in state_dict.items()})


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Map each parameter's id to its name without wrapper prefixes; of tied names, to the first in sorted order."""
    return {key: min(names) for key, names in _all_names(model).items()}


def tied_parameter_names(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several, without wrapper prefixes."""
    return [names for names in _all_names(model).values() if len(names) > 1]


def _all_names(model: nn.Module) -> dict[int, list[str]]:
    model = unwrap(model)
    wrapped = wrapped_prefixes(model)
    names = flat_parameter_names(model)
    flattened = set(names)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in flattened:
            continue
        names.setdefault(id(parameter), []).append(without_wrappers(name, wrapped))
    return names


def reject_freed(model_state: Mapping[str, Any]) -> None:
    """Refuse to load into tensors whose memory was freed, fully or partly: writing there would crash the process.

    Raises:
        InvalidArgumentError: There is one.
    """
    for name, tensor in model_state.items():
        if is_torch_tensor_type(tensor) and tensor.layout is torch.strided and not fits_its_storage(tensor):
            raise InvalidArgumentError(
                f"Cannot load into '{name}' of the model: its memory was freed, and its storage has only "
                f"{tensor.untyped_storage().nbytes()} bytes. Give it memory first, or build the model again.",
                fqn=name,
            )


def assign(model: nn.Module, state_dict: Mapping[str, torch.Tensor], *, runs_hooks: bool = False) -> None:
    """Load tensors into the model with its own `load_state_dict`; they replace meta tensors. Other names are ignored.

    Tied parameters stay tied, values are cast to the parameter's dtype and moved to its device, and the modules' hooks,
    `_load_from_state_dict` and `set_extra_state` run.

    Args:
        model: Unwrapped; changed.
        state_dict: Tensors by the names that `collect_state_dict` returns.
        runs_hooks: Whether the hooks run even if there is nothing to assign because that was already done.

    Raises:
        InvalidArgumentError: A tensor of the model has no memory, and nothing was assigned; or one that should have
            been replaced is still a meta tensor.
    """
    with without_gathering(model):
        _assign(model, state_dict, runs_hooks=runs_hooks)


def _assign(model: nn.Module, state_dict: Mapping[str, torch.Tensor], *, runs_hooks: bool) -> None:
    model_state = model.state_dict()
    reject_freed(model_state)
    flat = flat_tensors(model)
    if flat:
        reshard(model)
        for name in flat.keys() & state_dict.keys():
            flat[name].fill(state_dict[name])
    wrapped = wrapped_prefixes(model)
    short_names = {name: without_wrappers(name, wrapped) for name in model_state}
    short_names = {name: short for name, short in short_names.items() if short not in flat}
    tensors = {name: state_dict[short] for name, short in short_names.items() if short in state_dict}
    meta = {name: tensor for name, tensor in tensors.items() if getattr(model_state[name], "is_meta", False)}
    filled = {name: tensor for name, tensor in tensors.items() if name not in meta}
    metadata = getattr(model_state, "_metadata", None) or {}
    if filled or (runs_hooks and not meta):
        _load_tensors(model, filled, metadata, assign=False)
    if meta:
        _load_tensors(model, _as_parameters(model, meta), metadata, assign=True)
        _reject_meta(model, meta)


def _reject_meta(model: nn.Module, names: Iterable[str]) -> None:
    """Reject a loaded model with meta tensors left, whose own `_load_from_state_dict` copied values into no memory."""
    state = model.state_dict()
    name = next((name for name in names if getattr(state.get(name), "is_meta", False)), None)
    if name is not None:
        raise InvalidArgumentError(
            f"'{name}' of the model is on the meta device after it was loaded: its module loads it with its own "
            "method, which does not replace tensors. Give the model memory first: model.to_empty(device='cpu').",
            fqn=name,
        )


def _load_tensors(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, dict[str, Any]], *, assign: bool
) -> None:
    """Do what `model.load_state_dict(tensors, strict=False, assign=assign)` does, in time linear in the names.

    torch scans all names below a module once for each of its children: a list of 10,000 experts takes 6 s.

    Args:
        model: Changed.
        tensors: Tensors by the names of its own state dict.
        metadata: That state dict's metadata: the versions of its modules.
        assign: As in `load_state_dict`.
    """
    if type(model).load_state_dict is not nn.Module.load_state_dict:
        versioned = OrderedDict(tensors)
        versioned._metadata = metadata  # type: ignore[attr-defined]
        model.load_state_dict(versioned, strict=False, assign=assign)
        return
    differing = _IncompatibleKeys([], [])
    errors: list[str] = []

    def load(module: nn.Module, below: dict[str, torch.Tensor], prefix: str) -> None:
        local_metadata = dict(metadata.get(prefix[:-1], {})) | ({"assign_to_params_buffers": True} if assign else {})
        module._load_from_state_dict(below, prefix, local_metadata, True, *differing, errors)
        parts = _by_child(below, prefix, module._modules)
        for name, child in module._modules.items():
            if child is not None:
                load(child, parts[name], f"{prefix}{name}.")
        for hook in module._load_state_dict_post_hooks.values():
            hook(module, differing)

    load(model, dict(tensors), "")
    if errors:
        raise RuntimeError("\n\t".join([f"Error(s) in loading state_dict for {type(model).__name__}:", *errors]))


def _by_child(
    tensors: Mapping[str, torch.Tensor], prefix: str, children: Iterable[str]
) -> dict[str, dict[str, torch.Tensor]]:
    """Group the tensors below a module with this prefix by its children."""
    parts: dict[str, dict[str, torch.Tensor]] = {child: {} for child in children}
    dotted = [child for child in parts if "." in child]  # `setattr` accepts such a name
    for name, tensor in tensors.items():
        child, dot, _ = name.removeprefix(prefix).partition(".")
        if dot and child in parts and name.startswith(prefix):
            parts[child][name] = tensor
        for child in dotted:
            if name.startswith(f"{prefix}{child}."):
                parts[child][name] = tensor
    return parts


def _as_parameters(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Create the replacements of meta parameters and buffers, in the parameters' dtypes and one for all tied names.

    Names that share a tensor in the checkpoint, but not in the model, get one each.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    registered = {**dict(model.named_buffers(remove_duplicate=False)), **parameters}
    made: dict[int, torch.Tensor] = {}
    taken: set[int] = set()
    result = dict(tensors)
    for name in [name for name in tensors if name in registered]:
        old = registered[name]
        if id(old) not in made:
            made[id(old)] = _with_memory_of_its_own(tensors[name], taken)
            if name in parameters:
                value = made[id(old)].to(old.dtype)
                made[id(old)] = nn.Parameter(value, requires_grad=old.requires_grad)
        result[name] = made[id(old)]
    return result


def _with_memory_of_its_own(tensor: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """Copy a tensor whose memory another name of the model already has: the model does not tie the two."""
    part = local_tensor(tensor) if is_dtensor(tensor) else tensor
    if part.numel() == 0 or part.data_ptr() not in taken:
        taken.add(part.data_ptr())
        return tensor
    return tensor.clone()


# Offloaded weights: accelerate keeps them in CPU memory or on disk while they are not in use.


def fill_offloaded(model: nn.Module, state_dict: dict[str, Any]) -> None:
    """Replace the meta tensors in a model's state dict by the offloaded weights that they represent.

    All of those on disk are read into memory.

    Args:
        model: Not changed.
        state_dict: The result of `model.state_dict()`; changed.
    """
    if not any(_is_meta(value) for value in state_dict.values()):
        return
    for name, weights_map, key in _offloaded(model):
        if _is_meta(state_dict.get(name)) and key in weights_map:
            state_dict[name] = weights_map[key]


def reject_offloaded(model: nn.Module) -> None:
    """Refuse to load into a model whose weights are offloaded: accelerate would continue to use the old ones.

    Raises:
        InvalidArgumentError: It has such weights.
    """
    name = next((name for name, _, _ in _offloaded(model)), None)
    if name is not None:
        raise InvalidArgumentError(
            f"Cannot load into '{name}' of the model: accelerate has offloaded it, and would keep the old weights. "
            "Load before cpu_offload, disk_offload or dispatch_model is called, or remove the hooks: "
            "accelerate.hooks.remove_hook_from_submodules(model).",
            fqn=name,
        )


def _offloaded(model: nn.Module) -> Iterator[tuple[str, Mapping[str, torch.Tensor], str]]:
    """Yield each offloaded tensor's name and location: accelerate's mapping, and the key in it.

    Source: accelerate `AlignDevicesHook`, whose `weights_map` has the tensors that it places in the module before a
    forward.
    """
    for path, module in model.named_modules(remove_duplicate=False):
        for hook in _hooks(module):
            if not getattr(hook, "offload", False) or hook.weights_map is None:
                continue
            recurse = bool(hook.place_submodules)
            named = [
                *module.named_parameters(recurse=recurse, remove_duplicate=False),
                *module.named_buffers(recurse=recurse, remove_duplicate=False),
            ]
            for key, tensor in named:
                if _is_meta(tensor):
                    yield (f"{path}.{key}" if path else key), hook.weights_map, key


def _hooks(module: nn.Module) -> list[Any]:
    hook = getattr(module, "_hf_hook", None)
    return list(getattr(hook, "hooks", None) or ([] if hook is None else [hook]))


def _is_meta(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


# Detection of DTensors, of which each rank has a part, and of their predecessors, ShardedTensors.


def has_spread(tensors: Mapping[str, Any]) -> bool:
    """Return whether any of the values is spread over ranks, so that all of them must call a save."""
    return any(isinstance(value, PartOfTensor) or is_dtensor(value) for value in tensors.values())


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Return whether it is a DTensor. Nothing is if torch's module for them, slow to import, was never imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def is_spread_tensor(value: object) -> TypeGuard[DTensor | FlatTensor]:
    """Return whether it is a torch.Tensor of which each rank has a part."""
    return isinstance(value, FlatTensor) or is_dtensor(value)


def local_tensor(tensor: DTensor | FlatTensor) -> torch.Tensor:
    """Return this rank's part: not a copy; empty if it has none. Wait for a collective that still fills it."""
    if isinstance(tensor, FlatTensor):
        return tensor.local
    with torch.no_grad():
        local = tensor.to_local()
    wait = getattr(local, "wait", None)
    return (local if wait is None else wait()).detach()


def is_sharded_tensor(value: object) -> bool:
    """Return whether it is a ShardedTensor of FSDP1, the predecessor of `fully_shard`. The class is not public."""
    return type(value).__name__ == "ShardedTensor"


def reject_sharded_tensors(tensors: Mapping[str, Any]) -> None:
    """Refuse to store ShardedTensors.

    Raises:
        UnstorableTensorError: There is one.
    """
    name = next((name for name, value in tensors.items() if is_sharded_tensor(value)), None)
    if name is not None:
        raise UnstorableTensorError(
            f"Cannot store {name!r}: it is a ShardedTensor of FSDP1. Shard the model with fully_shard instead, or "
            "gather it first, on every rank: torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True)).",
            fqn=name,
        )


# Parameters that DeepSpeed ZeRO-3 has partitioned: this process has an empty tensor in place of each, and its part
# beside it.


@dataclass(frozen=True, slots=True, eq=False)
class PartitionedParameter(PartOfTensor):
    """A parameter of which each rank has an interval of the row-major elements, equally long on all but the last ones.

    Source: DeepSpeed `runtime/zero/partition_parameters.py`, `_partition_param`.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    ranks: tuple[int, ...]
    """The ranks that have parts, in the order of the parts."""
    local: torch.Tensor
    """This rank's part, of one dimension and without padding: a view of DeepSpeed's."""
    master: torch.Tensor | None
    """The same part of what the optimizer steps on, which DeepSpeed copies to `local`; None: nothing trains it."""
    is_whole: bool
    """True if every rank has all of it in the parameter, too: it is small, or gathered."""
    parameter: Any

    @property
    def is_gathered(self) -> bool:
        """True within a block of `GatheredParameters`, which may change it."""
        return _is_gathered(self.parameter)

    @classmethod
    def of(cls, parameter: Any) -> PartitionedParameter:
        """Describe a parameter, without contacting another rank."""
        elements = int(parameter.ds_numel)
        ranks = tuple(dist.get_process_group_ranks(parameter.ds_process_group))
        size = -(-elements // len(ranks))
        first = ranks.index(dist.get_rank()) * size
        held = max(0, min(size, elements - first))
        master = _master_of(parameter)
        return cls(
            tuple(parameter.ds_shape),
            parameter.dtype,
            ranks,
            parameter.ds_tensor.detach().narrow(0, 0, held),
            None if master is None else master.detach().narrow(0, 0, held),
            not is_partitioned(parameter),
            parameter,
        )

    def own_interval(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a complete tensor."""
        size = -(-int(self.parameter.ds_numel) // len(self.ranks))
        first = self.ranks.index(dist.get_rank()) * size
        return whole.detach().reshape(-1)[first : first + self.local.numel()]

    def load(self, tensor: torch.Tensor) -> None:
        """Copy a tensor into the parameter: the complete one, or this rank's part."""
        is_part = tuple(tensor.shape) != self.shape
        with torch.no_grad():
            self.target.copy_(tensor if is_part else self.own_interval(tensor))
            if self.is_whole:
                self.parameter.data.copy_(tensor)
        self.take_loaded()

    @property
    def target(self) -> torch.Tensor:
        """The part to load into."""
        return self.local if self.master is None else self.master

    def take_loaded(self) -> None:
        """Copy what was loaded to where DeepSpeed reads it; forget the copies that it has gathered within a node."""
        with torch.no_grad():
            self.local.copy_(self.target)
        if getattr(self.parameter, "ds_secondary_tensor", None) is not None:
            self.parameter.ds_secondary_tensor = None


def _master_of(parameter: Any) -> torch.Tensor | None:
    optimizer = getattr(parameter, "_z3_optimizer", None)
    if optimizer is None or optimizer.get_param_id(parameter) not in optimizer.grad_position:
        return None
    found: torch.Tensor = optimizer._get_fp32_opt_state_partition(parameter, release_swap_buffers=False)[0]
    return found


def partitioned_parameters(model: nn.Module, purpose: Purpose = "save") -> dict[str, PartitionedParameter]:
    """Describe each parameter that ZeRO-3 has partitioned; one for all names of a tied parameter.

    A save needs no part of a parameter of which every rank has all; a load fills its part, too.

    Args:
        model: Not changed.
        purpose: What the parameters are needed for.

    Raises:
        As `reject_partitioned`, for a parameter whose part on this rank cannot be told.
    """
    found: dict[int, PartitionedParameter] = {}
    names: dict[str, PartitionedParameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not hasattr(parameter, "ds_id") or (purpose == "save" and not is_partitioned(parameter)):
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
    return names


def with_partitioned(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a module's state dict with a `PartitionedParameter` for each one that ZeRO-3 has partitioned.

    Raises:
        As `reject_partitioned`, for copies of partitioned parameters, and for those whose part cannot be told.
    """
    found = dict(tensors)
    if "deepspeed" in sys.modules and dist.is_available() and dist.is_initialized():
        empty = {name: value for name, value in tensors.items() if is_partitioned(value) or _is_empty(value)}
        owners = {_storage(parameter): parameter for _, parameter in _partitioned_in_process()} if empty else {}
        parts: dict[int, PartitionedParameter] = {}
        for name, value in empty.items():
            parameter = owners.get(_storage(value))
            if parameter is not None and _has_ranks(parameter):
                _reject_untold(name, parameter, "save")
                if id(parameter) not in parts:
                    parts[id(parameter)] = PartitionedParameter.of(parameter)
                found[name] = parts[id(parameter)]
    reject_partitioned(found)
    return found


def is_loaded_by_ranks(model: nn.Module) -> bool:
    """Return whether ZeRO-3 has parts of a module on all ranks, so that they must load it together.

    Inside a block of `GatheredParameters` for all of them, one rank may load it.
    """
    parameters = [parameter for parameter in model.parameters() if hasattr(parameter, "ds_id")]
    is_gathered = any(map(_is_gathered, parameters))
    return any(map(is_partitioned, parameters)) or (any(map(_has_ranks, parameters)) and not is_gathered)


def refresh_masters(model: nn.Module) -> None:
    """Let an engine of DeepSpeed step on the weights that were loaded into it, without ZeRO-3, which has them already.

    Otherwise its next step brings the old ones back.
    """
    if any(base.__name__ == "DeepSpeedEngine" for base in type(model).__mro__):
        refresh = getattr(model.optimizer, "refresh_fp32_params", None)
        if refresh is not None and not hasattr(model.optimizer, "fp32_partitioned_groups_flat"):
            refresh()


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
    if not isinstance(value, torch.Tensor) or not hasattr(value, "ds_id"):
        return False
    status = getattr(getattr(value, "ds_status", None), "name", None)
    return status != "AVAILABLE" and getattr(value, "ds_numel", None) != 0


def has_partitioned(model: nn.Module) -> bool:
    """Return whether ranks of a process group have parts of a parameter."""
    return any(is_partitioned(parameter) and _has_ranks(parameter) for parameter in model.parameters())


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
    names = _names_in_module(held) if isinstance(held, nn.Module) else _names_in_state_dict(held)
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
        storages.add(_storage(parameter))
    endings = {ending for name in full_names for ending in _endings(name)}
    return [
        name
        for name, tensor in empty.items()
        if _storage(tensor) in storages or name in endings or not full_names.isdisjoint(_endings(name))
    ]


def _names_in_module(model: nn.Module) -> list[str]:
    found = [name for name, parameter in model.named_parameters() if is_partitioned(parameter)]
    wrapped = wrapped_prefixes(model) if found else set[str]()
    return [without_wrappers(name, wrapped) for name in found]


def _names_in_state_dict(tensors: Mapping[str, Any]) -> list[str]:
    return [name for name, value in tensors.items() if is_partitioned(value)] or _empty_copies(tensors)


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
    modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
    children = {id(child) for module in modules for child in (vars(module).get("_modules") or {}).values()}
    for module in modules:
        if id(module) not in children and "_modules" in vars(module):
            yield from (named for named in module.named_parameters() if is_partitioned(named[1]))


def _endings(name: str) -> Iterator[str]:
    """Yield a dotted name, and its remainders without its first parts."""
    while name:
        yield name
        name = name.partition(".")[2]


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # a tensor without elements has no address
