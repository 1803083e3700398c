"""A model's named tensors: collect them under the names that it has without wrappers, and assign them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from hfshard.errors import InvalidArgumentError
from hfshard.state_dicts.dtensors import is_dtensor, local_tensor
from hfshard.state_dicts.offloaded import fill_offloaded
from hfshard.state_dicts.partitioned import refuse_partitioned
from hfshard.state_dicts.wrappers import unwrap, without_wrappers, wrapped_prefixes
from hfshard.storage.tensors.tensor_bytes import check_initialized, is_plain_type, lies_in_storage


def collect_state_dict(model: nn.Module) -> dict[str, Any]:
    """Collect the model's state dict without the prefixes of wrappers.

    The wrappers themselves are looked for, not their names: a child that is really called `module` keeps its name. The
    tensors are the model's own, not copies; those that accelerate has offloaded are read from where they are.

    Raises:
        UnstorableTensorError: DeepSpeed has partitioned a parameter, or a module is lazy.
    """
    model = unwrap(model)
    refuse_partitioned(model)
    state_dict = model.state_dict()
    check_initialized(state_dict)
    fill_offloaded(model, state_dict)
    wrapped = wrapped_prefixes(model)
    return {without_wrappers(name, wrapped): value for name, value in state_dict.items()}


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Map the id of each parameter to its name without the prefixes of wrappers; of tied names, to the first sorted."""
    return {key: min(names) for key, names in _all_names(model).items()}


def tied_parameter_names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several, without the prefixes of wrappers."""
    return [names for names in _all_names(model).values() if len(names) > 1]


def _all_names(model: nn.Module) -> dict[int, list[str]]:
    model = unwrap(model)
    wrapped = wrapped_prefixes(model)
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(without_wrappers(name, wrapped))
    return names


def refuse_freed(model_state: Mapping[str, Any]) -> None:
    """Refuse to load into tensors whose memory was freed, in whole or in part: to write there would end the process.

    Raises:
        InvalidArgumentError: There is one.
    """
    for name, tensor in model_state.items():
        if is_plain_type(tensor) and tensor.layout is torch.strided and not lies_in_storage(tensor):
            raise InvalidArgumentError(
                f"Can't load into '{name}' of the model: its memory was freed, its storage has only "
                f"{tensor.untyped_storage().nbytes()} bytes. Give it memory first, or build the model anew.",
                fqn=name,
            )


def assign(model: nn.Module, state_dict: Mapping[str, torch.Tensor], *, runs_hooks: bool = False) -> None:
    """Load tensors into the model by its own `load_state_dict`; they replace meta tensors. Other names are ignored.

    Tied parameters stay tied, values are cast to the parameter's dtype and moved to its device, and the modules' hooks,
    `_load_from_state_dict` and `set_extra_state` run.

    Args:
        model: Unwrapped; changed.
        state_dict: By the names that `collect_state_dict` gives.
        runs_hooks: Whether the hooks run even if there is nothing to assign, because it was done.

    Raises:
        InvalidArgumentError: A tensor of the model has no memory, and nothing was assigned; or one that was to be
            replaced is a meta tensor still.
    """
    model_state = model.state_dict()
    refuse_freed(model_state)
    wrapped = wrapped_prefixes(model)
    short_names = {name: without_wrappers(name, wrapped) for name in model_state}
    tensors = {name: state_dict[short] for name, short in short_names.items() if short in state_dict}
    meta = {name: tensor for name, tensor in tensors.items() if getattr(model_state[name], "is_meta", False)}
    filled = {name: tensor for name, tensor in tensors.items() if name not in meta}
    metadata = getattr(model_state, "_metadata", None) or {}
    if filled or (runs_hooks and not meta):
        _load_tensors(model, filled, metadata, assign=False)
    if meta:
        _load_tensors(model, _as_parameters(model, meta), metadata, assign=True)
        _refuse_meta(model, meta)


def _refuse_meta(model: nn.Module, names: Iterable[str]) -> None:
    """Refuse to say that a model is loaded, whose own `_load_from_state_dict` copied values to where no memory is."""
    state = model.state_dict()
    name = next((name for name in names if getattr(state.get(name), "is_meta", False)), None)
    if name is not None:
        raise InvalidArgumentError(
            f"'{name}' of the model is on the meta device after it was loaded: its module loads it by a method of its "
            "own, which does not replace tensors. Give the model memory first: model.to_empty(device='cpu').",
            fqn=name,
        )


def _load_tensors(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, dict[str, Any]], *, assign: bool
) -> None:
    """Do what `model.load_state_dict(tensors, strict=False, assign=assign)` does, in time linear in the names.

    torch looks at all names below a module once for each of its children: a list of 10,000 experts takes 6 s.

    Args:
        model: Changed.
        tensors: By the names of its own state dict.
        metadata: Of that state dict: the versions of its modules.
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
    """The tensors below each child of the module that has this prefix."""
    parts: dict[str, dict[str, torch.Tensor]] = {child: {} for child in children}
    dotted = [child for child in parts if "." in child]  # `setattr` takes such a name
    for name, tensor in tensors.items():
        child, dot, _ = name.removeprefix(prefix).partition(".")
        if dot and child in parts and name.startswith(prefix):
            parts[child][name] = tensor
        for child in dotted:
            if name.startswith(f"{prefix}{child}."):
                parts[child][name] = tensor
    return parts


def _as_parameters(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Make what replaces meta parameters and buffers: of the parameters' dtypes, and one for all names that are tied.

    Names that share a tensor in the checkpoint, and none in the model, get one each.
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
    """Copy a tensor whose memory another name of the model has got already: the model does not tie the two."""
    part = local_tensor(tensor) if is_dtensor(tensor) else tensor
    if part.numel() == 0 or part.data_ptr() not in taken:
        taken.add(part.data_ptr())
        return tensor
    return tensor.clone()
