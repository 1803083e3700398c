"""A checkpoint loaded into a module: its names matched to the module's, its tensors assigned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hfshard.loading.options import LoadOptions
from hfshard.loading.reading import read_tensors
from hfshard.state_dicts.keys import KeyMismatch, compare
from hfshard.state_dicts.state_dict import assign, collect_state_dict
from hfshard.state_dicts.tied import find_shared_tensors
from hfshard.state_dicts.wrappers import has_wrapper_prefix, match_prefixes, unwrap
from hfshard.storage.checkpoint.checkpoint import OpenCheckpoint


def match_to_model(
    tensors: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], KeyMismatch]:
    """The tensors of a checkpoint by the names that a model has for them, and how the two differ.

    Args:
        tensors: As they were saved.
        own: The model's, by the names that `collect_state_dict` gives.
    """
    fitting = dict(tensors)
    if has_wrapper_prefix(fitting):
        names = match_prefixes(fitting, own.keys())
        fitting = {names[name]: tensor for name, tensor in fitting.items()}
    fitting = _with_tied_names(fitting, own)
    return fitting, compare(fitting, own)


def load_into_module(model: nn.Module, checkpoint: OpenCheckpoint, options: LoadOptions) -> dict[str, Any]:
    """Load a checkpoint into a module.

    Args:
        model: Changed; wrappers around it are looked through.
        checkpoint: Open.
        options: How; `strict=False` passes over missing and unexpected names.

    Returns:
        What differs, in the form of transformers' `output_loading_info`.

    Raises:
        StateDictMismatchError: Names or shapes do not fit; nothing was assigned.
    """
    model = unwrap(model)
    own = collect_state_dict(model)
    tensors, difference = match_to_model(read_tensors(checkpoint, None, "cpu", options.read), own)
    matched = len(own) - len(difference.missing)
    difference.raise_unless_allowed(strict=options.strict is not False, path=checkpoint.directory, matched=matched)
    assign(model, tensors)
    return {
        "missing_keys": set(difference.missing),
        "unexpected_keys": set(difference.unexpected),
        "mismatched_keys": set(difference.mismatched),
        "error_msgs": [],
    }


def _with_tied_names(tensors: dict[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Names that the model ties to one that the checkpoint has are not missing."""
    tied = {}
    for alias, kept in find_shared_tensors(own).items():
        if alias not in tensors and kept in tensors:
            tied[alias] = tensors[kept]
        elif kept not in tensors and alias in tensors:
            tied[kept] = tensors[alias]
    return {**tensors, **tied}
