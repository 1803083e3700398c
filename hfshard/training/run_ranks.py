"""The ranks of a run: they meet, use the same place, and have states with the same parts."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Final

import torch
from torch import nn
from torch.optim import Optimizer

from hfshard.distributed.rendezvous import Session, session
from hfshard.errors import InvalidArgumentError
from hfshard.format.digests import sha256_of
from hfshard.places.place import place_to_save
from hfshard.tensors.state_dict import RUN_REMEDY, collect_state_dict, is_dtensor, is_partitioned, reject_partitioned
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


def agree_on_place(ranks: Session, path: str, does: str) -> None:
    """Reject ranks that do not mean the same place. Every rank must call; see `reject_other_places`."""
    names = ranks.all_of(names_of_place(path))
    reject_other_places(dict(zip(ranks.ranks, names, strict=True)), does)


@contextmanager
def all_ranks() -> Iterator[Session]:
    """Wait for all ranks of the call's process group, which run the block together: one such block at a time.

    It is the same for all runs, because ranks may name a directory differently.

    Raises:
        RankFailedError: A rank failed, died, or did not call.
    """
    with session("the run", needs_all=True) as ranks:
        yield ranks


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


# Training states that are spread over ranks (FSDP2, tensor parallel), so that every rank must take part.


_DIGEST_CHARACTERS: Final = 16


def is_spread_state(state: TrainingState) -> bool:
    """Return whether a parameter or buffer is a DTensor, after releasing parameters that a forward pass has gathered.

    Args:
        state: Its modules under `fully_shard` are resharded; the next pass gathers them again.

    Raises:
        InvalidArgumentError: A module is wrapped by FSDP1; or DeepSpeed has partitioned a part.
    """
    _reject_deepspeed(state)
    modules = list(state.of_kind("module").values())
    for module in modules:
        _reshard(module)
    trained = (group["params"] for optimizer in state.of_kind("optimizer").values() for group in optimizer.param_groups)
    tensors = chain(*(chain(module.parameters(), module.buffers()) for module in modules), *trained)
    return any(is_dtensor(tensor) for tensor in tensors)


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


def _reject_deepspeed(state: TrainingState) -> None:
    """Reject parameters that ZeRO-3 has partitioned, and optimizers whose parts on each rank have no names.

    An optimizer that was passed to `deepspeed.initialize` has no parameters between two steps, and knows its state by
    the flat tensors in which DeepSpeed keeps them.
    """
    for name, part in state.components.items():
        if state.kinds[name] == "module":
            reject_partitioned(part, "run")
        trained = [part.state, *(group["params"] for group in part.param_groups)] if isinstance(part, Optimizer) else []
        is_of_deepspeed = any(base.__name__ == "ZeROOptimizer" for base in type(part).__mro__)
        if is_of_deepspeed or any(map(is_partitioned, chain(*trained))):
            raise InvalidArgumentError(
                f"Cannot save or restore a run with '{name}' ({type(part).__qualname__}): DeepSpeed ZeRO has "
                f"partitioned its state across the ranks. Nothing was changed. {RUN_REMEDY}"
            )


def _reshard(module: nn.Module) -> None:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for name, one in module.named_modules():
        if isinstance(one, fsdp.FullyShardedDataParallel):
            raise InvalidArgumentError(
                f"{f'{name!r} of the model' if name else 'The model'} is wrapped by FullyShardedDataParallel (FSDP1), "
                "whose flat parameters have no names and shapes of their own. Shard it with "
                "torch.distributed.fsdp.fully_shard instead."
            )
        if isinstance(one, fsdp.FSDPModule):
            with torch.no_grad():
                one.reshard()
