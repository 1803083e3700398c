"""The ranks of a run: they meet, use the same place, and have states with the same parts, whose copies are compared."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final

import torch

from hfshard._util.call_ranks import Session
from hfshard._util.text import shorten_list
from hfshard.distributed.rendezvous import session
from hfshard.errors import InvalidArgumentError
from hfshard.format.index import sha256_of
from hfshard.places.place import place_to_save
from hfshard.tensors.state_dict import (
    collect_state_dict,
    is_dtensor,
    local_tensor,
    parameter_names,
    tied_parameter_names,
)
from hfshard.tensors.stored_tensor import check_storable, is_torch_tensor_type
from hfshard.training.state.collect_state import encode_alone
from hfshard.training.state.rng import Gradients
from hfshard.training.state.training_state import TrainingState


def names_of_place(path: str) -> list[str]:
    """Return the names of a place on this rank: ranks that have one of these names in common mean the same place."""
    return sorted({path, place_to_save(path, "path").key})


def reject_other_places(names: Mapping[int, Sequence[str]], does: str) -> None:
    """Reject ranks that do not mean the same place, although they make one call together.

    Args:
        names: Rank -> what `names_of_place` returned on it.
        does: A description of what they do with it.

    Raises:
        InvalidArgumentError: The places differ; the message names two ranks, and their places.
    """
    first, *others = names
    for rank in others:
        if not {*names[rank]} & {*names[first]}:
            raise InvalidArgumentError(
                f"Rank {rank} {does} '{names[rank][0]}', but rank {first} {does} '{names[first][0]}': all ranks of a "
                "process group must use the same place in one call. Pass the same one, on a file system that all of "
                "them see; or, for a separate run on each rank, a process group of that rank alone: "
                "CheckpointManager(..., process_group=...)."
            )


def agree_on_checkpoint(ranks: Session, path: str, step: str) -> None:
    """Reject ranks that do not restore the same checkpoint. Every rank must call.

    Args:
        ranks: Those that restore.
        path: The run, or the checkpoint, that this rank restores.
        step: What this rank restores of it, in a word.

    Raises:
        InvalidArgumentError: They differ; see `reject_other_places`.
    """
    names, steps = zip(*ranks.all_of((names_of_place(path), step)), strict=True)
    reject_other_places(dict(zip(ranks.ranks, names, strict=True)), "restores from")
    if any(one != steps[0] for one in steps):
        raise InvalidArgumentError(f"All ranks must restore the same step, got [{', '.join(steps)}].")


def all_ranks() -> AbstractContextManager[Session]:
    """Wait for all ranks of the call's process group, which run the block together: one such block at a time.

    It is the same for all runs, because ranks may name a directory differently.

    Raises:
        RankFailedError: A rank failed, died, or did not call.
    """
    return session("the run", needs_all=True)


@contextmanager
def meet_for(what: str) -> Iterator[Session]:
    """Run the block on all ranks of the call's process group, which do the same thing.

    Args:
        what: What they do; if another rank does something else, this raises.

    Raises:
        RankFailedError: A rank failed, died, or did not call.
    """
    with all_ranks() as ranks:
        ranks.meet(what)
        yield ranks


# What the states of all ranks must have in common.


_DIGEST_CHARACTERS: Final = 16


def shared_kinds(state: TrainingState) -> dict[str, str]:
    """Return the kinds, by name, of parts that all ranks must have: all but loaders, which each rank saves itself."""
    return {name: kind for name, kind in state.kinds.items() if kind != "loader"}


def reject_other_parts(kinds: Mapping[int, Mapping[str, str]]) -> None:
    """Reject a save by ranks whose states have different parts: only those of the first rank would be stored.

    Args:
        kinds: Rank -> what `shared_kinds` returned on it.

    Raises:
        InvalidArgumentError: The parts differ.
    """
    first = min(kinds)
    for rank, other in kinds.items():
        if other != kinds[first]:
            raise InvalidArgumentError(
                f"The state of rank {rank} has the parts {dict(other)}, but that of rank {first} has "
                f"{dict(kinds[first])}. Give the states of all ranks the same parts."
            )


def stage_digest(state: TrainingState) -> str:
    """Digest what distinguishes the modules of this rank from another's: the names and shapes of their tensors."""
    lines = [
        f"{component}/{name} {tuple(tensor.shape)}"
        for component, module in sorted(state.of_kind("module").items())
        for name, tensor in collect_state_dict(module).items()
        if isinstance(tensor, torch.Tensor)
    ]
    return short_digest("\n".join(lines))


def short_digest(text: str) -> str:
    """Digest a text to distinguish it from a few others; all ranks receive each other's digest."""
    return sha256_of(text.encode(errors="surrogateescape"))[:_DIGEST_CHARACTERS]


# Copies of one thing on several ranks: digests compare them before a save; each rank saves what differs.


_SAMPLES: Final = 64
"""Elements of a tensor that are compared one by one; all elements are compared by a sum of products."""
_PIECE: Final = 1 << 20
"""64-bit words of a tensor that are multiplied at once."""
_MIXING: Final = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
"""Odd constants that mix the bits of a number: those of SplitMix64."""
_SHOWN: Final = 5
_WIDE: Final = 8
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, _WIDE: torch.int64}

Names = dict[str, dict[str, str]]
"""Group of ranks that have copies of each other -> name of a tensor -> its digest. Copies of a part that is sharded as
well are those of ranks with the same coordinates, in any mesh."""


@dataclass(frozen=True, slots=True)
class Replicas:
    """Digests of what this rank has and others may have copies of."""

    parameters: Names
    buffers: dict[str, str]
    """Name, with that of its module -> digest."""
    objects: dict[str, str]
    """Name of a part that is neither module nor optimizer -> digest of its state."""
    optimizers: dict[str, str]
    """Name of an optimizer -> digest of its state: some step, and know, other parameters on each rank."""

    @classmethod
    def of(cls, state: TrainingState, world_size: int) -> Replicas:
        """Compute the digests of a state. Its tensors are read once, on their device; of optimizers', samples are.

        Args:
            state: This rank's.
            world_size: The number of ranks that save: a tensor that all of them share has no copies.

        Raises:
            UnstorableTensorError: A tensor cannot be stored, so that a comparison is pointless.
        """
        parameters: dict[str, dict[str, torch.Tensor]] = {}
        buffers: dict[str, torch.Tensor] = {}
        for component, module in state.of_kind("module").items():
            trained = {*parameter_names(module).values()}.union(*tied_parameter_names(module))
            for name, tensor in collect_state_dict(module).items():
                group = _copies_of(tensor, world_size)
                if group is None:
                    continue
                if not group:
                    check_storable(f"{component}/{name}", tensor)
                if name in trained:
                    parameters.setdefault(group, {})[f"{component}/{name}"] = tensor
                elif not group:
                    buffers[f"{component}/{name}"] = tensor
        objects: dict[str, str] = {}
        optimizers: dict[str, str] = {}
        # Under FSDP1 and DeepSpeed each rank's optimizer has a part of what is saved, under no parameter's name.
        are_parts = bool(state.named_optimizers) or state.is_flattened
        for name, part in state.components.items():
            kind = state.kinds[name]
            is_optimizer = kind == "optimizer"
            if (is_optimizer and not are_parts) or (
                kind in ("stateful", "scheduler") and not isinstance(part, Gradients)
            ):
                tensors: dict[str, Any] = {}
                nested = encode_alone(name, kind, state, name, tensors)
                if not any(map(is_dtensor, tensors.values())):
                    for key, tensor in tensors.items():
                        check_storable(key, tensor)
                    values = _digests(tensors, is_whole=not is_optimizer)
                    found = optimizers if is_optimizer else objects
                    found[name] = short_digest(json.dumps([nested, values], sort_keys=True, default=str))
        parameter_digests = {group: _digests(one) for group, one in parameters.items()}
        return cls(parameter_digests, _digests(buffers), objects, optimizers)

    def summary(self) -> list[Any]:
        """Return what all ranks exchange first, in a few bytes."""
        groups = {group: short_digest(repr(sorted(one.items()))) for group, one in self.parameters.items()}
        return [groups, short_digest(repr(sorted(self.buffers.items()))), self.objects, self.optimizers]

    def details(self) -> list[Any]:
        """Return what they exchange if the summaries differ."""
        return [self.parameters, self.buffers]


@dataclass(frozen=True, slots=True)
class OfEachRank:
    """Parts and buffers that are not the same on all ranks, so that each of them stores its own."""

    objects: Sequence[str] = field(default_factory=tuple)
    """Names of parts."""
    buffers: Sequence[str] = field(default_factory=tuple)
    """Names of buffers, prefixed with those of their modules."""


SAME: Final = OfEachRank()
"""The value if everything is the same on all ranks, or there is one process."""


def differ(summaries: Iterable[Sequence[Any]]) -> bool:
    """Return whether tensors of some ranks differ, so that their details are needed; the same on every rank."""
    groups: dict[str, set[str]] = {}
    buffers = set()
    for parameters, of_buffers, *_ in summaries:
        buffers.add(of_buffers)
        for group, digest in parameters.items():
            groups.setdefault(group, set()).add(digest)
    return len(buffers) > 1 or any(len(digests) > 1 for digests in groups.values())


def of_each_rank(
    summaries: Mapping[int, Sequence[Any]], details: Mapping[int, Sequence[Any]], *, allow_different_replicas: bool
) -> OfEachRank:
    """Find what differs among ranks.

    Args:
        summaries: Rank -> its `Replicas.summary`.
        details: Rank -> its `Replicas.details`; empty if `differ` was false.
        allow_different_replicas: Store one rank's copy of the parameters that differ.

    Raises:
        InvalidArgumentError: Parameters that should be copies differ.
    """
    objects = {*_different({"": {rank: summary[2] for rank, summary in summaries.items()}})}
    groups: dict[str, dict[int, Mapping[str, str]]] = {}
    for rank, (parameters, _) in details.items():
        for group, digests in parameters.items():
            groups.setdefault(group, {})[rank] = digests
    names = _different(groups)
    if names and not allow_different_replicas:
        name, (first, other) = next(iter(names.items()))
        raise InvalidArgumentError(
            "The ranks have different copies of parameters, but a checkpoint stores one copy of each: "
            f"{shorten_list(list(names), _SHOWN, quote=True)} ('{name}' on ranks {first} and {other}). Seed all ranks "
            "the same before building the model, or broadcast its parameters once; give pipeline stages the whole "
            "model's names. To save one rank's copies anyway: CheckpointManager(..., allow_different_replicas=True)."
        )
    if not names:  # else the stored copy of the parameters gets the optimizer of its rank
        objects |= {*_different({"": {rank: summary[3] for rank, summary in summaries.items()}})}
    buffers = _different({"": {rank: detail[1] for rank, detail in details.items()}})
    return OfEachRank(sorted(objects), sorted(buffers))


def _different(groups: Mapping[str, Mapping[int, Mapping[str, str]]]) -> dict[str, tuple[int, int]]:
    """Return name -> two ranks whose digests of it differ, although they should have copies."""
    found: dict[str, tuple[int, int]] = {}
    for by_rank in groups.values():
        known: dict[str, tuple[int, str]] = {}  # of the first rank that has it: stages have other names
        for rank, digests in by_rank.items():
            for name, digest in digests.items():
                first, expected = known.setdefault(name, (rank, digest))
                if digest != expected:
                    found.setdefault(name, (first, rank))
    return dict(sorted(found.items()))


def _copies_of(tensor: object, world_size: int) -> str | None:
    """Return what ranks with copies of a tensor have in common; None if there are no copies, or it has no values.

    Ranks of other meshes have copies, too: a checkpoint has one tensor of a name.
    """
    if is_dtensor(tensor):
        mesh = tensor.device_mesh
        place = mesh.get_coordinate()
        sharded = [not one.is_replicate() for one in tensor.placements]
        parts = prod(mesh.size(dim) for dim, is_sharded in enumerate(sharded) if is_sharded)
        if place is None or parts == world_size:
            return None
        return json.dumps([[at for at, is_sharded in zip(place, sharded) if is_sharded], sharded])
    return "" if is_torch_tensor_type(tensor) and not tensor.is_meta else None


def _digests(tensors: Mapping[str, torch.Tensor], *, is_whole: bool = True) -> dict[str, str]:
    """Return name -> a digest that differs for a tensor with other values; else, with other ones among some."""
    words = {name: _words(tensor, is_whole=is_whole) for name, tensor in tensors.items()}
    on_host = {name: one.cpu().tolist() for name, one in words.items()}
    shapes = {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()}
    return {name: short_digest(repr([shapes[name], on_host[name]])) for name in tensors}


def _words(tensor: torch.Tensor, *, is_whole: bool) -> torch.Tensor:
    """Compute a 64-bit number of all bits of a tensor and their places, if wanted, and append some of its elements.

    Each 64 bits are multiplied by a number of their place and folded, and all are added: on the tensor's device, a
    piece at a time. Without the folding, the changed signs of two numbers would cancel out.
    """
    local = local_tensor(tensor) if is_dtensor(tensor) else tensor.detach()
    local = local.resolve_conj().resolve_neg()
    if local.is_complex():
        local = torch.view_as_real(local)
    flat = local.contiguous().reshape(-1)
    flat = flat.view(_INTEGERS[flat.element_size()])
    step = max(1, flat.numel() // _SAMPLES)
    samples = flat[::step][:_SAMPLES].to(torch.int64)
    if not is_whole:
        return samples
    size = flat.element_size()
    is_wide = not (flat.numel() * size % _WIDE or flat.storage_offset() * size % _WIDE)
    words = flat.view(torch.int64) if is_wide else flat
    places = _numbers_of_places(min(_PIECE, words.numel()), flat.device)
    pieces = words.split(_PIECE) if words.numel() else ()
    sums = [_folded(piece.to(torch.int64) * places[: piece.numel()]).sum() for piece in pieces]
    total = [(torch.stack(sums) * _numbers_of_places(len(sums), flat.device)).sum().reshape(1)] if sums else []
    return torch.cat([*total, samples])


def _numbers_of_places(count: int, device: torch.device) -> torch.Tensor:
    """Return a random-looking odd number for each place, so that moving a word changes a sum of products."""
    numbers = torch.arange(1, count + 1, dtype=torch.int64, device=device)
    for factor in _MIXING:
        numbers = _folded(numbers * factor)
    return numbers | 1


def _folded(numbers: torch.Tensor) -> torch.Tensor:
    """Let the upper half of each number change its lower half, in place."""
    numbers ^= numbers >> 31
    return numbers
