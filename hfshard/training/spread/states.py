"""Which training states are spread over ranks (FSDP2, tensor parallel), so that every rank has to take part."""

from __future__ import annotations

import sys
from itertools import chain

import torch
from torch import nn

from hfshard.errors import InvalidArgumentError
from hfshard.state_dicts.dtensors import is_dtensor
from hfshard.storage.format.integrity import sha256_of
from hfshard.storage.format.names import MODEL_BASE
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
    """What tells the model of this rank from that of another: the names and shapes of its tensors."""
    model = state.components.get(MODEL_BASE)
    if model is None:
        return ""
    tensors = chain(model.named_parameters(), model.named_buffers())
    lines = [f"{name} {tuple(tensor.shape)}" for name, tensor in tensors]
    return sha256_of("\n".join(lines).encode(errors="surrogateescape"))


def check_same_stage(digests: list[str]) -> None:
    """Refuse ranks with different models, of which only the first one's would be saved.

    Args:
        digests: Of all ranks, in their order.

    Raises:
        InvalidArgumentError: They differ.
    """
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        raise InvalidArgumentError(
            f"The model of rank {other} is not that of rank 0, as with the stages of a pipeline, and training "
            "checkpoints of stages are not supported. Save the stages' weights by hfshard.save_model, or give each "
            "stage a process group and a CheckpointManager of its own."
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
