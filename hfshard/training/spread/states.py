"""Which training states are spread over ranks (FSDP2, tensor parallel), so that every rank has to take part."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import chain
from typing import Final

import torch
from torch import nn
from torch.optim import Optimizer

from hfshard.errors import InvalidArgumentError
from hfshard.format.digests import sha256_of
from hfshard.tensors.state_dict import RUN_REMEDY, collect_state_dict, is_dtensor, is_partitioned, refuse_partitioned
from hfshard.training.state import TrainingState

_DIGEST_CHARACTERS: Final = 16


def is_spread_state(state: TrainingState) -> bool:
    """Whether a parameter or buffer is a DTensor. Parameters that a forward pass has gathered are let go first.

    Args:
        state: Of its modules, those under `fully_shard` are resharded; the next pass gathers them again.

    Raises:
        InvalidArgumentError: A module is wrapped by FSDP1; or DeepSpeed has partitioned a part.
    """
    _refuse_deepspeed(state)
    modules = list(state.of_kind("module").values())
    for module in modules:
        _reshard(module)
    trained = (group["params"] for optimizer in state.of_kind("optimizer").values() for group in optimizer.param_groups)
    tensors = chain(*(chain(module.parameters(), module.buffers()) for module in modules), *trained)
    return any(is_dtensor(tensor) for tensor in tensors)


def shared_kinds(state: TrainingState) -> dict[str, str]:
    """The kinds of the parts, by name, that all ranks must have: but for loaders, of which each rank saves its own."""
    return {name: kind for name, kind in state.kinds.items() if kind != "loader"}


def refuse_other_parts(kinds: Mapping[int, Mapping[str, str]]) -> None:
    """Refuse to save ranks together whose states have other parts: only those of the first rank would be stored.

    Args:
        kinds: Rank -> what `shared_kinds` gave there.

    Raises:
        InvalidArgumentError: They differ.
    """
    first = min(kinds)
    for rank, other in kinds.items():
        if other != kinds[first]:
            raise InvalidArgumentError(
                f"The state of rank {rank} has the parts {dict(other)}, and that of rank {first} has "
                f"{dict(kinds[first])}. Give the states of all ranks the same parts."
            )


def stage_digest(state: TrainingState) -> str:
    """What tells the modules of this rank from those of another: the names and shapes of their tensors."""
    lines = [
        f"{component}/{name} {tuple(tensor.shape)}"
        for component, module in sorted(state.of_kind("module").items())
        for name, tensor in collect_state_dict(module).items()
        if isinstance(tensor, torch.Tensor)
    ]
    return short_digest("\n".join(lines))


def short_digest(text: str) -> str:
    """What tells a text from a few others; all ranks hear that of each."""
    return sha256_of(text.encode(errors="surrogateescape"))[:_DIGEST_CHARACTERS]


def _refuse_deepspeed(state: TrainingState) -> None:
    """Refuse parameters that ZeRO-3 has partitioned, and optimizers of which each rank has a part under no name.

    An optimizer that was given to `deepspeed.initialize` has no parameters between two steps, and knows its state by
    the flat tensors in which DeepSpeed keeps them.
    """
    for name, part in state.components.items():
        if state.kinds[name] == "module":
            refuse_partitioned(part, "run")
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
                "whose flat parameters have no names and shapes of their own. Shard it by "
                "torch.distributed.fsdp.fully_shard instead."
            )
        if isinstance(one, fsdp.FSDPModule):
            with torch.no_grad():
                one.reshard()
