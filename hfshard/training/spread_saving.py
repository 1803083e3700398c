"""Saves a training state that is spread over ranks: every rank its part, the first one commits."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from hfshard.distributed.exchange.holders import Holders
from hfshard.distributed.exchange.listing import HeldTensor, RankGroup, list_tensors
from hfshard.distributed.exchange.rank_writer import RankWriter
from hfshard.distributed.participants import gather_participants
from hfshard.distributed.saving import cpu_group, refuse_absent, share_listings
from hfshard.distributed.spread_tensor import SpreadTensor
from hfshard.distributed.status import SaveStatus
from hfshard.errors import InvalidArgumentError
from hfshard.storage.format.integrity import Checksum
from hfshard.training.collecting import RankState, SavePayload, collect, collect_rank
from hfshard.training.run.directory import checkpoint_path
from hfshard.training.run.host_copy import HostCopies
from hfshard.training.run.writing import check_names
from hfshard.training.run_writer import RunWriter
from hfshard.training.spread.states import check_same_stage, stage_digest
from hfshard.training.spread.uniting import HeldParts, KeyedWriter, held_parts, name_of_key, united_payload, with_rank
from hfshard.training.state import TrainingState
from hfshard.training.step import checked_step


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


def save_spread(order: SpreadSave, writer: RunWriter) -> str:
    """Save what all ranks hold together. Every rank must call.

    A save that does not block copies each rank's part in host memory; the parts are exchanged and written by a thread,
    over a process group of its own.

    Args:
        order: What to save.
        writer: Of the run; it locks and changes the directory on the first rank only.

    Returns:
        The checkpoint's directory.

    Raises:
        RankFailedError: Another rank failed, died, or did not come; older checkpoints are still there.
        Everything that `CheckpointManager.save` raises.
    """
    writer.join()
    with ExitStack() as stack:
        participation = stack.enter_context(gather_participants(os.path.realpath(writer.root), needs_all=True))
        status = participation.status
        assert status is not None
        status.meet("save")  # where another rank restores, this raises
        writer.wait()
        ranks = _share_states(order, status)
        is_leader = status.rank == status.leader
        payload = collect(
            order.state,
            ranks,
            order.extra if is_leader else None,
            order.max_shard_size,
            order.checksum,
            order.progress,
        )
        parts = held_parts(payload, status.rank)
        holders = _share_holders(status, parts)
        work = _planned(order, writer, status, payload, parts, holders)
        path = checkpoint_path(writer.root, checked_step(order.step))
        if order.blocking:
            work()
        else:
            _start(order, writer, work, stack.pop_all())
        return path


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
        payload = united_payload(payload, holders)
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


def _share_states(order: SpreadSave, status: SaveStatus) -> list[RankState]:
    """Tell the first rank this rank's own state, but for its tensors, which are exchanged with all others.

    Returns:
        On the first rank the states of all, elsewhere this one's; only this one's has tensors.

    Raises:
        InvalidArgumentError: The ranks save different steps, or not in the same way, or stages of a pipeline.
    """
    own = collect_rank(order.state, status.rank)
    asked = [checked_step(order.step), order.blocking]
    stages = [stage_digest(order.state)]
    status.tell("state", json.dumps([*asked, *stages, own.nested]).encode())
    if status.rank != status.leader:
        return [own]
    states = [own]
    for rank in status.ranks[1:]:
        step, blocking, stage, nested = json.loads(status.wait_for("state", rank))
        if [step, blocking] != asked:
            raise InvalidArgumentError(
                f"All ranks must save the same step in the same way, got {asked[0]} with blocking={asked[1]} on rank "
                f"{status.rank}, and {step} with blocking={blocking} on rank {rank}."
            )
        states.append(RankState(nested, {}))
        stages.append(stage)
    check_same_stage(stages)
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
    return Holders.unite(groups, listings)


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
