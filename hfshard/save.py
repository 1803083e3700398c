"""Save a model or a state dict."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hfshard.constants import DEFAULT_MAX_SHARD_SIZE
from hfshard.planning.plan import Packing
from hfshard.pretrained.request import request_from_model
from hfshard.saving.options import SaveOptions
from hfshard.saving.request import request_from_state_dict
from hfshard.saving.to_directory import save_request
from hfshard.storage.format.index import CheckpointIndex
from hfshard.storage.format.integrity import Checksum


def save_state_dict(
    state_dict: Mapping[str, torch.Tensor],
    save_directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str = DEFAULT_MAX_SHARD_SIZE,
    packing: Packing = "greedy",
    variant: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    checksum: Checksum | None = "sha256",
    progress: bool | None = None,
) -> CheckpointIndex:
    """Save a state dict as one or more safetensors files, durably and all or nothing.

    What stood in the directory loads until the new checkpoint is whole; then its weights of the same variant are
    removed. Other files stay.

    Args:
        state_dict: FQN -> tensor: any shape, strides, device, and any dtype that safetensors knows (complex128 is
            stored as pairs). Names that share one tensor are stored once, and tied again on load. Not mutated.
        save_directory: Made when it is missing.
        max_shard_size: Bytes, or a string such as "5GB" or "500MiB": the most that a file has, header included, unless
            it holds exactly one tensor.
        packing: "greedy": in state dict order, as upstream; "balanced": the fewest files, levelled.
        variant: Part of the files' names, as in transformers: "fp16" gives `model.fp16.safetensors`.
        metadata: More for the index's `metadata` (JSON values), or for the `__metadata__` of a single file (as text).
        checksum: "sha256" (the Hub's own), "xxh3" (at the memory's speed), or None.
        progress: A bar on stderr: None: on a terminal; False: never; True: always.

    Returns:
        The index: which file holds which tensor, sizes and checksums.

    Raises:
        InvalidSizeError, InvalidArgumentError, UnstorableTensorError: Before anything is touched.
        SaveDirectoryError: The directory is a file.
        NotEnoughSpaceError: Before the first byte is written.
        DirectoryLockedError: Another process is saving there.
        OSError: The disk failed; the directory is as it was.
        CommitUnfinishedError: The new checkpoint loads, but the old one could not be removed.
    """
    options = SaveOptions(
        max_shard_size=max_shard_size,
        variant=variant,
        packing=packing,
        metadata=metadata or {},
        checksum=checksum,
        progress=progress,
    )
    return save_request(request_from_state_dict(state_dict, options), save_directory)


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
    progress: bool | None = None,
) -> CheckpointIndex | None:
    """Save any module; a transformers model with its config, generation config and custom code.

    Wrappers (DataParallel, DistributedDataParallel, torch.compile) are taken off first.

    Args:
        model: Any module; not changed, but that a transformers model's config gets `dtype` and `architectures`, as
            upstream does.
        save_directory: As in `save_state_dict`, and so are max_shard_size, variant, packing, checksum and progress.
        is_main_process: False: nothing is saved (another process does).
        state_dict: What to save in place of the model's own; not mutated.
        metadata: More for the index's `metadata`.
        save_original_format: transformers models: under the names of the original checkpoint, as upstream does.

    Returns:
        The index, or None where `is_main_process` is False.

    Raises:
        Everything that `save_state_dict` raises.
    """
    options = SaveOptions(
        max_shard_size=max_shard_size,
        variant=variant,
        packing=packing,
        metadata=metadata or {},
        save_original_format=save_original_format,
        checksum=checksum,
        progress=progress,
    )
    if not is_main_process:
        return None
    return save_request(request_from_model(model, state_dict, options), save_directory)
