"""Tensors of an optimizer's state as they were saved: dtypes, devices and the order in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


def fill_options(groups: Sequence[dict[str, Any]], held: Sequence[Mapping[str, Any]]) -> Callable[[], None]:
    """Put tensors of options into the tensors that the groups had: the program may hold these, and change them.

    Args:
        groups: As loaded; tensors of the groups before take the place of what they can hold. One that several groups
            had can't where these now have different numbers.
        held: The groups before, in the same order.

    Returns:
        What puts the old numbers back.
    """
    uses: dict[int, list[tuple[torch.Tensor, dict[str, Any], str]]] = {}
    for options, group in zip(groups, held, strict=False):
        for key, own in group.items():
            if isinstance(own, torch.Tensor) and isinstance(options.get(key), torch.Tensor):
                uses.setdefault(id(own), []).append((own, options, key))
    before: list[tuple[torch.Tensor, torch.Tensor]] = []
    for found in uses.values():
        own = found[0][0]
        values = [options[key] for _, options, key in found]
        if any((one.shape, one.dtype) != (own.shape, own.dtype) or not torch.equal(one, values[0]) for one in values):
            continue
        before.append((own, own.detach().clone()))
        _fill(own, values[0])
        for _, options, key in found:
            options[key] = own

    def put_back() -> None:
        for own, numbers in before:
            _fill(own, numbers)

    return put_back


def _fill(tensor: torch.Tensor, numbers: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(numbers)


def exact(loaded: Any, saved: Any, now: Any = None) -> Any:
    """Undo what `load_state_dict` did: torch casts a state to the dtype of its parameter, and moves it to its device.

    Args:
        loaded: A parameter's state after `load_state_dict`.
        saved: What was given to it.
        now: The state that the optimizer had before, if any: what it kept elsewhere than the parameter stays there.
    """
    if isinstance(loaded, torch.Tensor) and isinstance(saved, torch.Tensor):
        device = now.device if isinstance(now, torch.Tensor) else loaded.device
        return (loaded if loaded.dtype == saved.dtype else saved).to(device)
    if isinstance(loaded, dict) and isinstance(saved, dict):
        others = now if isinstance(now, dict) else {}
        for key in loaded.keys() & saved.keys():
            loaded[key] = exact(loaded[key], saved[key], others.get(key))
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
