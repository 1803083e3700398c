"""Save a training state that is spread over ranks: every rank writes its part, and the first one commits."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Final, Self

import torch

from hfshard._util.call_ranks import Session
from hfshard._util.text import describe_error
from hfshard.distributed.liveness import pack, unpack
from hfshard.distributed.rank_writer import KeyedTensor, RankWriter
from hfshard.distributed.save_on_ranks import exchange_listings, no_bytes_here, require_all_ranks
from hfshard.distributed.spread_tensor import SpreadTensor, with_spread_tensors
from hfshard.distributed.tensor_owners import Listing, LocalTensor, RankGroup, TensorOwners, list_tensors
from hfshard.errors import HfshardError, InvalidArgumentError, RankFailedError
from hfshard.format.file_names import MODEL_BASE
from hfshard.format.index import Checksum
from hfshard.saving.save_request import SaveRequest
from hfshard.tensors.stored_tensor import RawTensor, bytes_view, check_storable, iter_blocks
from hfshard.tensors.tied import find_shared_tensors
from hfshard.training.pipeline_stages import StageState, merge_parts, with_aliases, with_whole_gradients
from hfshard.training.run.background import HostBuffers
from hfshard.training.run.manifest import checked_step, checkpoint_path
from hfshard.training.run.run_writer import RunWriter, check_names
from hfshard.training.run_ranks import (
    OfEachRank,
    Replicas,
    all_ranks,
    differ,
    names_of_place,
    of_each_rank,
    reject_other_parts,
    reject_other_places,
    shared_kinds,
    stage_digest,
)
from hfshard.training.state.collect_state import (
    STATE_BASE,
    RankState,
    SavePayload,
    collect,
    collect_rank,
    encode_components,
    is_rank_local,
    rank_prefix,
    save_options,
)
from hfshard.training.state.flat_optimizer import with_named_states
from hfshard.training.state.training_state import TrainingState, checked_state, is_spread_state

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadSaveArguments:
    """A save request, on one rank."""

    state: TrainingState
    step: int
    extra: Any
    """Only the first rank's is stored; so are only its metrics and files."""
    metrics_of: Callable[[int], dict[str, float] | None]
    files: dict[str, bytes]
    max_shard_size: int | str
    checksum: Checksum | None
    progress: bool | None
    blocking: bool
    allow_different_replicas: bool = False


def save_spread(
    order: SpreadSaveArguments,
    writer: RunWriter,
    write: Callable[[int, TrainingState, Sequence[RankState], OfEachRank], str],
) -> str:
    """Save what all ranks have together. Every rank must call.

    A save that does not block copies each rank's part to host memory; a thread exchanges and writes the parts.

    Args:
        order: What to save.
        writer: The run's; it locks and changes the directory on the first rank only.
        write: Called on the first rank if every rank has the same complete modules: writes the checkpoint of a step
            from the state and what belongs to each rank alone, which differ in what the last argument names, and
            returns its path.

    Returns:
        The checkpoint's directory.

    Raises:
        RankFailedError: Another rank failed, died, or did not call; older checkpoints still exist.
        Everything that `CheckpointManager.save` raises.
    """
    writer.join()
    with ExitStack() as stack:
        session = stack.enter_context(all_ranks())
        state = checked_state(order.state)
        stages, own = _find_stages(order, state, writer, session)
        if stages is None:
            return _save_replicated(order.step, state, writer, write, session, own)
        writer.wait()
        is_pipeline = len(set(stages)) > 1
        if is_pipeline and state.is_flattened:
            raise InvalidArgumentError(
                "The ranks have different modules, and FullyShardedDataParallel (FSDP1) has flattened some. Shard the "
                "stages of a pipeline with torch.distributed.fsdp.fully_shard."
            )
        if state.is_flattened:
            state = with_named_states(state, lambda what, value: session.meet(f"states of {what}", value).values())
        merged: dict[str, dict[str, Any]] | None = None
        of_a_rank = own.objects
        stage = ""
        if is_pipeline:
            stage = stages[session.position]
            is_first = stages.index(stage) == session.position
            ties = session.all_of(state.tied_parameters() if is_first else [])
            state = with_aliases(state, chain.from_iterable(ties))
            if len(set(stages)) == len(stages):  # each stage is on one rank
                state = with_whole_gradients(state)
            merged, of_a_rank = _merge_stages(state, session, own.objects, is_first=is_first)
        own_state = collect_rank(state, session.position, of_a_rank, stage, own.buffers)
        step = checked_step(order.step)
        ranks = _share_states(session, own_state, step, blocking=order.blocking)
        components = encode_components(state, of_a_rank)
        payload = collect(
            components if merged is None else replace(components, encoded=merged),
            state.components.get(MODEL_BASE),
            ranks,
            order.extra if session.is_leader else None,
            save_options(order.max_shard_size, order.checksum, order.progress),
        )
        payload = with_full_model_order(payload) if is_pipeline else payload
        parts = held_parts(payload, session.position, is_stage=is_pipeline)
        holders = _share_holders(session, parts)
        if session.is_leader:
            payload = merged_payload(payload, holders)
        work = _planned(order, step, writer, session, payload, parts, holders)
        if order.blocking:
            work()
        else:
            rest = stack.pop_all()

            def finish() -> None:
                with rest:
                    work()

            writer.start(step, finish)
        return checkpoint_path(writer.root, step)


def _find_stages(
    order: SpreadSaveArguments, state: TrainingState, writer: RunWriter, session: Session
) -> tuple[list[str] | None, OfEachRank]:
    """Find the digest of each rank's modules, None if every rank has all of them; and what differs among ranks."""
    is_spread = is_spread_state(state)
    replicas = Replicas.of(state, session.world_size)
    own = [is_spread, stage_digest(state), replicas.summary()]
    message = json.dumps([own, shared_kinds(state), names_of_place(writer.root)]).encode()
    meeting = session.meet("save", message)
    states, kinds, roots = zip(*map(json.loads, meeting.values()), strict=True)
    reject_other_parts(dict(zip(meeting, kinds, strict=True)))
    reject_other_places(dict(zip(meeting, roots, strict=True)), "saves into")
    stages = [stage for _, stage, _ in states]
    summaries = {rank: summary for rank, (_, _, summary) in zip(meeting, states, strict=True)}
    details: dict[int, Any] = {}
    if differ(summaries.values()):
        details = dict(zip(meeting, session.all_of(replicas.details()), strict=True))
    each = of_each_rank(summaries, details, allow_different_replicas=order.allow_different_replicas)
    is_merged = len(set(stages)) > 1 or any(is_spread for is_spread, _, _ in states)
    return (stages if is_merged else None), each


def _merge_stages(
    state: TrainingState, session: Session, different: Collection[str], *, is_first: bool
) -> tuple[dict[str, dict[str, Any]] | None, Sequence[str]]:
    """Merge the parts of all stages into those of one model, on the first rank.

    Returns:
        On the first rank the encoded parts of all, on others None; and the parts of which each rank saves its own.
    """
    components = encode_components(state)
    reports = session.gather("parts", StageState.of(state, components, is_first=is_first).to_json())
    if not session.is_leader:
        return None, json.loads(session.wait_for("parts of a rank", session.leader))
    parts = {rank: StageState.from_json(raw) for rank, raw in reports.items()}
    merged = merge_parts(components, parts, different)
    session.tell("parts of a rank", json.dumps(merged.of_a_rank).encode())
    return merged.encoded, merged.of_a_rank


def _planned(
    order: SpreadSaveArguments,
    step: int,
    writer: RunWriter,
    session: Session,
    payload: SavePayload,
    parts: OwnedTensors,
    holders: TensorOwners,
) -> Callable[[], None]:
    """Check everything that can be checked before the first byte is written, and return the remaining work."""
    is_leader = session.is_leader
    if is_leader:
        metrics = order.metrics_of(step)
        check_names(order.files, payload)
        writer.begin()
    session.meet("ready to write")
    held = parts.held if order.blocking else _host_copies(parts.held, writer.host_copies)
    ranks = RankWriter(session, holders, held, name_of_key)

    def work() -> None:
        if is_leader:
            saved = writer.write(step, payload, metrics, order.files, blocking=order.blocking, writer=ranks)
            ranks.end()
            session.finish()
            writer.push_saved(saved, blocking=order.blocking)  # the other ranks continue in parallel
        else:
            ranks.follow()
            session.finish()

    return work


def _share_states(session: Session, own: RankState, step: int, *, blocking: bool) -> list[RankState]:
    """Send this rank's own state to the first rank, without its tensors, which are exchanged with all others.

    Returns:
        On the first rank the states of all, on others this rank's; only this rank's has tensors.
    """
    states = []
    for rank, raw in session.gather("state", json.dumps([step, blocking, own.nested]).encode()).items():
        other_step, is_blocking, nested = json.loads(raw)
        if (other_step, is_blocking) != (step, blocking):
            raise InvalidArgumentError(
                f"All ranks must save the same step in the same way, got {step} with blocking={blocking} on rank "
                f"{session.rank}, and {other_step} with blocking={is_blocking} on rank {rank}."
            )
        states.append(own if rank == session.rank else RankState(nested, {}))
    return states or [own]


def _share_holders(session: Session, parts: OwnedTensors) -> TensorOwners:
    """Find what each rank has. One rank lists the names of what each has alone, without the rank's number."""
    listing, meshes = list_tensors(parts.common, parts.common.tensors)
    groups, listings = exchange_listings(session, listing, meshes)
    require_all_ranks(session)
    own, _ = list_tensors(parts.own, parts.own.tensors)
    own_groups, own_listings = exchange_listings(session, own, (), " of a rank")
    for group in own_groups:
        for rank in group.ranks:
            digest = f"{group.digest} of rank {rank}"
            listings[digest] = with_rank(own_listings[group.digest], session.ranks.index(rank))
            groups.append(RankGroup((rank,), digest, ()))
    return TensorOwners.unite(groups, listings, parts.common.name_order)


def _host_copies(held: Mapping[str, LocalTensor], copies: HostBuffers) -> dict[str, LocalTensor]:
    """Copy this rank's parts to host memory, where the training does not change them."""
    tensors = {key: one.part() if isinstance(one, SpreadTensor) else one for key, one in held.items()}
    copied = copies.copies_of(tensors)  # type: ignore[arg-type]  # a training state has no raw tensors
    return {
        key: one.with_part(copied[key]) if isinstance(one, SpreadTensor) else copied[key] for key, one in held.items()
    }


# Contributions of each rank to a checkpoint, gathered so that the first rank can write it.


_BLOCK_BYTES: Final = 16 << 20
"""A tensor is copied into a message in blocks of this size."""


@dataclass(frozen=True, slots=True)
class RankContribution:
    """Message of one rank to the first one when a checkpoint is saved."""

    step: int = -1
    state: RankState | None = None
    """None if the rank could not collect it."""
    problem: str = ""
    """The reason why it could not, described."""

    def to_bytes(self) -> bytes:
        """Encode the message: JSON, and the bytes of the tensors; names of one tensor stay names of one."""
        tensors = {} if self.state is None else self.state.tensors
        for name, tensor in tensors.items():
            check_storable(name, tensor)
        tied_names = find_shared_tensors(tensors)
        kept = {name: tensor for name, tensor in tensors.items() if name not in tied_names}
        head = [
            self.step,
            self.state and self.state.nested,
            self.problem,
            [[name, str(tensor.dtype).removeprefix("torch."), [*tensor.shape]] for name, tensor in kept.items()],
            [[name, tied_names.get(name, name)] for name in tensors],
        ]
        values = [json.dumps(head).encode(), *map(_bytes_of, kept.values())]
        return pack(dict(enumerate(values)))

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        """Decode what `to_bytes` has encoded; the tensors are on the CPU."""
        first, *values = unpack(raw).values()
        step, nested, problem, described, names = json.loads(first)
        kept: dict[str, torch.Tensor] = {}
        for (name, dtype, shape), value in zip(described, values, strict=True):
            kept[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            if value:
                bytes_view(kept[name])[:] = value
        state = None if nested is None else RankState(nested, {name: kept[stored] for name, stored in names})
        return cls(step, state, problem)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return b"".join(map(bytes, iter_blocks(tensor, _BLOCK_BYTES)))


def _save_replicated(
    step: int,
    state: TrainingState,
    writer: RunWriter,
    write: Callable[[int, TrainingState, Sequence[RankState], OfEachRank], str],
    session: Session,
    own: OfEachRank,
) -> str:
    """Collect every rank's own state, and have the first rank write the checkpoint. Every rank must call.

    Returns:
        What `write` returned, on every rank.

    Raises:
        RankFailedError: A rank failed; each rank raises its own error if it has one.
    """

    def work() -> str:
        writer.wait()
        agreed, states = _agreed_step({session.rank: contribution, **others})
        return write(agreed, state, states, own)

    error: Exception | None = None
    try:
        of_rank = collect_rank(state, session.position, own.objects, buffers=own.buffers)
        contribution = RankContribution(checked_step(step), of_rank)
        message = b"" if session.is_leader else contribution.to_bytes()
    except Exception as caught:  # noqa: BLE001 - raised below, when the first rank knows
        error = caught
        contribution = RankContribution(problem=describe_error(error))
        message = contribution.to_bytes()
    try:
        messages = session.gather("value", message)
        if not session.is_leader:
            return session.finish().decode()
        others = {rank: RankContribution.from_bytes(messages.pop(rank)) for rank in session.ranks[1:]}  # once in memory
        return _finish_with(session, work)
    except HfshardError:
        if error is not None:
            raise error from None
        raise


def _finish_with(session: Session, work: Callable[[], str]) -> str:
    """Run the final step, on the first rank. Once it is done, a rank that dies no longer matters."""
    try:
        return session.finish(work().encode()).decode()
    except Exception:
        raise
    except BaseException:
        session.begin_step()  # Ctrl-C may come after the work
        raise


def _agreed_step(contributions: Mapping[int, RankContribution]) -> tuple[int, list[RankState]]:
    """Return the step that all ranks save, and what each of them adds."""
    states: list[RankState] = []
    for rank, contribution in contributions.items():
        if contribution.state is None:
            raise RankFailedError(f"Rank {rank} cannot save: {contribution.problem}", rank=rank)
        states.append(contribution.state)
    steps = [contribution.step for contribution in contributions.values()]
    if any(other != steps[0] for other in steps):
        raise InvalidArgumentError(f"All ranks must save the same step, got {steps}.")
    return steps[0], states


# One save of all ranks' tensors: this rank's list of them, and what the first rank writes for all.


_NUMBERLESS: Final = "rank*/"
"""Represents the beginning of the names of tensors that belong to one rank alone."""


@dataclass(frozen=True, slots=True)
class OwnedTensors:
    """The tensors of this rank, by keys: the set of tensors, and the name in it."""

    common: SaveRequest
    """The tensors that all ranks have, or have parts of; and the model's information about its names."""
    own: SaveRequest
    """The tensors that this rank alone contributes; names lack its number, which `with_rank` adds."""
    held: dict[str, LocalTensor]
    """Both, by their own names."""


def key_of(base: str, name: str) -> str:
    """Return the key of a tensor: names of different sets may be the same."""
    return f"{base}/{name}"


def name_of_key(key: str) -> str:
    """Return the name under which the tensor of a key is stored."""
    return key.partition("/")[2]


def held_parts(payload: SavePayload, rank: int, *, is_stage: bool = False) -> OwnedTensors:
    """List what this rank has for a save by all ranks.

    Of what is not spread, the model's and the optimizer's tensors are the same everywhere; everything else is the first
    rank's, or this rank's own (random numbers, the position of its loader).

    Args:
        payload: What the rank would save if it were alone.
        rank: This rank.
        is_stage: Whether ranks have different modules: then tensors that are not a rank's own may be on any of them.

    Raises:
        UnstorableTensorError: A tensor cannot be stored.
    """
    prefix = rank_prefix(rank)
    common: dict[str, Any] = {}  # unlike other requests, this may contain parts of tensors
    own: dict[str, Any] = {}
    held: dict[str, LocalTensor] = {}
    for base, request in payload.requests.items():
        for name, tensor in with_spread_tensors(request.tensors).items():
            is_shared = base != STATE_BASE or isinstance(tensor, SpreadTensor)
            if is_shared or (is_stage and not is_rank_local(name)):
                common[key_of(base, name)] = tensor
            elif name.startswith(prefix):
                own[key_of(base, _NUMBERLESS + name.removeprefix(prefix))] = tensor
            elif rank == 0:
                own[key_of(base, name)] = tensor
            else:
                continue
            held[key_of(base, name)] = tensor
    options = next(iter(payload.requests.values())).options
    model = payload.requests.get(MODEL_BASE, SaveRequest(options=options))
    in_model = partial(key_of, MODEL_BASE)
    of_all = SaveRequest(
        tensors=common,
        options=options,
        tied_names={in_model(tied): in_model(name) for tied, name in model.tied_names.items()},
        undeclared_ties=tuple(map(in_model, model.undeclared_ties)),
        separate_names=frozenset(map(in_model, model.separate_names)),
        name_order=tuple(map(in_model, model.name_order)),
    )
    return OwnedTensors(of_all, SaveRequest(tensors=own, options=options), held)


def with_full_model_order(payload: SavePayload) -> SavePayload:
    """Add all names and the parameter count of the full model to a stage's payload, if they can be known."""
    request = payload.requests.get(MODEL_BASE)
    if request is None or request.name_order:
        return payload
    whole = None if request.describe_full_model is None else request.describe_full_model()
    total = None if whole is None else whole.total_parameters
    request = replace(request, name_order=() if whole is None else whole.names, total_parameters=total)
    return replace(payload, requests={**payload.requests, MODEL_BASE: request})


def with_rank(listing: Listing, rank: int) -> Listing:
    """Return the listing of what a rank has alone, with its number in the names."""
    numberless = key_of(STATE_BASE, _NUMBERLESS)
    numbered = key_of(STATE_BASE, rank_prefix(rank))
    entries = {
        numbered + key.removeprefix(numberless) if key.startswith(numberless) else key: entry
        for key, entry in listing.entries.items()
    }
    return replace(listing, entries=entries)


def merged_payload(payload: SavePayload, holders: TensorOwners) -> SavePayload:
    """Return what the first rank saves: its own payload, with the tensors of all ranks."""
    some_options = next(iter(payload.requests.values())).options
    by_base: dict[str, dict[str, RawTensor]] = {}
    for key, layout in holders.layouts.items():
        base = key.partition("/")[0]
        by_base.setdefault(base, {})[name_of_key(key)] = KeyedTensor(layout, no_bytes_here(key, layout), key=key)
    requests = {}
    for base in dict.fromkeys([*payload.requests, *by_base]):
        request = payload.requests.get(base) or SaveRequest(options=replace(some_options, base=base, progress=None))
        if base == MODEL_BASE:
            is_known = not request.name_order or by_base.get(base, {}).keys() <= set(request.name_order)
            request = replace(
                request,
                tied_names={name_of_key(tied): name_of_key(kept) for tied, kept in holders.tied_names.items()},
                undeclared_ties=tuple(map(name_of_key, holders.undeclared_ties)),
                separate_names=frozenset(map(name_of_key, holders.separate_names)),
                total_parameters=request.total_parameters if is_known else None,
            )
        requests[base] = replace(request, tensors=by_base.get(base, {}))
    return replace(payload, requests=requests)
