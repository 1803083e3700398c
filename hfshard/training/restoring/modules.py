"""Compares a saved module with the one that was built, and plans how its tensors are assigned."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from hfshard.checkpoint.into_module import match_to_model, refuse_expanded
from hfshard.errors import StateDictMismatchError
from hfshard.tensors.parameter_names import unwrap
from hfshard.tensors.state_dict import assign, collect_state_dict, refuse_freed, refuse_offloaded
from hfshard.training.parts.pending_loads import PendingLoad
from hfshard.training.restoring.module_copy import keep_module, may_refuse

_SHOWN: Final = 5
"""How many dtypes a message lists."""


def plan_module(
    name: str, module: nn.Module, saved: dict[str, Any], directory: str, differences: list[str], *, strict: bool
) -> PendingLoad:
    """Compare the tensors of a module with those that were saved, and return what assigns them.

    Args:
        name: The module's name in the training state.
        module: The module that was built; wrappers are looked through. It is not changed before the load.
        saved: Name -> what was saved.
        directory: The checkpoint's, for messages.
        differences: Without strict, receives what does not fit, in words.
        strict: Refuse any difference.

    Raises:
        StateDictMismatchError: strict, and something differs; or two different tensors would become one.
    """
    module = unwrap(module)
    refuse_offloaded(module)
    own = collect_state_dict(module)
    refuse_freed(own)
    tensors, difference = match_to_model(saved, own, directory, model_name=f"'{name}' that was built")
    refuse_expanded(module, tensors, directory)
    ignored = getattr(module, "_keys_to_ignore_on_save", None) or ()
    missing = tuple(key for key in difference.missing if key not in ignored)
    dtypes = _dtype_differences(tensors, own)
    if missing or difference.unexpected or difference.mismatched or dtypes:
        parts = [text for text in (difference.summary(), "; ".join(dtypes[:_SHOWN])) if text]
        message = (
            f"'{name}' does not fit the checkpoint '{directory}': {'; '.join(parts)}. "
            "Build it as in the run that was saved, or pass strict=False to load what fits."
        )
        if strict:
            raise StateDictMismatchError(
                message + " Nothing was restored.",
                path=directory,
                missing_keys=missing,
                unexpected_keys=difference.unexpected,
                mismatched_keys=difference.mismatched,
            )
        differences.append(message)
        mismatched = {key for key, _, _ in difference.mismatched}
        tensors = {key: tensor for key, tensor in tensors.items() if key in own and key not in mismatched}
    return PendingLoad(
        name, lambda: assign(module, tensors), keep=partial(keep_module, module), may_refuse=may_refuse(module)
    )


def _dtype_differences(tensors: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """The tensors whose dtype is another one than the module's, in words."""
    found: list[str] = []
    for key, tensor in tensors.items():
        current = own.get(key)
        if not (isinstance(current, torch.Tensor) and isinstance(tensor, torch.Tensor)):
            continue
        if current.dtype != tensor.dtype:
            found.append(f"{key} was {tensor.dtype}, and is {current.dtype}")
    return found
