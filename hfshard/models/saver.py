"""Save or push a transformers model through its own save_pretrained."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from hfshard._util.call_ranks import Session, call_ranks, has_other_ranks, together_if
from hfshard.commit.directory_state import reject_hub_directory
from hfshard.constants import DEFAULT_MAX_SHARD_SIZE
from hfshard.distributed.push_together import push_together
from hfshard.errors import InvalidArgumentError
from hfshard.format.index import CheckpointIndex
from hfshard.hub.push_files import PushOptions
from hfshard.models.collect import request_from_pretrained
from hfshard.models.model_classes import (
    call_with_overrides,
    class_before_fsdp,
    has_adapters,
    has_override,
    is_offloaded_by_map,
    is_pipeline_stage,
    is_registered_with_mixin,
    needs_transformers_saver,
    view_as_alias,
)
from hfshard.models.module_weights import (
    PUSH_ARGUMENTS,
    SAVE_ARGUMENTS,
    abort_peers_on_error,
    check_push_arguments,
    check_save_arguments,
    is_spread,
    leaves_save,
    save_here_or_on_ranks,
    take_repo_id,
    without_defaults,
)
from hfshard.models.patching import OverrideCall, active_call, upstream
from hfshard.models.push_model import ModelPush, begin_push, make_model_card, merge_tags
from hfshard.models.rank_parts import build_meta_model
from hfshard.places.place import Place, place_to_save
from hfshard.saving.save_request import SaveOptions, SaveRequest, needs_all_ranks
from hfshard.tensors.parameter_names import strip_compiled
from hfshard.tensors.zero3 import has_partitioned, reject_partitioned


def save_with_overrides(
    start: Any,
    model: PreTrainedModel,
    save_directory: str | os.PathLike[str],
    arguments: Mapping[str, Any],
    options: SaveOptions,
) -> CheckpointIndex | None:
    """Call a model's `save_pretrained` with all its overrides; hfshard handles the call to transformers' own method.

    Args:
        start: The object with the first method of the chain: the model, or `super()`.
        arguments: The other arguments of transformers' `save_pretrained`.
        options: hfshard's own, checked; sizes and names are those that the last override passes on.

    Returns:
        The index of hfshard's last save, or None if it saved nothing.

    Raises:
        UnknownArgumentError: A keyword argument that neither hfshard nor any override takes.
        Everything that `save_here_or_on_ranks` raises, and the overrides.
    """
    directory = _absolute(save_directory)
    reject_hub_directory(os.fspath(directory))
    outer = active_call("save_pretrained", model)
    if outer is not None and _own(options) == _own(SaveOptions()):
        start.save_pretrained(directory, **without_defaults(arguments))  # save_model has reached the mixin's method
        return None

    def answer(*args: Any, **kwargs: Any) -> None:
        call.answers.append(handle_save_pretrained(model, options, *args, **kwargs))

    call = OverrideCall("save_pretrained", model, answer, [] if outer is None else outer.answers)
    call_with_overrides(call, start, directory, **without_defaults(arguments))
    indexes = [index for index in call.answers if index is not None]
    return indexes[-1] if indexes else None


def save_pretrained_model(
    model: PreTrainedModel,
    save_directory: str | os.PathLike[str],
    is_main_process: bool,
    state_dict: Mapping[str, Any] | None,
    options: SaveOptions,
) -> CheckpointIndex | None:
    """Save a transformers model for `hfshard.save_model`, including what its class's own `save_pretrained` adds.

    With `is_main_process=False`, nothing is saved, unless every rank has a part of what is saved.
    """
    place = place_to_save(save_directory)
    if leaves_save(place, options, partial(joins_save, model, state_dict), is_main_process=is_main_process):
        return None
    if not (has_override(type(model), "save_pretrained") or has_adapters(model)):
        return save_here_or_on_ranks(_request(model, state_dict, options, place), place)
    if has_adapters(model) and options.metadata:
        raise InvalidArgumentError(
            "The model has an adapter, whose files transformers writes without metadata. Leave out metadata=."
        )
    arguments = {
        "state_dict": state_dict,
        "max_shard_size": options.max_shard_size,
        "variant": options.variant,
        "save_original_format": options.save_original_format,
    }
    return save_with_overrides(model, model, save_directory, arguments, options)


def _absolute(save_directory: str | os.PathLike[str]) -> str | Path:
    """Make the path absolute; a Path stays a Path, since an override may rely on it."""
    directory = place_to_save(save_directory).address
    return directory if isinstance(save_directory, str) else Path(directory)  # never an address: a Path can't hold one


def _own(options: SaveOptions) -> tuple[Any, ...]:
    """Return the options that transformers does not have."""
    return options.packing, options.checksum, options.metadata, options.progress, options.is_collective


def handle_save_pretrained(
    model: PreTrainedModel,
    options: SaveOptions,
    /,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    push_to_hub: bool = False,
    max_shard_size: int | str = DEFAULT_MAX_SHARD_SIZE,
    variant: str | None = None,
    token: str | bool | None = None,
    save_peft_format: bool = True,
    save_original_format: bool = True,
    distributed_checkpoint: bool = False,
    **kwargs: Any,
) -> CheckpointIndex | None:
    """Save in place of PreTrainedModel's own `save_pretrained`, with its arguments, below all overrides."""
    place = place_to_save(save_directory)
    directory = place.address
    check_save_arguments(place, token, kwargs, SAVE_ARGUMENTS, push_to_hub=push_to_hub)
    options = replace(
        options, max_shard_size=max_shard_size, variant=variant, save_original_format=save_original_format
    )
    # An empty state dict asks for the config alone: existing weights must not be replaced by a checkpoint without any.
    is_empty = state_dict is not None and not state_dict and not options.is_collective
    is_kept = is_empty and not push_to_hub and place.is_read_from_disk
    saves_config_alone = is_kept and not is_registered_with_mixin(type(model))
    if saves_config_alone and has_other_ranks() and dist.get_rank() != call_ranks()[0]:
        is_main_process = False  # one rank writes the config; another one may have the weights
    if saves_config_alone or needs_transformers_saver(model, distributed_checkpoint=distributed_checkpoint):
        if is_main_process and state_dict is None:
            reject_partitioned(model)
        reject_partial_save(model)
        reject_hub_directory(directory)
        _reject_store(model, place)
        if is_main_process and is_offloaded_by_map(model) and has_other_ranks():
            raise InvalidArgumentError(
                f"Cannot save {type(model).__name__} with save_pretrained on several ranks: a device_map offloaded "
                "some of its weights, which transformers saves on every calling rank, over the files of the others. "
                "Call hfshard.save_model(model, save_directory), on any ranks: it reads offloaded weights in place."
            )
        if is_registered_with_mixin(type(model)):
            raise InvalidArgumentError(
                f"{type(model).__qualname__} is registered as custom code (register_for_auto_class), and "
                "transformers, which saves offloaded weights and adapters, would save the code of its own class. "
                "Save the adapter with a class that is not registered, or load the model without offloading."
            )
        saved = view_as_alias(model)
        upstream("save_pretrained", type(saved))(
            saved,
            directory,
            is_main_process=is_main_process,
            state_dict=None if state_dict is None else dict(state_dict),
            max_shard_size=max_shard_size,
            variant=variant,
            save_peft_format=save_peft_format,
            save_original_format=save_original_format,
            distributed_checkpoint=distributed_checkpoint,
        )
        if push_to_hub and (is_main_process or is_part(model, state_dict)):
            arguments = {**kwargs, "max_shard_size": max_shard_size, "variant": variant, "token": token}
            cast(Any, model).push_to_hub(take_repo_id(arguments, directory), **arguments)  # which saves it again
        return None
    if leaves_save(place, options, partial(joins_save, model, state_dict), is_main_process=is_main_process):
        return None
    request = _request(model, state_dict, options, place)
    index = save_here_or_on_ranks(request, place)
    if push_to_hub:
        arguments = {**kwargs, "token": token, "progress": options.progress}
        is_shared = needs_all_ranks(request) or (state_dict is None and is_part_of_push(model))
        with together_if(is_shared, push_together) as ranks:
            _push_files(model, request, index, place, arguments, ranks)
    return index


def _reject_store(model: PreTrainedModel, place: Place) -> None:
    """Reject a save into a store by transformers, which would create a directory named like the address."""
    if not place.is_read_from_disk:
        raise InvalidArgumentError(
            f"Cannot save this {type(model).__name__} to '{place.address}': transformers itself saves adapters, "
            "weights that a device_map has offloaded, and distributed_checkpoint=True, and only into directories. Save "
            "it into a directory, and copy that with the service's tool; or, for a model without adapters, call "
            "hfshard.save_model(model, address), which reads offloaded weights in place.",
            path=place.address,
        )


def _request(
    model: PreTrainedModel, state_dict: Mapping[str, Any] | None, options: SaveOptions, place: Place
) -> SaveRequest:
    """Build the save request; if that fails on one of several ranks that have parts, the others are notified."""
    with abort_peers_on_error(place, lambda: options.is_collective or is_part(model, state_dict)):
        return request_from_pretrained(model, state_dict, options, place.address)


def _push_files(
    model: PreTrainedModel,
    request: SaveRequest,
    index: CheckpointIndex,
    place: Place,
    arguments: dict[str, Any],
    ranks: Session,
) -> None:
    """Push the files of a save into a directory; after a save into a store, push from memory instead."""
    repo_id = take_repo_id(arguments, place.address)
    push = _begin_push(model, repo_id, arguments.pop("tags", None), PushOptions(**arguments), ranks)
    if place.is_read_from_disk:
        push.send_saved(request, index, place.address)
    else:
        push.send(request)


# Pushes of a transformers model: straight from memory, or from the files that its own save_pretrained writes.


def push_pretrained_model(
    model: PreTrainedModel,
    repo_id: str | os.PathLike[str],
    tags: list[str] | str | None,
    saving: Mapping[str, Any],
    pushing: Mapping[str, Any],
    unknown: Mapping[str, Any],
) -> Any:
    """Push a model as one Hub commit, together with other ranks if each of them has a part of it.

    Args:
        tags: For the model card, in addition to the model's own.
        saving: Options of `SaveOptions`.
        pushing: Options of `PushOptions`.
        unknown: Keyword arguments that `push_to_hub` does not name; rejected but for those that older code passes.
    """
    with together_if(is_part_of_push(model), push_together) as ranks:
        check_push_arguments(dict(unknown), PUSH_ARGUMENTS)
        options = SaveOptions(**saving)
        push = _begin_push(model, repo_id, tags, PushOptions(**pushing), ranks)
        if needs_transformers_saver(model, distributed_checkpoint=False) or has_override(
            type(model), "save_pretrained"
        ):
            given = {name: value for name, value in saving.items() if name in ("max_shard_size", "variant", "packing")}
            save = partial(model.save_pretrained, **without_defaults(given))
            return push.send_by_directory(save, options.variant)
        return push.send(request_from_pretrained(model, None, options, os.fspath(repo_id)))


def _begin_push(
    model: PreTrainedModel,
    repo_id: str | os.PathLike[str],
    tags: list[str] | str | None,
    options: PushOptions,
    ranks: Session,
) -> ModelPush:
    """Agree on the repo of a push, whose card has the model's own tags too, and whose message is transformers'."""
    name = class_before_fsdp(type(model)).__name__
    message = "Upload model" if "Model" in name else f"Upload {name}"
    make_card = partial(make_model_card, tags=merge_tags(getattr(model, "model_tags", None), tags))
    return begin_push(repo_id, make_card, options, message, ranks)


# Parts of a model: spread tensors, or the layers of a pipeline stage.


def is_part(model: Any, state_dict: Mapping[str, Any] | None) -> bool:
    """Return whether a save needs other ranks' parts of the model, or of the tensors given in its place."""
    return (state_dict is None and is_pipeline_stage(model)) or is_spread(model, state_dict)


def joins_save(model: Any, state_dict: Mapping[str, Any] | None) -> bool:
    """Return whether a rank takes part in a save although it was told that it is not the main process.

    Trainer and Accelerate tell this to ranks whose ZeRO-3 parameters they have gathered on the first rank.
    """
    return is_part(model, state_dict) and (state_dict is not None or not has_partitioned(model))


def is_part_of_push(model: Any) -> bool:
    """Return whether a push needs other ranks' parts: a part as in `is_part`, or a stage that the user has created.

    Such a stage has plain tensors. It is recognized if there are other ranks, and if a module that has parameters in
    the full model of its config has none in it.
    """
    if is_part(model, None):
        return True
    if not has_other_ranks() or has_adapters(model):
        return False
    whole = build_meta_model(model)
    if whole is None:
        return False
    names = [strip_compiled(name) for name, _ in model.named_parameters(remove_duplicate=False)]
    there = {name[:at] for name in names for at, letter in enumerate(name) if letter == "."}
    return any(
        name.rpartition(".")[0] not in there
        for name, _ in whole.named_parameters(remove_duplicate=False)
        if "." in name
    )


def reject_partial_save(model: Any) -> None:
    """Reject a save by transformers of a part of a model, if transformers does not gather the rest.

    Source: transformers `PreTrainedModel.gather_sharded_state_dict_for_save`, which gathers no stages, and nothing
    without a `distributed_config`.
    """
    if is_pipeline_stage(model):
        raise InvalidArgumentError(
            "Cannot save one of several pipeline stages with an adapter, offloaded weights or "
            "distributed_checkpoint=True: transformers makes that save, and would save this stage as the full "
            "model. Save a model that was loaded without pp_size, which has all layers."
        )
    if has_other_ranks() and getattr(model.config, "distributed_config", None) is None and is_part(model, None):
        raise InvalidArgumentError(
            "Cannot save a model that is spread over ranks with an adapter, offloaded weights or "
            "distributed_checkpoint=True: transformers makes that save, and gathers only what it has spread itself. "
            "Load it with from_pretrained(..., distributed_config=...), or merge the adapter before you spread the "
            "model."
        )
