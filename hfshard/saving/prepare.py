"""One save on its way to the commit: a plan with free names, the staged files and their index."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import Any, Final

from hfshard._util.progress import ProgressCallback
from hfshard.checkpoint.companion_files import copy_companion
from hfshard.commit.commit_plan import NewCheckpoint, content_digest, needs_links
from hfshard.commit.directory_commit import SaveSession
from hfshard.commit.transaction import ShardWriter
from hfshard.constants import README
from hfshard.disk.fsops import can_link
from hfshard.format.digests import TENSOR_DIGEST_HEX
from hfshard.format.file_names import WeightNames
from hfshard.format.index import CheckpointIndex, FileDigest, build_hfshard_metadata
from hfshard.saving.request import SaveRequest
from hfshard.shards.shard_plan import PlannedShard, ShardPlan, plan_specs, with_one_more_shard
from hfshard.shards.write_shards import WriteJob, file_order, shard_metadata
from hfshard.tensors.stored_tensor import TensorSpec, parameter_count, tensor_specs

_OWN_DIGEST_BYTES: Final = 256
"""Bytes of the digests that a single file holds of itself, with their names, without those of its tensors."""


def plan_request(request: SaveRequest) -> ShardPlan:
    """Plan the files of a request, with room in their headers for the metadata that they will carry.

    Raises:
        UnstorableTensorError: A value can't be stored in the format.
    """
    specs = tensor_specs(request.tensors)
    room = shard_room(request)
    hfshard_metadata = build_hfshard_metadata(request.model_file_digests, request.tied_names, request.undeclared_ties)
    digests = _OWN_DIGEST_BYTES + TENSOR_DIGEST_HEX * len(specs)
    single_metadata_bytes = room + digests + _json_bytes(hfshard_metadata)
    single_metadata_bytes += _json_bytes(dict(request.options.metadata))
    if request.kept_files:
        return _plan_of_files(request, specs)
    return plan_specs(
        specs,
        request.options.max_shard_bytes,
        packing=request.options.packing,
        names=request.options.names,
        tied_names=request.tied_names,
        single_metadata_bytes=single_metadata_bytes,
        shard_metadata_bytes=room,
        separate_names=request.separate_names,
        headers_count=request.options.headers_count,
    )


def _plan_of_files(request: SaveRequest, specs: Sequence[TensorSpec]) -> ShardPlan:
    """The plan of the files that a request keeps, whatever their sizes are."""
    spec_of = {spec.name: spec for spec in specs}
    names, files = request.options.names, request.kept_files
    file_names = [names.single] if len(files) == 1 else names.shards(len(files))
    shards = tuple(
        PlannedShard(file, tuple(spec_of[name] for name in held)) for file, held in zip(file_names, files, strict=True)
    )
    return ShardPlan(shards, dict(request.tied_names), request.options.max_shard_bytes)


def shard_room(request: SaveRequest) -> int:
    """The most bytes that the metadata of one of several files takes in its header."""
    return _json_bytes(shard_metadata(request.tensors, request.file_metadata))


def with_free_names(plan: ShardPlan, session: SaveSession, request: SaveRequest, writer: ShardWriter) -> ShardPlan:
    """Change a plan to names that no file has, unless the files there look like the ones to be written."""
    if not plan.is_sharded or _matches_existing(plan, session, request, writer):
        return plan
    return avoid_taken_names(plan, session, request.options.names)


def avoid_taken_names(plan: ShardPlan, session: SaveSession, names: WeightNames) -> ShardPlan:
    """Split the smallest shard until no file in the directory has any of the plan's names."""
    taken = session.state.listing | session.state.referenced
    while plan.is_sharded and not taken.isdisjoint(shard.file for shard in plan.shards):
        plan = with_one_more_shard(plan, names)
    return plan


def _json_bytes(value: Any) -> int:
    """The most bytes that a value takes as JSON inside a JSON string."""
    return len(json.dumps(json.dumps(value))) + len('"__metadata__":{},')


def _matches_existing(plan: ShardPlan, session: SaveSession, request: SaveRequest, writer: ShardWriter) -> bool:
    """Whether the index in the directory lists these very files, by their fingerprints."""
    index = session.state.index
    if index is None or index.weight_map != plan.weight_map:
        return False
    listed = [index.files.get(shard.file, FileDigest()).fingerprint for shard in plan.shards]
    if None in listed:
        return False
    found = writer.fingerprints(shard_jobs(plan, request, [""] * len(listed)), request.options.checksum)
    return all(one == other for one, other in zip(found, listed, strict=True))


def needs_new_names(plan: ShardPlan, new: NewCheckpoint, index: CheckpointIndex, session: SaveSession) -> bool:
    """Whether files that looked the same turned out to differ, or a single file needs links and can't have them."""
    old = session.state
    if plan.is_sharded:
        taken = [shard.file for shard in plan.shards if shard.file in old.listing]
        same = old.index is not None and all(old.index.files.get(file) == index.files[file] for file in taken)
        return bool(taken) and not (same and index.is_verifiable)
    return needs_links(old, new) and not session.can_link(next(iter(new.shards.values())))


def write_staged(
    plan: ShardPlan,
    session: SaveSession,
    request: SaveRequest,
    writer: ShardWriter,
    progress_callback: ProgressCallback | None,
) -> tuple[NewCheckpoint, CheckpointIndex]:
    """Write the weights into the staging directory, and make the index.

    Args:
        plan: Which tensor goes into which file.
        session: Of the locked directory.
        request: What to save.
        writer: Writes the weights.
        progress_callback: Gets the bytes that were written, from any thread.
    """
    jobs = staged_jobs(plan, session, request)
    digests = writer.write(jobs, request.options.checksum, progress_callback)
    index = index_of(plan, request, digests)
    index_json = index.to_json() if plan.is_sharded else None
    files = {shard.file: digest for shard, digest in zip(plan.shards, digests, strict=True)}
    digest = content_digest([index_json] if index_json is not None else [repr(files).encode()])
    new = NewCheckpoint(
        shards=staged_names(plan),
        keys=list(index.weight_map),
        index=index_json,
        config=request.config,
        drops_config=request.drops_config,
        hides_single=request.hides_single and _can_link_single(session),
        model_files=dict(request.model_files),
        digest=digest,
        companion_files=_stage_companion_files(session, request, progress_callback),
    )
    return new, index


def _can_link_single(session: SaveSession) -> bool:
    """Whether the single file that is there can have a second name; no question where there is none."""
    single = os.path.join(session.directory, session.state.names.single)
    return session.state.has_single and can_link(session.staging, single)


def staged_names(plan: ShardPlan) -> dict[str, str]:
    """Name of each file of a plan -> its name in the staging directory."""
    return {shard.file: f"{number:05d}.weights" for number, shard in enumerate(plan.shards)}


def staged_jobs(plan: ShardPlan, session: SaveSession, request: SaveRequest) -> list[WriteJob]:
    """Describe what to write for each file of a plan, into the staging directory."""
    paths = [os.path.join(session.staging, name) for name in staged_names(plan).values()]
    return shard_jobs(plan, request, paths, session.replaced)


def _stage_companion_files(
    session: SaveSession, request: SaveRequest, progress_callback: Callable[[int], object] | None
) -> dict[str, str]:
    staged = {}
    for number, (name, file) in enumerate(request.companion_files.items()):
        if name == README and name in session.state.listing and not request.replaces_readme:
            continue  # the user's own
        staged[name] = f"{number:05d}.companion"
        copy_companion(file, os.path.join(session.staging, staged[name]), session.like(name), progress_callback)
    return staged


def shard_jobs(
    plan: ShardPlan,
    request: SaveRequest,
    paths: Sequence[str],
    like: os.stat_result | None = None,
    *,
    has_index: bool = False,
) -> list[WriteJob]:
    """Describe what to write for each file of a plan, into these paths; with an index, a single one is a shard too."""
    hfshard_metadata = None
    has_index = has_index or plan.is_sharded
    if not has_index:
        hfshard_metadata = build_hfshard_metadata(
            request.model_file_digests, request.tied_names, request.undeclared_ties
        )
    extra = dict(request.file_metadata)
    if not has_index:
        for key, value in request.options.metadata.items():
            extra[key] = value if isinstance(value, str) else json.dumps(value)
    jobs = []
    for shard, path in zip(plan.shards, paths, strict=True):
        tensors = file_order({name: request.tensors[name] for name in shard.names})
        jobs.append(WriteJob(path, tensors, shard_metadata(tensors, extra), hfshard_metadata, like))
    return jobs


def index_of(plan: ShardPlan, request: SaveRequest, digests: Sequence[FileDigest]) -> CheckpointIndex:
    """Make the index of a plan whose files have these digests."""
    files = {shard.file: digest for shard, digest in zip(plan.shards, digests, strict=True)}
    return CheckpointIndex(
        weight_map=plan.weight_map,
        total_size=plan.total_size,
        total_parameters=_total_parameters(request),
        metadata=dict(request.options.metadata),
        files={**files, **request.model_file_digests},
        tied_names=dict(request.tied_names),
        undeclared_ties=request.undeclared_ties,
    )


def _total_parameters(request: SaveRequest) -> int:
    if request.total_parameters is not None:
        return request.total_parameters
    return sum(map(parameter_count, request.tensors.values()))
