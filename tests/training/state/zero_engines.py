"""Runs of DeepSpeed ZeRO-3, saved by a manager from the ranks' parts, and restored into engines and other models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hfshard
from hfshard.errors import InvalidArgumentError
from hfshard.training import CheckpointManager, TrainingState
from tests.flows.resume_trainings import as_launched
from tests.foreign.producers.models import build, losses, optimizer_of
from tests.foreign.producers.truth import read_truth, write_truth
from tests.foreign.producers.zero import zero_engine
from tests.helpers.tensor_bytes import assert_same
from tests.models.zero3_engines import counted_gathers, gathered, masters

VARIANTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "fp32": (3, "fp32", {"stage3_param_persistence_threshold": 0}),
    "bf16": (3, "bf16", {"stage3_param_persistence_threshold": 7, "sub_group_size": 40}),
    "offloaded": (3, "bf16", {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}),
    "stage-1": (1, "fp32", {}),
    "stage-2": (2, "bf16", {"round_robin_gradients": True}),
}
"""Name -> the stage, the precision, and more of DeepSpeed's "zero_optimization"."""
MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = 2


def engine_of(variant: str) -> Any:
    """Give a new model to DeepSpeed."""
    return zero_engine(build("nasty"), *VARIANTS[variant])


def train(engine: Any, seed: int) -> None:
    """Make the steps that the losses of a seed make."""
    for loss in losses(engine, seed=seed + dist.get_rank()):
        engine.backward(loss)
        engine.step()


def state_of(engine: Any) -> TrainingState:
    """Name the parts of a run, in the two ways in which a program has them."""
    return TrainingState(model=engine, optimizer=engine.optimizer)


def truth_of(engine: Any) -> dict[str, torch.Tensor]:
    """Gather weights, masters and moments."""
    from deepspeed.utils import safe_get_full_optimizer_state

    found = {f"weight/{name}": tensor for name, tensor in gathered(engine).items()}
    found |= {f"master/{name}": tensor for name, tensor in masters(engine).items()}
    for name, parameter in engine.module.named_parameters():
        if hasattr(parameter, "ds_id") and parameter.requires_grad:  # DeepSpeed's function fails under ZeRO 1 and 2
            for slot in MOMENTS:
                found[f"{slot}/{name}"] = (
                    safe_get_full_optimizer_state(parameter, slot).view(parameter.ds_shape).clone()
                )
    return found


def save_runs(rank: int, place: Path) -> None:
    """Save, go on, and do the same from what was saved: in a new engine of the same ranks, and under FSDP2."""
    with as_launched(rank, dist.get_world_size()):
        for variant in VARIANTS:
            save_run(rank, place, variant)
        refuse_runs(place)
        load_without_optimizer(place)
        restore_sharded(place)


def save_run(rank: int, place: Path, variant: str) -> None:
    """Save a run and go on; another engine that goes on from what was saved ends the same."""
    engine = engine_of(variant)
    train(engine, 0)
    truth = truth_of(engine)
    with counted_gathers() as found, CheckpointManager(place / variant / "run") as manager:
        manager.save(STEP, state_of(engine), blocking=VARIANTS[variant][1] == "fp32")
    assert not found
    if rank == 0:
        write_truth(place / variant, truth)
    train(engine, 10)
    uninterrupted = truth_of(engine)

    other = engine_of(variant)
    train(other, 20)
    restore(other, place / variant / "run")
    assert_same(truth_of(other), truth)
    train(other, 10)
    assert_same(truth_of(other), uninterrupted)


def restore(engine: Any, run: Path) -> None:
    """Restore without a gather."""
    with counted_gathers() as found, CheckpointManager(run) as manager:
        assert manager.restore(state_of(engine)) == STEP
    assert not found


def refuse_runs(place: Path) -> None:
    """Refuse what the parts do not hold."""
    engine = engine_of("bf16")
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    def refused(words: str) -> None:
        with CheckpointManager(place / "refused") as manager, pytest.raises(InvalidArgumentError, match=words):
            manager.save(1, state_of(engine))

    with GatheredParameters(list(engine.module.parameters())):
        refused("a block of GatheredParameters may change its parameters")
    engine.optimizer.micro_step_id = 1
    refused("gradients of earlier micro-batches")
    engine.optimizer.micro_step_id = 0
    engine.optimizer.dynamic_loss_scale = True
    refused("its loss scale, which changes from step to step")
    engine.optimizer.dynamic_loss_scale = False
    assert not list((place / "refused").rglob("*.safetensors"))


def load_without_optimizer(place: Path) -> None:
    """Load weights into the module of an engine: DeepSpeed's next step starts from them."""
    run = place / "stage-1" / "run"
    engine = engine_of("stage-1")
    for load in (
        lambda: hfshard.load_model(engine.module, run / f"checkpoint-{STEP:08}"),
        lambda: CheckpointManager(run).restore(TrainingState(model=engine.module), strict=False),
    ):
        train(engine, 20)
        load()
        truth = read_truth(place / "stage-1")
        assert_same(
            {f"master/{name}": one for name, one in masters(engine).items()},
            {name: one for name, one in truth.items() if name.startswith("master/")},
        )


def restore_sharded(place: Path) -> None:
    """Restore the run of float32 under `fully_shard`."""
    from torch.distributed.fsdp import fully_shard

    model: Any = fully_shard(build("nasty"))
    optimizer = optimizer_of(model)
    with CheckpointManager(place / "fp32" / "run") as manager:
        manager.restore(TrainingState(model=model, optimizer=optimizer))
    truth = read_truth(place / "fp32")
    for name, parameter in model.named_parameters():
        assert parameter.full_tensor().equal(truth[f"weight/{name}"]), name
        for slot in MOMENTS if parameter.requires_grad else ():
            assert optimizer.state[parameter][slot].full_tensor().equal(truth[f"{slot}/{name}"]), name


def restore_runs(rank: int, place: Path) -> None:
    """Restore on another number of ranks."""
    with as_launched(rank, dist.get_world_size()):
        for variant in VARIANTS:
            engine = engine_of(variant)
            train(engine, 20)
            restore(engine, place / variant / "run")
            truth = read_truth(place / variant)
            assert_same(_without_buffers(truth_of(engine)), _without_buffers(truth))
            train(engine, 10)


def _without_buffers(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leave out BatchNorm's statistics, of which each rank has its own."""
    return {name: tensor for name, tensor in tensors.items() if "running" not in name}
