"""The adapter of a model, saved next to it as PEFT does, so that `PeftModel.from_pretrained` opens a checkpoint."""

from __future__ import annotations

import copy
import os
import sys
import tempfile
from dataclasses import replace
from typing import Any, Final

from torch import nn

from hfshard.constants import ADAPTER_CONFIG_NAME
from hfshard.saving.save_request import SaveOptions, SaveRequest
from hfshard.tensors.parameter_names import unwrap
from hfshard.tensors.state_dict import collect_state_dict

ADAPTER_BASE: Final = "adapter_model"
"""The name that PEFT gives to the file of its weights."""

_PREFIX: Final = "base_model.model."
"""The prefix of names in that file; adapters that transformers adds to a model have none in the model."""

_LARGEST: Final = sys.maxsize
"""PEFT reads one file, however large."""

_NOT_ALONE: Final = frozenset({"XLORA"})
"""Kinds of adapters that PEFT builds from several, with their own files."""


def adapter_request(model: Any, options: SaveOptions) -> SaveRequest | None:
    """Request the files that PEFT, which is imported, would write for the active adapter. A restore does not need them.

    They repeat tensors of the model's files, under PEFT's names. There are none for learned prompts, of which PEFT
    saves the encoder's output; if several adapters are active at once; and for X-LoRA.

    Args:
        model: The model, with or without wrappers.
        options: The options of the model's files.

    Returns:
        The request; None if there are no such files.
    """
    peft: Any = sys.modules["peft"]
    model = unwrap(model)
    found = _active_adapter(model, peft.PeftModel)
    if found is None or found[1].is_prompt_learning or found[1].peft_type in _NOT_ALONE:
        return None
    name, config = found
    is_wrapped = isinstance(model, peft.PeftModel)
    base: Any = model.get_base_model() if is_wrapped else model
    as_it_is = dict(vars(config))
    try:
        tensors = peft.get_peft_model_state_dict(
            model,
            state_dict=collect_state_dict(model),
            adapter_name=name,
            save_embedding_layers=_holds_embeddings(peft, base, config),
        )
        config_file = _config_file(base, config)
    finally:
        vars(config).update(as_it_is)  # PEFT renames the ranks of AdaLoRA
    return SaveRequest(
        tensors={key if is_wrapped else f"{_PREFIX}{key}": tensor for key, tensor in tensors.items()},
        options=replace(options, base=ADAPTER_BASE, max_shard_size=_LARGEST, progress=None),
        model_files={ADAPTER_CONFIG_NAME: config_file},
    )


def _active_adapter(model: Any, wrapper_class: Any) -> tuple[str, Any] | None:
    """Return the name and the config of the one active adapter."""
    if isinstance(model, wrapper_class):
        names = model.active_adapters
    elif getattr(model, "_hf_peft_config_loaded", False):  # as transformers marks a model to which it added adapters
        names = model.active_adapters()
    else:
        return None
    return (names[0], model.peft_config[names[0]]) if len(names) == 1 else None


def _holds_embeddings(peft: Any, base: Any, config: Any) -> bool:
    """Return whether the file has the embeddings, too: they were adapted, or their number has changed.

    PEFT decides it in the same way, but would request the base model's config from the Hub at each save. This uses only
    what is on this machine.
    """
    adapted = {name.rpartition(".")[2] for name, module in base.named_modules() if hasattr(module, "base_layer")}
    has_new_tokens = config.peft_type == "TRAINABLE_TOKENS" or getattr(config, "trainable_token_indices", None)
    if not adapted.isdisjoint(peft.utils.constants.EMBEDDING_LAYER_NAMES) and not has_new_tokens:
        return True
    own: Any = getattr(base, "config", None)
    place = config.base_model_name_or_path
    find_config = getattr(type(own), "from_pretrained", None)  # a config of transformers
    if not place or find_config is None or not hasattr(own, "vocab_size") or not hasattr(base, "get_input_embeddings"):
        return False
    try:
        before = find_config(place, local_files_only=True)
    except OSError:  # the model was not loaded from there, and PEFT would find nothing to compare with, either
        return False
    return bool(before.vocab_size != own.vocab_size)


def _config_file(base: nn.Module, config: Any) -> bytes:
    """Return what PEFT writes for a config; the config itself is not changed."""
    config = copy.copy(config)
    config.inference_mode = True
    config.base_model_name_or_path = config.base_model_name_or_path or vars(base).get("name_or_path") or None
    names = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    with tempfile.TemporaryDirectory(prefix="hfshard-") as folder:
        config.save_pretrained(folder, auto_mapping_dict=names if config.task_type is None else None)
        with open(os.path.join(folder, ADAPTER_CONFIG_NAME), "rb") as file:
            return file.read()
