"""Save the weights of a module that is not a transformers model, by this process or by the ranks that have parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
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
    if not (is_main_process or options.is_collective):
        tensors = model.state_dict() if state_dict is None else state_dict
        reject_sharded_tensors(tensors)
        if not has_spread(tensors):
            skip_save(directory)
            return None
    with abort_peers_on_error(directory, lambda: options.is_collective or has_spread(dict(model.named_parameters()))):
        request = replace(request_from_module(model, state_dict, options), **(files or {}))
    return save_here_or_on_ranks(request, directory)
