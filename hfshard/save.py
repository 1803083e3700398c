"""Saves a model or a state dict: collect, plan, write, index, commit."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hfshard.constants import DEFAULT_MAX_SHARD_SIZE
from hfshard.errors import InvalidArgumentError
from hfshard.plan import Packing, ShardPlan, plan_specs, with_one_more_shard
from hfshard.progress import bytes_bar
from hfshard.size import parse_size
from hfshard.state_dict import collect_state_dict, tensor_specs, unwrap
from hfshard.storage.commit import SaveSession, save_session
from hfshard.storage.index import CheckpointIndex, FileRecord, own_metadata
from hfshard.storage.integrity import Checksum, check_checksum, sha256_of
from hfshard.storage.names import WeightNames
from hfshard.storage.shard_writer import ShardJob, file_order, sample_of, shard_header, shard_metadata, write_shards
from hfshard.storage.transition import NewCheckpoint, digest_of, needs_links, plan_transition
from hfshard.tied import find_ties

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What is to be saved, collected and checked."""

    tensors: Mapping[str, torch.Tensor]
    """FQN -> tensor, each stored once."""
    names: WeightNames
    max_shard_bytes: int
    packing: Packing = "greedy"
    checksum: Checksum | None = "sha256"
    aliases: Mapping[str, str] = field(default_factory=dict)
    undeclared: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """For the index."""
    file_metadata: Mapping[str, str] = field(default_factory=dict)
    """For every file's `__metadata__`."""
    total_parameters: int | None = None
    config: bytes | None = None
    extras: Mapping[str, bytes] = field(default_factory=dict)
    progress: bool | None = None

    @property
    def small_records(self) -> dict[str, FileRecord]:
        """Records of the small JSON files that belong to the checkpoint."""
        files = {**({"config.json": self.config} if self.config is not None else {}), **self.extras}
        return {
            name: FileRecord(size=len(raw), sha256=sha256_of(raw))
            for name, raw in sorted(files.items())
            if name.endswith(".json")
        }


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
    tensor_specs(state_dict)
    aliases = find_ties(state_dict)
    request = SaveRequest(
        tensors={name: tensor for name, tensor in state_dict.items() if name not in aliases},
        names=WeightNames(variant),
        max_shard_bytes=limit,
        packing=packing,
        checksum=checksum,
        aliases=aliases,
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
    limit = parse_size(max_shard_size)
    check_checksum(checksum)
    names = WeightNames(variant)
    if not is_main_process:
        return None
    model = unwrap(model)
    request = SaveRequest({}, names, limit, packing, checksum, metadata=dict(metadata or {}), progress=progress)
    if is_pretrained(model):
        request = _pretrained_request(model, state_dict, request, save_original_format=save_original_format)
    else:
        collected = dict(state_dict) if state_dict is not None else collect_state_dict(model)
        tensor_specs(collected)
        aliases = find_ties(collected)
        stored = {name: tensor for name, tensor in collected.items() if name not in aliases}
        request = replace(request, tensors=stored, aliases=aliases)
    return save_request(request, save_directory)


def is_pretrained(model: object) -> bool:
    """Whether it is a transformers model; transformers is not imported to find out."""
    transformers = sys.modules.get("transformers.modeling_utils")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def save_request(request: SaveRequest, save_directory: str | os.PathLike[str]) -> CheckpointIndex:
    """Plan, write, index, commit."""
    directory = os.fspath(save_directory)
    plan = _plan(request)
    with save_session(directory, request.names) as session:
        plan = _with_free_names(plan, session, request)
        session.check_space(plan.total_size)
        with bytes_bar("Saving", plan.total_size, request.progress) as on_bytes:
            new, index = _stage(plan, session, request, on_bytes)
            if _must_rename(plan, new, index, session):
                session.empty_staging()
                plan = _until_free(with_one_more_shard(plan, request.names), session, request.names)
                new, index = _stage(plan, session, request, None)
        session.commit(plan_transition(session.state, new))
    logger.info("Saved %d tensors, %d bytes, into '%s'.", len(index.weight_map), plan.total_size, directory)
    return index


def _pretrained_request(
    model: nn.Module, state_dict: Mapping[str, Any] | None, request: SaveRequest, *, save_original_format: bool
) -> SaveRequest:
    from hfshard.pretrained import pretrained_state

    state = pretrained_state(cast_pretrained(model), state_dict, save_original_format=save_original_format)
    tensor_specs(state.state_dict)
    files = dict(state.files)
    return replace(
        request,
        tensors=state.state_dict,
        aliases=state.aliases,
        undeclared=state.undeclared,
        file_metadata=state.metadata,
        total_parameters=state.total_parameters,
        config=files.pop("config.json"),
        extras=files,
    )


def cast_pretrained(model: nn.Module) -> PreTrainedModel:
    """For the type checker: `is_pretrained` said so."""
    return model  # type: ignore[return-value]


def _plan(request: SaveRequest) -> ShardPlan:
    specs = tensor_specs(request.tensors)
    own = own_metadata(request.small_records, request.aliases, request.undeclared)
    room = len(repr(own)) * 2 + len(repr(dict(request.file_metadata))) * 2 + len(repr(dict(request.metadata))) * 2 + 512
    return plan_specs(
        specs,
        request.max_shard_bytes,
        packing=request.packing,
        names=request.names,
        aliases=request.aliases,
        single_metadata_bytes=room,
        shard_metadata_bytes=256 + len(repr(dict(request.file_metadata))) * 2,
    )


def _with_free_names(plan: ShardPlan, session: SaveSession, request: SaveRequest) -> ShardPlan:
    """Take names that no file has, unless the files there look like the ones that are to be written."""
    if not plan.is_sharded or _looks_saved(plan, session, request):
        return plan
    return _until_free(plan, session, request.names)


def _until_free(plan: ShardPlan, session: SaveSession, names: WeightNames) -> ShardPlan:
    while plan.is_sharded and not session.state.listing.isdisjoint(shard.file for shard in plan.shards):
        plan = with_one_more_shard(plan, names)
    return plan


def _looks_saved(plan: ShardPlan, session: SaveSession, request: SaveRequest) -> bool:
    """Whether the index that stands there lists these very files, by their samples."""
    index = session.state.index
    if index is None or index.weight_map != plan.weight_map:
        return False
    for shard in plan.shards:
        tensors = file_order({name: request.tensors[name] for name in shard.names})
        header = shard_header(tensors, shard_metadata(tensors, request.file_metadata))
        record = index.files.get(shard.file)
        if record is None or record.sample != sample_of(header, list(tensors.values())):
            return False
    return True


def _must_rename(plan: ShardPlan, new: NewCheckpoint, index: CheckpointIndex, session: SaveSession) -> bool:
    """Whether files that looked the same turned out to differ, or a single file needs links that there are none of."""
    old = session.state
    if plan.is_sharded:
        taken = [shard.file for shard in plan.shards if shard.file in old.listing]
        same = old.index is not None and all(old.index.files.get(file) == index.files[file] for file in taken)
        return bool(taken) and not (same and index.is_verifiable)
    return needs_links(old, new) and not session.can_link(next(iter(new.shards.values())))


def _stage(
    plan: ShardPlan, session: SaveSession, request: SaveRequest, on_bytes: Callable[[int], object] | None
) -> tuple[NewCheckpoint, CheckpointIndex]:
    """Write the weights into the staging directory, and make the index."""
    small = request.small_records
    own = None if plan.is_sharded else own_metadata(small, request.aliases, request.undeclared)
    extra = dict(request.file_metadata)
    if not plan.is_sharded:
        extra |= {
            key: value if isinstance(value, str) else json.dumps(value) for key, value in request.metadata.items()
        }
    like = _replaced(plan, session, request.names)
    jobs, staged = [], {}
    for number, shard in enumerate(plan.shards):
        tensors = file_order({name: request.tensors[name] for name in shard.names})
        staged[shard.file] = f"{number:05d}.weights"
        path = os.path.join(session.staging, staged[shard.file])
        jobs.append(ShardJob(path, tensors, shard_metadata(tensors, extra), own, like))
    records = write_shards(jobs, checksum=request.checksum, on_bytes=on_bytes)
    files = {shard.file: record for shard, record in zip(plan.shards, records, strict=True)}
    index = CheckpointIndex(
        weight_map=plan.weight_map,
        total_size=plan.total_size,
        total_parameters=_parameters(request),
        metadata=dict(request.metadata),
        files={**files, **small},
        aliases=dict(request.aliases),
        undeclared=request.undeclared,
    )
    index_json = index.to_json() if plan.is_sharded else None
    digest = digest_of([index_json] if index_json is not None else [repr(files).encode()])
    keys = list(plan.weight_map)
    return NewCheckpoint(staged, keys, index_json, request.config, dict(request.extras), digest), index


def _replaced(plan: ShardPlan, session: SaveSession, names: WeightNames) -> os.stat_result | None:
    """The file whose mode and group the new weights get: the old single file, or any old shard."""
    shards = [name for name in sorted(session.state.owned) if names.is_shard(name)]
    for name in [names.single, *shards, names.bin_single]:
        if (status := session.status_of(name)) is not None:
            return status
    return None


def _parameters(request: SaveRequest) -> int:
    if request.total_parameters is not None:
        return request.total_parameters
    return sum(tensor.numel() for tensor in request.tensors.values())
