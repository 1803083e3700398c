"""Tensors of an optimizer's state as they were saved: dtypes, devices and the order in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def moved_like(options: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """The saved options, with tensors (a learning rate) on the devices of the current ones."""
    moved = {}
    for key, value in options.items():
        now = group.get(key)
        is_elsewhere = isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor)
        moved[key] = value.to(now.device) if is_elsewhere and now is not None else value
    return moved


def exact(loaded: Any, saved: Any) -> Any:
    """Undo what `load_state_dict` did to dtypes: torch casts a state to the dtype of its parameter."""
    if isinstance(loaded, torch.Tensor) and isinstance(saved, torch.Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(loaded, dict) and isinstance(saved, dict):
        for key in loaded.keys() & saved.keys():
            loaded[key] = exact(loaded[key], saved[key])
        return loaded
    if isinstance(loaded, list) and isinstance(saved, list) and len(loaded) == len(saved):
        return [exact(mine, theirs) for mine, theirs in zip(loaded, saved)]
    if type(loaded) is tuple and type(saved) is tuple and len(loaded) == len(saved):
        return tuple(exact(mine, theirs) for mine, theirs in zip(loaded, saved))
    return loaded


def lying_like(parameter: torch.Tensor, value: Any) -> Any:
    """Give a state the memory format of its parameter: fused optimizers go through memory, not through indexes."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape or value.stride() == parameter.stride():
        return value
    alike = torch.empty_like(parameter, dtype=value.dtype, device=value.device, requires_grad=False)
    return alike.copy_(value) if alike.stride() == parameter.stride() else value
