"""Saves a training state that is spread over ranks: every rank its part, the first one commits."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from hfshard.distributed.rank_writer import RankWriter
from hfshard.distributed.rendezvous import SaveStatus
from hfshard.distributed.save_on_ranks import cpu_group, refuse_absent, share_listings
from hfshard.distributed.spread_tensor import SpreadTensor
from hfshard.distributed.tensor_owners import HeldTensor, Holders, RankGroup, list_tensors
from hfshard.errors import InvalidArgumentError
from hfshard.format.digests import Checksum
from hfshard.format.file_names import MODEL_BASE
from hfshard.training.collecting import (
    Components,
    RankState,
    SavePayload,
    collect,
    collect_rank,
    encode_components,
    save_options,
)
from hfshard.training.ranks import Ranks, all_ranks, names_of_place, refuse_other_places
from hfshard.training.run.host_copy import HostCopies
from hfshard.training.run.run_checkpoint import checkpoint_path
from hfshard.training.run.writing import check_names
from hfshard.training.run_writer import RunWriter
from hfshard.training.spread.merging import StageParts, merge_parts
from hfshard.training.spread.replicas import OfEachRank, Replicas, differ, of_each_rank
from hfshard.training.spread.stages import with_aliases, with_whole_gradients
from hfshard.training.spread.states import (
    is_spread_state,
    refuse_other_parts,
    shared_kinds,
    stage_digest,
)
from hfshard.training.spread.uniting import (
    HeldParts,
    KeyedWriter,
    held_parts,
    name_of_key,
    united_payload,
    with_rank,
    with_whole_order,
)
from hfshard.training.state import TrainingState
from hfshard.training.step import checked_step

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadSave:
    """What is asked of a save, on one rank."""

    state: TrainingState
    step: int
    extra: Any
    """The first rank's is stored, and so are its metrics and files."""
    metrics_of: Callable[[int], dict[str, float] | None]
    files: Mapping[str, bytes]
    max_shard_size: int | str
    checksum: Checksum | None
    progress: bool | None
    blocking: bool
    allow_different_replicas: bool = False


def save_spread(order: SpreadSave, writer: RunWriter, save_replicated: Callable[[Ranks, OfEachRank], str]) -> str:
    """Save what all ranks hold together. Every rank must call.

    A save that does not block copies each rank's part in host memory; the parts are exchanged and written by a thread,
    over a process group of its own.

    Args:
        order: What to save.
        writer: Of the run; it locks and changes the directory on the first rank only.
        save_replicated: Called where every rank has all of the same modules.

    Returns:
        The checkpoint's directory.

    Raises:
        RankFailedError: Another rank failed, died, or did not come; older checkpoints are still there.
        Everything that `CheckpointManager.save` raises.
    """
    writer.join()
    with ExitStack() as stack:
        status = stack.enter_context(all_ranks())
        stages, own = _find_stages(order, writer, status)
        if stages is None:
            return save_replicated(Ranks.of(status), own)
        writer.wait()
        is_pipeline = len(set(stages)) > 1
        if is_pipeline:
            order = replace(order, state=_as_stage(order.state, status, stages))
        components, of_a_rank = _share_components(order, status, stages) if is_pipeline else (None, own.objects)
        ranks = _share_states(order, status, of_a_rank, stages[status.place] if is_pipeline else "", own.buffers)
        payload = collect(
            components or encode_components(order.state, of_a_rank),
            order.state.components.get(MODEL_BASE),
            ranks,
            order.extra if status.rank == status.leader else None,
            save_options(order.max_shard_size, order.checksum, order.progress),
        )
        payload = with_whole_order(payload) if is_pipeline else payload
        parts = held_parts(payload, status.place, is_stage=is_pipeline)
        holders = _share_holders(status, parts)
        if status.rank == status.leader:
            payload = united_payload(payload, holders)
        work = _planned(order, writer, status, payload, parts, holders)
        path = checkpoint_path(writer.root, checked_step(order.step))
        if order.blocking:
            work()
        else:
            _start(order, writer, work, stack.pop_all())
        return path


def _find_stages(order: SpreadSave, writer: RunWriter, status: SaveStatus) -> tuple[list[str] | None, OfEachRank]:
    """What tells the modules of each rank, None where no rank has a part only; and what is not the same on all.

    Raises:
        InvalidArgumentError: A module is wrapped by FSDP1; or the ranks have other parts, or save into different
            directories; or copies of a parameter differ.
    """
    is_spread = is_spread_state(order.state)
    replicas = Replicas.of(order.state)
    own = [is_spread, stage_digest(order.state), replicas.summary()]
    said = json.dumps([own, shared_kinds(order.state), names_of_place(writer.root)]).encode()
    meeting = status.meet("save", said)
    told, kinds, roots = zip(*map(json.loads, meeting.values()), strict=True)
    refuse_other_parts(dict(zip(meeting, kinds, strict=True)))
    refuse_other_places(dict(zip(meeting, roots, strict=True)), "saves into")
    stages = [stage for _, stage, _ in told]
    if len(set(stages)) > 1:
        return stages, OfEachRank()
    summaries = {rank: summary for rank, (_, _, summary) in zip(meeting, told, strict=True)}
    details: dict[int, Any] = {}
    if differ(summaries.values()):
        said = json.dumps(replicas.details()).encode()
        details = {rank: json.loads(raw) for rank, raw in status.meet("copies that differ", said).items()}
    each = of_each_rank(summaries, details, allow_different_replicas=order.allow_different_replicas)
    return (stages if any(is_spread for is_spread, _, _ in told) else None), each


def _as_stage(state: TrainingState, status: SaveStatus, stages: Sequence[str]) -> TrainingState:
    """The same parts, with the names that parameters have in the whole model, and its gradients where they are that."""
    is_speaker = stages.index(stages[status.place]) == status.place
    told = status.meet("ties", json.dumps(state.tied_parameters() if is_speaker else []).encode())
    state = with_aliases(state, chain.from_iterable(map(json.loads, told.values())))
    return with_whole_gradients(state) if len(set(stages)) == len(stages) else state


def _share_components(order: SpreadSave, status: SaveStatus, stages: Sequence[str]) -> tuple[Components, Sequence[str]]:
    """Make the parts of all stages those of one model, on the first rank.

    Returns:
        This rank's components, on the first rank those of all; and the parts of which each rank saves its own.

    Raises:
        InvalidArgumentError: They can't be those of one model.
    """
    components = encode_components(order.state)
    is_first = stages.index(stages[status.place]) == status.place
    own = StageParts.of(order.state, components, is_first=is_first)
    if status.rank != status.leader:
        status.tell("parts", own.to_json())
        of_a_rank = json.loads(status.wait_for("parts of a rank", status.leader))
        return encode_components(order.state, of_a_rank), of_a_rank
    told = {status.rank: own}
    for rank in status.ranks[1:]:
        told[rank] = StageParts.from_json(status.wait_for("parts", rank))
    merged = merge_parts(components, told)
    status.tell("parts of a rank", json.dumps(merged.of_a_rank).encode())
    return replace(encode_components(order.state, merged.of_a_rank), encoded=merged.encoded), merged.of_a_rank


def _planned(
    order: SpreadSave,
    writer: RunWriter,
    status: SaveStatus,
    payload: SavePayload,
    parts: HeldParts,
    holders: Holders,
) -> Callable[[], None]:
    """Check all that can be checked before the first byte is written, and return what is left to do."""
    is_leader = status.rank == status.leader
    if is_leader:
        metrics = order.metrics_of(order.step)
        check_names(order.files, payload)
        writer.begin()
    status.meet("ready to write")
    group = cpu_group(status.tag, for_thread=not order.blocking)
    held = parts.held if order.blocking else _host_copies(parts.held, writer.host_copies)
    ranks = RankWriter(status, holders, held, group, name_of_key)

    def work() -> None:
        if is_leader:
            saved = writer.write(
                order.step, payload, metrics, dict(order.files), blocking=order.blocking, writer=KeyedWriter(ranks)
            )
            ranks.end()
            status.finish()
            writer.push_saved(saved, blocking=order.blocking)  # the other ranks go on meanwhile
        else:
            ranks.follow()
            status.finish()

    return work


def _start(order: SpreadSave, writer: RunWriter, work: Callable[[], None], stack: ExitStack) -> None:
    """Do the rest in a thread, which leaves the operation at the end."""

    def run() -> None:
        with stack:
            work()

    writer.start(order.step, run)


def _share_states(
    order: SpreadSave, status: SaveStatus, of_a_rank: Sequence[str], stage: str, buffers: Sequence[str]
) -> list[RankState]:
    """Tell the first rank this rank's own state, but for its tensors, which are exchanged with all others.

    Args:
        order: What to save.
        status: Of the save.
        of_a_rank: Parts of which each rank saves its own.
        stage, buffers: As in `collect_rank`.

    Returns:
        On the first rank the states of all, elsewhere this one's; only this one's has tensors.

    Raises:
        InvalidArgumentError: The ranks save different steps, or not in the same way.
    """
    own = collect_rank(order.state, status.place, of_a_rank, stage, buffers)
    asked = [checked_step(order.step), order.blocking]
    status.tell("state", json.dumps([*asked, own.nested]).encode())
    if status.rank != status.leader:
        return [own]
    states = [own]
    for rank in status.ranks[1:]:
        step, blocking, nested = json.loads(status.wait_for("state", rank))
        if [step, blocking] != asked:
            raise InvalidArgumentError(
                f"All ranks must save the same step in the same way, got {asked[0]} with blocking={asked[1]} on rank "
                f"{status.rank}, and {step} with blocking={blocking} on rank {rank}."
            )
        states.append(RankState(nested, {}))
    return states


def _share_holders(status: SaveStatus, parts: HeldParts) -> Holders:
    """Find what each rank holds. Of what each has alone, one tells the names, in which the rank's number is left out.

    Raises:
        InvalidArgumentError: The ranks disagree about a tensor, or have not all of it.
    """
    listing, meshes = list_tensors(parts.common, _tensors(parts.common.tensors))
    groups, listings = share_listings(status, listing, meshes)
    refuse_absent(status)
    own, _ = list_tensors(parts.own, _tensors(parts.own.tensors))
    own_groups, own_listings = share_listings(status, own, (), " of a rank")
    for group in own_groups:
        for rank in group.ranks:
            digest = f"{group.digest} of rank {rank}"
            listings[digest] = with_rank(own_listings[group.digest], status.ranks.index(rank))
            groups.append(RankGroup((rank,), digest, ()))
    return Holders.unite(groups, listings, parts.common.name_order)


def _tensors(tensors: Mapping[str, Any]) -> Mapping[str, HeldTensor]:
    return tensors


def _host_copies(held: Mapping[str, HeldTensor], copies: HostCopies) -> dict[str, HeldTensor]:
    """This rank's parts in host memory, where the training does not change them."""
    tensors = {key: one.local if isinstance(one, SpreadTensor) else one for key, one in held.items()}
    copied = copies.copies_of(tensors)  # type: ignore[arg-type]  # a training state has no raw tensors
    return {
        key: replace(one, local=copied[key]) if isinstance(one, SpreadTensor) else copied[key]
        for key, one in held.items()
    }
