"""Saves of a model by this process or by the ranks that have parts of it: of a plain module, and what all share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from hfshard._util.arguments import wraps_os_errors
from hfshard.distributed.save_on_ranks import abort_peers_on_error, save_here_or_on_ranks, skip_save
from hfshard.distributed.spread_tensor import has_spread
from hfshard.format.index import CheckpointIndex
from hfshard.saving.save_request import SaveOptions, request_from_module
from hfshard.tensors.state_dict import reject_sharded_tensors


@wraps_os_errors("directory")
def save_module(
    model: nn.Module,
    directory: str,
    state_dict: Mapping[str, Any] | None,
    options: SaveOptions,
    is_main_process: bool = True,
    files: Mapping[str, Any] | None = None,
) -> CheckpointIndex | None:
    """Save a module that is not a transformers model, alone or together with other ranks that have parts of it.

    Args:
        model: The module; wrappers around it are removed.
        directory: Absolute.
        state_dict: Tensors to save instead of the module's own; not mutated.
        options: How to save.
        is_main_process: False saves nothing, unless the model is spread over ranks or the save is collective.
        files: Fields of the request for the files other than weights.

    Returns:
        The index, or None if nothing was saved.

    Raises:
        Everything that `save_here_or_on_ranks` raises.
    """
    is_part = partial(is_spread, model, state_dict)
    if not (is_main_process or options.is_collective):
        tensors = model.state_dict() if state_dict is None else state_dict
        reject_sharded_tensors(tensors)
        is_part = partial(has_spread, tensors)
    if leaves_save(directory, options, is_part, is_main_process=is_main_process):
        return None
    with abort_peers_on_error(directory, lambda: options.is_collective or is_part()):
        request = replace(request_from_module(model, state_dict, options), **(files or {}))
    return save_here_or_on_ranks(request, directory)


def is_spread(model: nn.Module, state_dict: Mapping[str, Any] | None = None) -> bool:
    """Return whether the model, or the tensors given in its place, are spread over ranks, so that all must call.

    After a forward pass, parameters of `fully_shard` may be full until they are saved.
    """
    if state_dict is not None:
        return has_spread(state_dict)
    if has_spread(dict(model.named_parameters())):
        return True
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in model.modules())


def leaves_save(
    directory: str | os.PathLike[str], options: SaveOptions, is_part: Callable[[], bool], *, is_main_process: bool
) -> bool:
    """Return whether this rank leaves a save to others, which then do not wait for it.

    Args:
        directory: As in `save_model`.
        options: How to save.
        is_part: Returns whether this rank has a part of what is saved.
        is_main_process: As in `save_model`.
    """
    if is_main_process or options.is_collective or is_part():
        return False
    skip_save(directory)
    return True
