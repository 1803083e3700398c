"""Saves a model or a state dict: collect, plan, write, index, commit."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hfshard._util.progress import bytes_bar
from hfshard.constants import DEFAULT_MAX_SHARD_SIZE
from hfshard.errors import InvalidArgumentError
from hfshard.planning.plan import Packing, with_one_more_shard
from hfshard.planning.size import parse_size
from hfshard.saving.prepare import SaveRequest, avoid_taken_names, needs_new_names, plan_request, stage, with_free_names
from hfshard.state_dicts.state_dict import collect_state_dict, unwrap
from hfshard.state_dicts.tied import find_shared_tensors
from hfshard.storage.commit.commit import save_session
from hfshard.storage.commit.commit_plan import plan_commit
from hfshard.storage.format.index import CheckpointIndex
from hfshard.storage.format.integrity import Checksum, check_checksum
from hfshard.storage.format.names import WeightNames
from hfshard.storage.weights.safetensors_writer import writer_threads

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


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
    limit = parse_size(max_shard_size)
    check_checksum(checksum)
    if not isinstance(state_dict, Mapping):
        raise InvalidArgumentError(f"state_dict must map names to tensors, and is a {type(state_dict).__name__}.")
    tied_names = find_shared_tensors(state_dict)
    request = SaveRequest(
        tensors={name: tensor for name, tensor in state_dict.items() if name not in tied_names},
        names=WeightNames(variant),
        max_shard_bytes=limit,
        packing=packing,
        checksum=checksum,
        tied_names=tied_names,
        metadata=dict(metadata or {}),
        progress=progress,
    )
    return save_request(request, save_directory)


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
    request = request_of(
        model,
        state_dict,
        max_shard_size,
        variant,
        packing=packing,
        metadata=metadata,
        save_original_format=save_original_format,
        checksum=checksum,
        progress=progress,
        collect=is_main_process,
    )
    return save_request(request, save_directory) if is_main_process else None


def request_of(
    model: nn.Module,
    state_dict: Mapping[str, Any] | None,
    max_shard_size: int | str,
    variant: str | None,
    *,
    packing: Packing = "greedy",
    metadata: Mapping[str, Any] | None = None,
    save_original_format: bool = True,
    checksum: Checksum | None = "sha256",
    progress: bool | None = None,
    collect: bool = True,
) -> SaveRequest:
    """What `save_model` would save, with its arguments; only they are checked where `collect` is False."""
    limit = parse_size(max_shard_size)
    check_checksum(checksum)
    names = WeightNames(variant)
    request = SaveRequest({}, names, limit, packing, checksum, metadata=dict(metadata or {}), progress=progress)
    if not collect:
        return request
    model = unwrap(model)
    if is_pretrained(model):
        return _pretrained_request(model, state_dict, request, save_original_format=save_original_format)
    collected = dict(state_dict) if state_dict is not None else collect_state_dict(model)
    tied_names = find_shared_tensors(collected)
    stored = {name: tensor for name, tensor in collected.items() if name not in tied_names}
    return replace(request, tensors=stored, tied_names=tied_names)


def is_pretrained(model: object) -> bool:
    """Whether it is a transformers model; transformers is not imported to find out."""
    transformers = sys.modules.get("transformers.modeling_utils")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def save_request(
    request: SaveRequest, save_directory: str | os.PathLike[str], check: Callable[[], None] = lambda: None
) -> CheckpointIndex:
    """Plan, write, index, commit; `check` is called when the directory is locked, and just before the commit."""
    directory = os.fspath(save_directory)
    writer_threads()  # raises where the environment asks for what there is not
    plan = plan_request(request)
    with save_session(directory, request.names) as session:
        check()
        plan = with_free_names(plan, session, request)
        need_bytes = plan.total_size + sum(file.size for file in request.companion_files.values())
        session.check_space(need_bytes)
        with bytes_bar("Saving", need_bytes, request.progress) as progress_callback:
            new, index = stage(plan, session, request, progress_callback)
            if needs_new_names(plan, new, index, session):
                session.empty_staging()
                plan = avoid_taken_names(with_one_more_shard(plan, request.names), session, request.names)
                new, index = stage(plan, session, request, None)
        check()
        session.commit(plan_commit(session.state, new))
    logger.info("Saved %d tensors, %d bytes, into '%s'.", len(index.weight_map), plan.total_size, directory)
    return index


def _pretrained_request(
    model: nn.Module, state_dict: Mapping[str, Any] | None, request: SaveRequest, *, save_original_format: bool
) -> SaveRequest:
    from hfshard.pretrained.collect import pretrained_state

    state = pretrained_state(cast_pretrained(model), state_dict, save_original_format=save_original_format)
    files = dict(state.files)
    return replace(
        request,
        tensors=state.state_dict,
        tied_names=state.tied_names,
        undeclared_ties=state.undeclared_ties,
        file_metadata=state.metadata,
        total_parameters=state.total_parameters,
        config=files.pop("config.json"),
        model_files=files,
    )


def cast_pretrained(model: nn.Module) -> PreTrainedModel:
    """For the type checker: `is_pretrained` said so."""
    return model  # type: ignore[return-value]
