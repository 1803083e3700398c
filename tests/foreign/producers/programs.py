"""Directories of Accelerate and Lightning, written by their own code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.checkpointing import save_accelerator_state
from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
from torch import nn
from torch.distributed.fsdp import StateDictType, fully_shard

from tests.foreign.producers.dcp import SHARDINGS, whole_state
from tests.foreign.producers.models import MILESTONES, build, losses, optimizer_of, train
from tests.foreign.producers.truth import checkpoint_of, gathered, write_optimizer, write_truth


def save_accelerate(rank: int, place: Path, ranks: int, version: int, model_name: str = "nasty") -> None:
    """Save as `Accelerator.save_state` does for FSDP, which Accelerate itself sets up on accelerators alone.

    Args:
        rank, place, ranks: This rank, where to save, and the number of all.
        version: Of FSDP.
        model_name: One of `models.MODELS`.
    """
    accelerator = Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version, state_dict_type=StateDictType.SHARDED_STATE_DICT, use_orig_params=True
    )
    model = SHARDINGS[f"fsdp{version}"](build(model_name), ranks)
    optimizer = optimizer_of(model, build(model_name))
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, MILESTONES)
    train(model, optimizer)
    write_optimizer(place, model, optimizer)
    save_fsdp_model(plugin, accelerator, model, checkpoint_of(place))
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, checkpoint_of(place))
    save_accelerator_state(str(checkpoint_of(place)), [], [], [scheduler], [], rank, step=0)
    truth = whole_state(model)
    if rank == 0:
        write_truth(place, truth)


def save_lightning(rank: int, place: Path, ranks: int) -> None:
    """Save by Fabric with a strategy that shards by FSDP2."""
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.strategies import ModelParallelStrategy

    def shard(model: nn.Module, mesh: Any) -> nn.Module:
        fully_shard(model, mesh=mesh["data_parallel"])
        return model

    strategy = ModelParallelStrategy(parallelize_fn=shard, data_parallel_size=ranks, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy, plugins=[TorchElasticEnvironment()])
    fabric.launch()
    model = fabric.setup(build("nasty"))
    optimizer = fabric.setup_optimizers(optimizer_of(model))
    for loss in losses(model):
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    write_optimizer(place, model.module, optimizer.optimizer)
    fabric.save(checkpoint_of(place), {"model": model, "optimizer": optimizer, "step": 2})
    truth = gathered(model.module.state_dict())
    if rank == 0:
        write_truth(place, truth)
