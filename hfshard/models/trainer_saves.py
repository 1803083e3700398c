"""Saves by transformers' Trainer and by Accelerate once hfshard is installed, on several ranks.

What DeepSpeed ZeRO-3 has partitioned they gather on the first rank; here each rank writes its part. What the first rank
saves alone does not wait for the others. Everything else stays theirs.
"""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from hfshard._util.call_ranks import WAITS_FOR_OTHERS
from hfshard._util.threads import bound
from hfshard.errors import UnstorableTensorError
from hfshard.models.install_settings import Settings
from hfshard.models.module_weights import abort_peers_on_error, save_module, stock_shard_size
from hfshard.models.patching import is_pretrained, upstream
from hfshard.places.place import place_to_save
from hfshard.saving.save_request import SaveOptions
from hfshard.tensors.zero3 import has_partitioned, partitioned_parameters


def save_trained(_: Settings, trainer: Any, /, output_dir: str | None = None, _internal_call: bool = False) -> None:
    """Save in place of Trainer's `save_model`, which all ranks call.

    Source: transformers `Trainer.save_model` and `_save`, which returns on ranks that are not to save.
    """
    from transformers import Trainer  # Accelerate does not import it

    from hfshard.models.model_classes import has_adapters

    model, arguments = trainer.model, trainer.args
    is_theirs = arguments.save_on_each_node or getattr(trainer._save, "__func__", None) is not Trainer._save
    if is_theirs or not is_pretrained(model) or has_adapters(model) or not _has_known_parts(model):
        is_one_rank = not is_theirs and not getattr(trainer, "is_distributed_loading_by_transformers", False)
        with bound(WAITS_FOR_OTHERS, not is_one_rank):
            upstream("save_model", type(trainer))(trainer, output_dir, _internal_call)
        return
    directory = arguments.output_dir if output_dir is None else output_dir
    if arguments.should_save:
        with abort_peers_on_error(place_to_save(directory), lambda: True):
            os.makedirs(directory, exist_ok=True)  # which `_save` does before the other ranks are met
        trainer._save(directory)
    else:
        model.save_pretrained(directory)
    if arguments.push_to_hub and not _internal_call:
        trainer.push_to_hub(commit_message="Model save", revision=arguments.hub_revision)


def save_prepared(
    settings: Settings,
    accelerator: Any,
    /,
    model: Any,
    save_directory: str | os.PathLike[str],
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
) -> None:
    """Save in place of Accelerate's `save_model`, which all ranks call: only weights, tied ones by their first name."""
    is_alike = safe_serialization and not os.path.isfile(save_directory)
    module = accelerator.unwrap_model(model) if is_alike and accelerator.distributed_type == "DEEPSPEED" else None
    if module is None or hasattr(module, "_orig_mod") or not _has_known_parts(module):
        arguments = {"max_shard_size": max_shard_size, "safe_serialization": safe_serialization}
        upstream("save_model", type(accelerator))(accelerator, model, save_directory, **arguments)
        return
    later = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    later -= {name for name, _ in module.named_parameters()}
    state_dict = {name: tensor for name, tensor in module.state_dict().items() if name not in later}
    size = stock_shard_size(max_shard_size)
    options = SaveOptions(max_shard_size=size, checksum=settings.checksum, headers_count=False)
    save_module(module, place_to_save(save_directory), state_dict, options)


def _has_known_parts(module: nn.Module) -> bool:
    """Return whether ranks have parts of a module, in memory, and it is known which."""
    if not has_partitioned(module):
        return False
    try:
        partitioned_parameters(module)
    except UnstorableTensorError:
        return False
    return True
