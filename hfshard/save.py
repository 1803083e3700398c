"""Save a model or a state dict."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hfshard._util.arguments import wraps_os_errors
from hfshard._util.call_ranks import among
from hfshard.constants import DEFAULT_MAX_SHARD_SIZE
from hfshard.errors import InvalidArgumentError
from hfshard.format.index import CheckpointIndex, Checksum
from hfshard.models.module_weights import abort_peers_on_error, save_here_or_on_ranks, save_module
from hfshard.models.patching import is_pretrained
from hfshard.places.place import place_to_save
from hfshard.saving.save_request import SaveOptions, request_from_state_dict
from hfshard.shards.shard_plan import Packing
from hfshard.tensors.parameter_names import unwrap
from hfshard.tensors.state_dict import has_spread


@wraps_os_errors("save_directory")
def save_state_dict(
    state_dict: Mapping[str, torch.Tensor],
    save_directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str = DEFAULT_MAX_SHARD_SIZE,
    packing: Packing = "greedy",
    variant: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    checksum: Checksum | None = "sha256",
    collective: bool = False,
    process_group: dist.ProcessGroup | None = None,
    progress: bool | None = None,
) -> CheckpointIndex:
    """Save a state dict as one or more safetensors files, durably and all or nothing.

    The existing checkpoint loads until the new one is complete; then the old weights of the same variant are removed.
    Other files stay.

    If the state dict has DTensors, every rank of the default process group must call this. One rank writes each file,
    from all ranks' parts, and the files are the same as those of a single process. The first rank's arguments and
    replicated tensors count. If all tensors are replicated, any rank may call, alone or with others: ranks that call
    within about a second make one save, which the first of them writes.

    Args:
        state_dict: FQN -> tensor: any shape, strides and device, and any dtype that safetensors has (complex128 is
            stored as pairs of real numbers). Names that share one tensor are stored once, and `load_state_dict`
            returns one tensor for them. Not mutated.
        save_directory: Created if it is missing. A "~" is not expanded; a relative path is resolved when the call
            begins, and later changes of the working directory have no effect. Or the address of a place in an object
            store, such as "s3://bucket/prefix": then nothing is written to disk.
        max_shard_size: Bytes, or a string such as "5GB" or "500MiB": the largest size of a file, header included,
            unless it contains exactly one tensor.
        packing: "greedy": in the order of the state dict, like transformers; "balanced": files of similar size, and
            fewer of them if possible.
        variant: Part of the files' names, as in transformers: "fp16" gives `model.fp16.safetensors`.
        metadata: JSON values to add to the index's `metadata`, or as text to the `__metadata__` of a single file.
        checksum: "sha256" (which the Hub uses), "xxh3" (as fast as memory), or None.
        collective: True: every rank of the default process group must call, and the save waits for each, as with
            DTensors. For ranks with different plain tensors, such as the stages of a pipeline, however late they call.
        process_group: The group whose ranks make this call; None: the default process group. An actor on ranks 0 and 1
            and a critic on 2 and 3 may be saved at once, each into its own directory. A rank outside the group is
            rejected.
        progress: Whether to show a bar on stderr; None: only on a terminal.

    Returns:
        The index: which file holds which tensor, sizes and checksums.

    Raises:
        InvalidSizeError, InvalidArgumentError, UnstorableTensorError: Nothing was written.
        SaveDirectoryError: The directory is a file, a directory hub, or inside one.
        NotEnoughSpaceError: Nothing was written.
        DirectoryLockedError: Another process, or thread, is saving there.
        RemoteChangedError: Another process saved into the store during the call; its checkpoint stays.
        StoreError: The store refused, or failed: the old checkpoint stays.
        OSError: The disk failed; the directory is unchanged. (While files are moved into place: CommitUndoneError.)
        CommitUnfinishedError: Every reader loads the new checkpoint, but the rest of the old one could not be removed;
            or, if the rollback of a failed step failed too, the message says which readers load which checkpoint.
        RankFailedError: Another rank failed, died or did not call; it is named. (RankMissingError: it did not call.)

    Example:
        index = hfshard.save_state_dict(state_dict, "out", max_shard_size="1GB")
        print(index.weight_map)
    """
    place = place_to_save(save_directory)
    options = SaveOptions(
        max_shard_size=max_shard_size,
        variant=variant,
        packing=packing,
        metadata=metadata or {},
        checksum=checksum,
        is_collective=collective,
        progress=progress,
    )
    with among(process_group):
        with abort_peers_on_error(place, lambda: collective or has_spread(state_dict)):
            request = request_from_state_dict(state_dict, options)
        return save_here_or_on_ranks(request, place)


@wraps_os_errors("save_directory")
def save_model(
    model: nn.Module,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: Mapping[str, Any] | None = None,
    max_shard_size: int | str = DEFAULT_MAX_SHARD_SIZE,
    variant: str | None = None,
    *,
    packing: Packing = "greedy",
    metadata: Mapping[str, Any] | None = None,
    save_original_format: bool = True,
    checksum: Checksum | None = "sha256",
    collective: bool = False,
    process_group: dist.ProcessGroup | None = None,
    progress: bool | None = None,
) -> CheckpointIndex | None:
    """Save any module; a transformers model with its config, generation config and custom code.

    For a transformers model with adapters, transformers saves the files of the active adapter, as in its
    `save_pretrained`, and the base model is not saved. Weights that accelerate has offloaded are read from where they
    are.

    If the model is wrapped (DataParallel, DistributedDataParallel, torch.compile), the inner model is saved.

    A model that is spread over ranks (FSDP, tensor parallelism, DeepSpeed ZeRO-3) is saved like a state dict of
    DTensors: every rank must call. So are the stages of a pipeline. Pass `collective=True` for your own stages, with
    plain tensors under different names, since nothing shows that they belong together. Otherwise, all ranks must call
    at the same time: one that calls a second later makes a separate save.

    Args:
        model: Any module. Not changed, except that the config of a transformers model gets `dtype` and
            `architectures`, as in transformers.
        save_directory: As in `save_state_dict`, like max_shard_size, variant, packing, checksum, collective,
            process_group and progress.
        is_main_process: False saves nothing, because another process does; unless the model is spread over ranks, but
            not by DeepSpeed, or the call is `collective`.
        state_dict: Tensors to save in place of the model's own; not mutated.
        metadata: JSON values to add to the index's `metadata`.
        save_original_format: Save a transformers model under the names of the original checkpoint, as transformers
            does.

    Returns:
        The index. None if `is_main_process` is False, or if the model's class has its own `save_pretrained` that leaves
        the saving to transformers.

    Raises:
        Everything that `save_state_dict` raises.

    Example:
        hfshard.save_model(model, "out", max_shard_size="5GB")
    """
    place = place_to_save(save_directory)
    options = SaveOptions(
        max_shard_size=max_shard_size,
        variant=variant,
        packing=packing,
        metadata=metadata or {},
        save_original_format=save_original_format,
        checksum=checksum,
        is_collective=collective,
        progress=progress,
    )
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(
            f"model must be an nn.Module, got a {type(model).__name__}. To save tensors by name, call save_state_dict."
        )
    if state_dict is not None and not isinstance(state_dict, Mapping):
        raise InvalidArgumentError(f"state_dict must map names to tensors, got a {type(state_dict).__name__}.")
    with among(process_group):
        if is_pretrained(unwrap(model)):
            from hfshard.models.saver import save_pretrained_model

            model = unwrap(model)
            return save_pretrained_model(model, save_directory, is_main_process, state_dict, options)  # type: ignore[arg-type]
        return save_module(model, place, state_dict, options, is_main_process)
