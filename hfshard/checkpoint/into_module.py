"""Load a checkpoint into a module: match its names to the module's, and assign its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hfshard.checkpoint.load_options import LoadOptions, read_tensors
from hfshard.checkpoint.open_checkpoint import OpenCheckpoint
from hfshard.errors import StateDictMismatchError
from hfshard.tensors.fsdp1 import reshard_parameters
from hfshard.tensors.parameter_names import KeyMismatch, compare_keys, has_wrapper_prefix, match_prefixes, unwrap
from hfshard.tensors.state_dict import assign, collect_state_dict, reject_offloaded
from hfshard.tensors.tied import find_expanded_names, find_merged_names, find_shared_tensors, names_to_compare

ValuesOf = Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]
"""Function that reads tensors described on the meta device, by any names."""

Fill = Callable[[nn.Module, Mapping[str, torch.Tensor]], None]
"""Function that assigns a checkpoint's tensors to a module, by the names that `collect_state_dict` gives."""


def match_names(
    tensors: Mapping[str, torch.Tensor],
    model_state: Mapping[str, torch.Tensor],
    path: str,
    *,
    model_name: str = "model",
    values_of: ValuesOf | None = None,
) -> tuple[dict[str, torch.Tensor], KeyMismatch]:
    """Rename the tensors of a checkpoint to the names that a model has for them, and compare the two.

    Args:
        tensors: Under the names that they were saved with.
        model_state: The model's tensors, under the names that `collect_state_dict` gives.
        path: The checkpoint's path, for messages.
        model_name: Name of the model in messages.
        values_of: Reads the tensors whose values must be compared, if `tensors` has only descriptions on the meta
            device.

    Raises:
        StateDictMismatchError: Two different tensors are one in the model, so that one of them would be lost.
    """
    renamed = dict(tensors)
    if has_wrapper_prefix(renamed):
        names = match_prefixes(renamed, model_state.keys())
        renamed = {names[name]: tensor for name, tensor in renamed.items()}
    renamed = _with_tied_names(renamed, model_state)
    if values_of is not None:
        names_of_two = names_to_compare(renamed, model_state)
        two = {name: renamed[name] for name in names_of_two if renamed[name].shape == model_state[name].shape}
        renamed |= values_of(two)
    merged = find_merged_names(renamed, model_state)
    if merged is not None:
        raise StateDictMismatchError(
            f"'{merged[0]}' and '{merged[1]}' share memory in the {model_name}, but are different tensors in the "
            f"checkpoint '{path}': one of them would be lost. Nothing was loaded. Build the model as it was saved "
            "(tie_word_embeddings).",
            path=path,
            fqn=merged[0],
        )
    return renamed, compare_keys(renamed, model_state)


def load_into_module(
    model: nn.Module,
    checkpoint: OpenCheckpoint,
    options: LoadOptions,
    stored: Mapping[str, torch.Tensor] | None = None,
    fill: Fill = assign,
    values_of: ValuesOf | None = None,
) -> dict[str, Any]:
    """Load a checkpoint into a module.

    Args:
        model: Changed; wrappers around it are looked through.
        checkpoint: Open.
        options: Options of the load; `strict=False` ignores missing and unexpected names.
        stored: The checkpoint's tensors, tied names included; None: they are read according to the options.
        fill: Assigns the matching tensors, once everything is checked.
        values_of: Passed to `match_names`.

    Returns:
        The differences, in the form of transformers' `output_loading_info`.

    Raises:
        StateDictMismatchError: Names or shapes do not fit; nothing was assigned.
        DamagedCheckpointError: The module has a name whose entry in a pickle is not a dense tensor.
        InvalidArgumentError: Its weights are offloaded, DeepSpeed has partitioned them, or their memory was freed.
    """
    model = unwrap(model)
    reject_offloaded(model)
    reshard_parameters(model)
    model_state = collect_state_dict(model, "load")
    others = checkpoint.others
    if stored is None:
        stored = read_tensors(checkpoint, lambda name: name not in others, "cpu", options.read)
    tensors, difference = match_names({**stored, **others}, model_state, checkpoint.directory, values_of=values_of)
    reject_expanded(model, tensors, checkpoint.directory)
    matched = len(model_state) - len(difference.missing)
    difference.raise_unless_allowed(strict=options.strict is not False, path=checkpoint.directory, matched=matched)
    fill(model, tensors)
    return {
        "missing_keys": set(difference.missing),
        "unexpected_keys": set(difference.unexpected),
        "mismatched_keys": set(difference.mismatched),
        "error_msgs": [],
    }


def reject_expanded(model: nn.Module, tensors: Mapping[str, torch.Tensor], path: str) -> None:
    """Reject a load into tensors that torch can't assign to, before the first one is assigned.

    Args:
        model: Unwrapped.
        tensors: By the model's names.
        path: The checkpoint's path, for messages.

    Raises:
        StateDictMismatchError: The checkpoint has a tensor for an expanded tensor of the model.
    """
    expanded = [name for name in find_expanded_names(model) if name in tensors]
    if expanded:
        raise StateDictMismatchError(
            f"Cannot load the checkpoint '{path}' into '{expanded[0]}' of the model: it is expanded, so several of its "
            "elements share memory. Nothing was loaded. Give it memory of its own: .contiguous().",
            path=path,
            fqn=expanded[0],
        )


def _with_tied_names(
    tensors: dict[str, torch.Tensor], model_state: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Add the names that the model ties to a name of the checkpoint, so that they are not missing."""
    tied = {}
    for tied_name, kept in find_shared_tensors(model_state).items():
        if tied_name not in tensors and kept in tensors:
            tied[tied_name] = tensors[kept]
        elif kept not in tensors and tied_name in tensors:
            tied[kept] = tensors[tied_name]
    return {**tensors, **tied}
