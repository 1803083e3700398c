"""Saves a training state that is spread over ranks: every rank its part, the first one commits."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from hfshard._util.addresses import is_address
from hfshard.distributed.exchange.holders import Holders
from hfshard.distributed.exchange.listing import HeldTensor, RankGroup, list_tensors
from hfshard.distributed.exchange.rank_writer import RankWriter
from hfshard.distributed.saving import cpu_group, refuse_absent, share_listings
from hfshard.distributed.spread_tensor import SpreadTensor
from hfshard.distributed.status import SaveStatus
from hfshard.errors import InvalidArgumentError
from hfshard.storage.format.integrity import Checksum
from hfshard.storage.format.names import MODEL_BASE
from hfshard.training.collecting import (
    Components,
    RankState,
    SavePayload,
    collect,
    collect_rank,
    encode_components,
    save_options,
)
from hfshard.training.ranks import Ranks, all_ranks
from hfshard.training.run.host_copy import HostCopies
from hfshard.training.run.run_checkpoint import checkpoint_path
from hfshard.training.run.writing import check_names
from hfshard.training.run_writer import RunWriter
from hfshard.training.spread.merging import StageParts, merge_parts
from hfshard.training.spread.stages import with_aliases, with_whole_gradients
from hfshard.training.spread.states import (
    is_spread_state,
    refuse_other_parts,
    shared_kinds,
    short_digest,
    stage_digest,
    values_digest,
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
    metrics_of: Callable[[int], dict[str, float]]
    files: Mapping[str, bytes]
    max_shard_size: int | str
    checksum: Checksum | None
    progress: bool | None
    blocking: bool


def save_spread(order: SpreadSave, writer: RunWriter, save_replicated: Callable[[Ranks], str]) -> str:
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
        stages = _find_stages(order, writer, status)
        if stages is None:
            return save_replicated(Ranks.of(status))
        writer.wait()
        is_pipeline = len(set(stages)) > 1
        if is_pipeline:
            order = replace(order, state=_as_stage(order.state, status, stages))
        components, of_a_rank = _share_components(order, status, stages) if is_pipeline else (None, ())
        ranks = _share_states(order, status, of_a_rank, stages[status.rank] if is_pipeline else "")
        payload = collect(
            components or encode_components(order.state),
            order.state.components.get(MODEL_BASE),
            ranks,
            order.extra if status.rank == status.leader else None,
            save_options(order.max_shard_size, order.checksum, order.progress),
        )
        payload = with_whole_order(payload) if is_pipeline else payload
        parts = held_parts(payload, status.rank, is_stage=is_pipeline)
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


def _find_stages(order: SpreadSave, writer: RunWriter, status: SaveStatus) -> list[str] | None:
    """What tells the modules of each rank; None where no rank has a part only.

    Raises:
        InvalidArgumentError: A module is wrapped by FSDP1; or the ranks have other parts, or save spread modules into
            different directories.
    """
    is_spread = is_spread_state(order.state)
    root = writer.root if is_address(writer.root) else os.path.realpath(writer.root)
    own = [is_spread, stage_digest(order.state), short_digest(root), "" if is_spread else values_digest(order.state)]
    meeting = status.meet("save", json.dumps([own, shared_kinds(order.state)]).encode())
    told, kinds = zip(*map(json.loads, meeting.values()), strict=True)
    refuse_other_parts(kinds)
    _, _, first_root, first_values = told[0]
    stages = [stage for _, stage, _, _ in told]
    if len(set(stages)) == 1 and not any(is_spread for is_spread, _, _, _ in told):
        other = next((rank for rank, (_, _, _, values) in enumerate(told) if values != first_values), None)
        if other is not None and status.rank == status.leader:
            logger.warning(
                "The parameters of rank %d have other values than those of rank 0, and the same names: they are taken "
                "for copies, of which rank 0's are saved. Give the stages of a pipeline the names of the whole model.",
                other,
            )
        return None
    elsewhere = next((rank for rank, (_, _, other_root, _) in enumerate(told) if other_root != first_root), None)
    if elsewhere is not None:
        raise InvalidArgumentError(
            f"The ranks have parts of one model, and rank {elsewhere} saves into another directory than rank 0: this "
            f"is rank {status.rank}, which saves into '{root}'. Give the managers of all ranks the same one, on a file "
            "system that all of them see."
        )
    return stages


def _as_stage(state: TrainingState, status: SaveStatus, stages: Sequence[str]) -> TrainingState:
    """The same parts, with the names that parameters have in the whole model, and its gradients where they are that."""
    is_speaker = stages.index(stages[status.rank]) == status.rank
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
    is_first = stages.index(stages[status.rank]) == status.rank
    own = StageParts.of(order.state, components, is_first=is_first)
    if status.rank != status.leader:
        status.tell("parts", own.to_json())
        of_a_rank = json.loads(status.wait_for("parts of a rank", status.leader))
        return encode_components(order.state, of_a_rank), of_a_rank
    told = [own, *(StageParts.from_json(status.wait_for("parts", rank)) for rank in status.ranks[1:])]
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
    group = cpu_group(for_thread=not order.blocking)
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


def _share_states(order: SpreadSave, status: SaveStatus, of_a_rank: Sequence[str], stage: str) -> list[RankState]:
    """Tell the first rank this rank's own state, but for its tensors, which are exchanged with all others.

    Args:
        order: What to save.
        status: Of the save.
        of_a_rank: Parts of which each rank saves its own.
        stage: As in `collect_rank`.

    Returns:
        On the first rank the states of all, elsewhere this one's; only this one's has tensors.

    Raises:
        InvalidArgumentError: The ranks save different steps, or not in the same way.
    """
    own = collect_rank(order.state, status.rank, of_a_rank, stage)
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
            listings[digest] = with_rank(own_listings[group.digest], rank)
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
