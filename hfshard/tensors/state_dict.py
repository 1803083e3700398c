"""A model's named tensors, collected and assigned, also if they are offloaded or spread over the ranks."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from hfshard.errors import InvalidArgumentError, UnstorableTensorError
from hfshard.tensors.flat_tensor import FlatTensor, PartOfParameter, PartOfTensor
from hfshard.tensors.fsdp1 import (
    FLATTENED,
    NAMES_KEPT,
    flat_members,
    flat_parameter_names,
    has_flat_parameters,
    reshard_parameters,
    with_flat_tensors,
    without_gathering,
)
from hfshard.tensors.parameter_names import unwrap, without_wrappers, wrapped_prefixes
from hfshard.tensors.stored_tensor import PARTITIONED, check_initialized, fits_its_storage, is_torch_tensor_type
from hfshard.tensors.zero3 import Purpose, has_partitioned, partitioned_parameters

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def collect_state_dict(model: nn.Module, purpose: Purpose = "save") -> dict[str, Any]:
    """Collect the model's state dict without the prefixes of wrappers.

    Wrappers are recognized by their class, not by name: a child that is really called `module` keeps its name. The
    tensors are the model's own, not copies; those that accelerate has offloaded are read from where they are. Of
    parameters under ZeRO-3 and FSDP1, a `FlatTensor` is what this rank has.

    Args:
        model: Not changed.
        purpose: What the tensors are needed for; a load fills, and a run saves, what the optimizer steps on.

    Raises:
        UnstorableTensorError: This rank's part of a parameter cannot be told, or a module is lazy.
        InvalidArgumentError: Such a part cannot be told, and the purpose is not "save".
    """
    model = unwrap(model)
    parts = parts_of_parameters(model, purpose)
    tensors = {
        name: one.tensor if purpose == "save" else one.target
        for name, one in parts.items()
        if not one.is_whole or (purpose == "run" and one.target is not one.tensor and not one.is_gathered)
    }
    with without_gathering(model) if may_be_divided(model) else nullcontext():
        state_dict = model.state_dict()
    check_initialized(state_dict)
    _fill_offloaded(model, state_dict)
    wrapped = wrapped_prefixes(model)
    state_dict = {without_wrappers(name, wrapped): one for name, one in state_dict.items()}
    return with_flat_tensors(model, state_dict, tensors) if parts else state_dict


def parts_of_parameters(model: nn.Module, purpose: Purpose = "save") -> dict[str, PartOfParameter]:
    """Describe this rank's parts of a module's parameters, by their names without the prefixes of wrappers.

    Args:
        model: Not changed.
        purpose: What the parts are needed for.

    Returns:
        One for all names of a tied parameter; nothing for DTensors.

    Raises:
        As `collect_state_dict`, for a part that cannot be told.
    """
    if not may_be_divided(model):
        return {}
    return {**partitioned_parameters(model, purpose), **flat_members(model)}


def may_be_divided(model: nn.Module) -> bool:
    """Return whether ranks may have parts of a module's parameters; False for most modules, apart from DTensors.

    Both DeepSpeed and FSDP1 mark the parameters that they divide. FSDP1 may have plain tensors in their place.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    modules = list(model.modules())
    parameters = [one for module in modules for one in module._parameters.values() if one is not None]
    return (
        any(not isinstance(one, nn.Parameter) for one in parameters)
        or any(hasattr(one, mark) for one in parameters for mark in (PARTITIONED, FLATTENED))
        or any(vars(module).get(NAMES_KEPT) is False for module in modules)
        or (fsdp is not None and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in modules))
    )


def fully_sharded_modules(model: nn.Module) -> list[Any]:
    """List the modules of a model to which `fully_shard` (FSDP2) was applied."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def has_parts(model: nn.Module) -> bool:
    """Return whether ranks have parts of a module's parameters that are not DTensors: all of them must save and load.

    Raises:
        UnstorableTensorError: A part is not known.
    """
    return may_be_divided(model) and (has_partitioned(model) or has_flat_parameters(model))


def count_parameters(model: nn.Module) -> int:
    """Count the elements of a module's parameters on all ranks together."""
    members = {id(one): one for one in flat_members(model).values()}.values()
    flat = {id(variable) for one in members for variable in (one.variable, one.parameter)}
    others = (one for one in model.parameters() if id(one) not in flat)
    return sum(one.tensor.numel() for one in members) + sum(
        int(getattr(one, "ds_numel", one.numel())) for one in others
    )


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Map each parameter's id to its name without wrapper prefixes; of tied names, to the first in sorted order."""
    return {key: min(names) for key, names in _all_names(model).items()}


def tied_parameter_names(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several, without wrapper prefixes."""
    return [names for names in _all_names(model).values() if len(names) > 1]


def _all_names(model: nn.Module) -> dict[int, list[str]]:
    model = unwrap(model)
    wrapped = wrapped_prefixes(model)
    names = flat_parameter_names(model) if may_be_divided(model) else {}
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
    parts = {name: one for name, one in parts_of_parameters(model, "load").items() if not one.is_gathered}
    reshard_parameters(model)
    for name in parts.keys() & state_dict.keys():
        parts[name].load(state_dict[name])
    wrapped = wrapped_prefixes(model)
    short_names = {name: without_wrappers(name, wrapped) for name in model_state}
    short_names = {name: short for name, short in short_names.items() if short not in parts}
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

    torch scans all names below a module once for each of its children: a list of 10,000 experts takes 6 s. `metadata`
    is that of the model's own state dict: the versions of its modules.
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


def _fill_offloaded(model: nn.Module, state_dict: dict[str, Any]) -> None:
    """Replace the meta tensors in a model's state dict by the offloaded weights, which are read into memory."""
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
