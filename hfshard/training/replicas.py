"""Copies of one thing on several ranks: digests compare them before a save; each rank saves what differs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from hfshard._util.text import shorten_list
from hfshard.errors import InvalidArgumentError
from hfshard.tensors.state_dict import (
    collect_state_dict,
    is_dtensor,
    local_tensor,
    parameter_names,
    tied_parameter_names,
)
from hfshard.tensors.stored_tensor import check_storable, is_torch_tensor_type
from hfshard.training.run_ranks import short_digest
from hfshard.training.state.collect_state import encode_alone
from hfshard.training.state.rng import Gradients
from hfshard.training.state.training_state import TrainingState

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
well are those of ranks with the same coordinates."""


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
    def of(cls, state: TrainingState) -> Replicas:
        """Compute the digests of a state. Its tensors are read once, on their device; of optimizers', samples are.

        Raises:
            UnstorableTensorError: A tensor cannot be stored, so that a comparison is pointless.
        """
        parameters: dict[str, dict[str, torch.Tensor]] = {}
        buffers: dict[str, torch.Tensor] = {}
        for component, module in state.of_kind("module").items():
            trained = {*parameter_names(module).values()}.union(*tied_parameter_names(module))
            for name, tensor in collect_state_dict(module).items():
                group = _copies_of(tensor)
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
    objects = different_objects(summaries)
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


def different_objects(summaries: Mapping[int, Sequence[Any]]) -> set[str]:
    """Return the names of parts that are neither module nor optimizer, and that are not the same on all ranks."""
    return {*_different({"": {rank: summary[2] for rank, summary in summaries.items()}})}


def _different(groups: Mapping[str, Mapping[int, Mapping[str, str]]]) -> dict[str, tuple[int, int]]:
    """Return name -> two ranks whose digests of it differ, although they should have copies."""
    found: dict[str, tuple[int, int]] = {}
    for by_rank in groups.values():
        first = min(by_rank, default=0)
        for rank, digests in by_rank.items():
            for name, digest in digests.items():
                if by_rank[first].get(name, digest) != digest:
                    found.setdefault(name, (first, rank))
    return dict(sorted(found.items()))


def _copies_of(tensor: object) -> str | None:
    """Return what ranks with copies of a tensor have in common; None if there are no copies, or it has no values."""
    if is_dtensor(tensor):
        mesh = tensor.device_mesh
        place = mesh.get_coordinate()
        sharded = [not one.is_replicate() for one in tensor.placements]
        if place is None or all(is_sharded or mesh.size(dim) == 1 for dim, is_sharded in enumerate(sharded)):
            return None
        return json.dumps([mesh.mesh.tolist(), [at for at, is_sharded in zip(place, sharded) if is_sharded], sharded])
    return "" if is_torch_tensor_type(tensor) and not tensor.is_meta else None


def _digests(tensors: Mapping[str, torch.Tensor], *, is_whole: bool = True) -> dict[str, str]:
    """Return name -> a digest that differs for a tensor with other values; else, with other ones among some."""
    words = {name: _words(tensor, is_whole=is_whole) for name, tensor in tensors.items()}
    on_host = {name: one.cpu().tolist() for name, one in words.items()}
    shapes = {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()}
    return {name: short_digest(repr([shapes[name], on_host[name]])) for name in tensors}


def _words(tensor: torch.Tensor, *, is_whole: bool) -> torch.Tensor:
    """Compute a 64-bit number of all bits of a tensor and their places, if wanted, and append some of its elements.

    Each 64 bits are multiplied by a number of their place, and all are added: on the tensor's device, a piece at a
    time.
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
    sums = [(piece.to(torch.int64) * places[: piece.numel()]).sum() for piece in pieces]
    total = [(torch.stack(sums) * _numbers_of_places(len(sums), flat.device)).sum().reshape(1)] if sums else []
    return torch.cat([*total, samples])


def _numbers_of_places(count: int, device: torch.device) -> torch.Tensor:
    """Return a random-looking odd number for each place, so that moving a word changes a sum of products."""
    numbers = torch.arange(1, count + 1, dtype=torch.int64, device=device)
    for factor in _MIXING:
        numbers = numbers * factor
        numbers = numbers ^ (numbers >> 31)
    return numbers | 1
