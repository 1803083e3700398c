"""Weights that accelerate keeps elsewhere while they are not computed with: in memory of the CPU, or on the disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hfshard.errors import InvalidArgumentError


def fill_offloaded(model: nn.Module, state_dict: dict[str, Any]) -> None:
    """Put the offloaded weights of a model into its state dict, in the place of the meta tensors that stand for them.

    Those on the disk are read into memory, all of them.

    Args:
        model: Not changed.
        state_dict: What `model.state_dict()` returned; changed.
    """
    if not any(_is_meta(value) for value in state_dict.values()):
        return
    for name, weights_map, key in _offloaded(model):
        if _is_meta(state_dict.get(name)) and key in weights_map:
            state_dict[name] = weights_map[key]


def refuse_offloaded(model: nn.Module) -> None:
    """Refuse to load into a model whose weights are offloaded: accelerate would go on computing with the old ones.

    Raises:
        InvalidArgumentError: It has such weights.
    """
    name = next((name for name, _, _ in _offloaded(model)), None)
    if name is not None:
        raise InvalidArgumentError(
            f"Can't load into '{name}' of the model: accelerate has offloaded it, and would go on with the old weights."
            " Load before cpu_offload, disk_offload or dispatch_model is called, or take the hooks away: "
            "accelerate.hooks.remove_hook_from_submodules(model).",
            fqn=name,
        )


def _offloaded(model: nn.Module) -> Iterator[tuple[str, Mapping[str, torch.Tensor], str]]:
    """The name of each offloaded tensor, and where it is: a mapping of accelerate's, and the key there.

    Source: accelerate `AlignDevicesHook`, whose `weights_map` holds what it puts into the module before a forward.
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
