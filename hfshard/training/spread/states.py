"""Which training states are spread over ranks (FSDP2, tensor parallel), so that every rank has to take part."""

from __future__ import annotations

import sys
from itertools import chain

import torch
from torch import nn

from hfshard.errors import InvalidArgumentError
from hfshard.state_dicts.dtensors import is_dtensor
from hfshard.state_dicts.state_dict import collect_state_dict
from hfshard.storage.format.integrity import sha256_of
from hfshard.training.state import TrainingState


def is_spread_state(state: TrainingState) -> bool:
    """Whether a parameter or buffer is a DTensor. Parameters that a forward pass has gathered are let go first.

    Args:
        state: Of its modules, those under `fully_shard` are resharded; the next pass gathers them again.

    Raises:
        InvalidArgumentError: A module is wrapped by FSDP1.
    """
    modules = list(state.of_kind("module").values())
    for module in modules:
        _reshard(module)
    trained = (group["params"] for optimizer in state.of_kind("optimizer").values() for group in optimizer.param_groups)
    tensors = chain(*(chain(module.parameters(), module.buffers()) for module in modules), *trained)
    return any(is_dtensor(tensor) for tensor in tensors)


def stage_digest(state: TrainingState) -> str:
    """What tells the modules of this rank from those of another: the names and shapes of their tensors."""
    lines = [
        f"{component}/{name} {tuple(tensor.shape)}"
        for component, module in sorted(state.of_kind("module").items())
        for name, tensor in collect_state_dict(module).items()
        if isinstance(tensor, torch.Tensor)
    ]
    return sha256_of("\n".join(lines).encode(errors="surrogateescape"))


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
