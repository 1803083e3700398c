"""A copy of a module's tensors in host memory, for the case that a hook of its own refuses those of a checkpoint."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from hfshard.tensors.state_dict import is_dtensor, local_tensor

logger = logging.getLogger(__name__)

_METHODS: Final = ("load_state_dict", "_load_from_state_dict", "set_extra_state")
"""What may refuse a state; torch's own layers do not."""


def may_refuse(module: nn.Module) -> bool:
    """Whether a hook, or a method that is not torch's, takes part in loading the module, and may raise."""
    return any(_is_loaded_by_user(one) for one in module.modules())


def keep_module(module: nn.Module) -> Callable[[], None]:
    """Copy a module's tensors and extra states, and return what puts them back."""
    held = list(_tensors(module))
    copies = {id(tensor): _own_part(tensor).to("cpu", copy=True) for _, _, tensor in held if not tensor.is_meta}
    extras = [(one, copy.deepcopy(one.get_extra_state())) for one in module.modules() if _has_extra_state(one)]

    def put_back() -> None:
        for owner, name, tensor in held:
            if getattr(owner, name) is not tensor:
                setattr(owner, name, tensor)
            if id(tensor) in copies:
                with torch.no_grad():
                    _own_part(tensor).copy_(copies[id(tensor)])
        for owner, state in extras:
            _put_back_extra(owner, state)

    return put_back


def _tensors(module: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Each parameter and buffer with the module that holds it and its name there."""
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            yield owner, name, parameter
        for name, buffer in owner.named_buffers(recurse=False, remove_duplicate=False):
            yield owner, name, buffer


def _own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor, in the same memory."""
    return local_tensor(tensor) if is_dtensor(tensor) else tensor.detach()


def _is_loaded_by_user(module: nn.Module) -> bool:
    hooks = [*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values()]
    if not all(_is_harmless(hook) for hook in hooks):
        return True
    return any(
        name in vars(module) or not getattr(type(module), name).__module__.startswith("torch.nn.") for name in _METHODS
    )


def _is_harmless(hook: Any) -> bool:
    """Whether a hook is torch's: it translates names for weight_norm, or lets go what `fully_shard` has gathered."""
    module = getattr(getattr(hook, "hook", hook), "__module__", None)
    return module == weight_norm.__module__ or str(module).startswith("torch.distributed.fsdp.")


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _put_back_extra(module: nn.Module, state: Any) -> None:
    try:
        module.set_extra_state(state)
    except Exception as error:  # noqa: BLE001 - the first refusal is being raised
        logger.error("The extra state of a %s can't be put back as it was: %s", type(module).__name__, error)
