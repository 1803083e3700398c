"""DeepSpeed's checkpoints: ZeRO's stages and universal ones."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.foreign.producers.models import BATCH, build, losses, optimizer_of
from tests.foreign.producers.truth import checkpoint_of, write_truth

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},
}

RESUMED = {("fp32", 1), ("fp32", 2), ("bf16", 2)}
"""Precision and ranks of the runs that DeepSpeed itself resumes: sums of two numbers have no order."""


def save_zero(
    rank: int,
    place: Path,
    model_name: str,
    stage: int,
    precision: str,
    options: Mapping[str, Any],
    tag: str | None = None,
) -> None:
    """Train under ZeRO and save.

    Args:
        rank, place: This rank, and where to save.
        model_name: One of `models.MODELS`.
        stage: 0 to 3.
        precision: One of `PRECISIONS`.
        options: More of DeepSpeed's "zero_optimization".
        tag: The user's name of the save; None: DeepSpeed's own.
    """
    engine = train_zero(rank, build(model_name), stage, precision, options)
    engine.save_checkpoint(str(checkpoint_of(place)), tag=tag, client_state={"seen": ["a", 3]})
    _write_truth(rank, place, engine)
    if stage:
        _write_states(rank, place, engine)
    ranks = torch.distributed.get_world_size()
    if stage and (precision, ranks) in RESUMED and not options:
        resumed = zero_engine(build(model_name), stage, precision, options)
        resumed.load_checkpoint(str(checkpoint_of(place)), tag=tag)
        _step(resumed, rank)
        _write_truth(rank, place, resumed, "resumed")


def save_universal(rank: int, place: Path, model_name: str, stage: int, precision: str, injects: bool) -> None:
    """Train under ZeRO, save, and convert the save to a universal one, in the same directory.

    Args:
        rank, place, model_name, stage, precision: See `save_zero`.
        injects: Whether the conversion adds what it misses in saves of transformers' and Accelerate's users; False: the
            program has saved it.
    """
    from deepspeed.checkpoint import ds_to_universal

    engine = train_zero(rank, build(model_name), stage, precision, {})
    saved = place / "saved"
    state = {} if injects else {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
    engine.save_checkpoint(str(saved), tag="step", client_state=state)
    _write_truth(rank, place, engine)
    _write_states(rank, place, engine)
    if rank == 0:
        order = Namespace(
            input_folder=str(saved / "step"), output_folder=str(checkpoint_of(place) / "step"), num_extract_workers=1,
            num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=injects,
        )  # fmt: skip
        ds_to_universal.main(order)


def config_of(stage: int, precision: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Build DeepSpeed's config for a small batch and torch's own optimizers."""
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, **options},
        **PRECISIONS[precision],
    }


def train_zero(rank: int, model: nn.Module, stage: int, precision: str, options: Mapping[str, Any]) -> Any:
    """Train a model under ZeRO, and return its engine."""
    engine = zero_engine(model, stage, precision, options)
    _step(engine, rank)
    assert engine.skipped_steps == 0
    return engine


def zero_engine(model: nn.Module, stage: int, precision: str, options: Mapping[str, Any]) -> Any:
    """Give a model to DeepSpeed, with AdamW."""
    import deepspeed

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    settings = config_of(stage, precision, options)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=settings)
    return engine


def _step(engine: Any, rank: int) -> None:
    for loss in losses(engine, seed=rank):
        engine.backward(loss)
        engine.step()


def _write_truth(rank: int, place: Path, engine: Any, kind: str = "truth") -> None:
    """Write the float32 masters where there are any, and the rest as it is on rank 0."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    reordered = reordered_masters(engine) if engine.zero_round_robin_gradients() else {}
    tensors = dict(engine.module.state_dict())
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        master = reordered.get(id(parameter))
        if master is None and parameter.requires_grad:
            master = safe_get_full_fp32_param(parameter)
        with GatheredParameters([parameter]):
            value = parameter.detach().clone()
        tensors[name] = value if master is None else master.view(value.shape)
        assert tensors[name].to(value.dtype).equal(value), name
    if rank == 0:
        write_truth(place, tensors, kind)


def _write_states(rank: int, place: Path, engine: Any) -> None:
    """Write the moments and steps of each parameter, cut out of all ranks' living partitions."""
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    optimizer = engine.optimizer
    tensors = {}
    for group, flats in _flat_states(optimizer):
        for slot in ("exp_avg", "exp_avg_sq"):
            parts: list[Any] = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(parts, [flat[slot] for flat in flats])
            rows = torch.stack([torch.cat(part) for part in parts])
            at = 0
            for parameter in group:
                if hasattr(parameter, "ds_numel"):
                    count = -(-parameter.ds_numel // len(parts))
                    whole = rows[:, at : at + count].reshape(-1)[: parameter.ds_numel].view(parameter.ds_shape)
                else:
                    count = parameter.numel()
                    whole = rows.reshape(-1)[at : at + count].view(parameter.shape)
                at += count
                tensors[f"{names[id(parameter)]}/{slot}"] = whole
                tensors[f"{names[id(parameter)]}/step"] = flats[0]["step"]
    if rank == 0:
        write_truth(place, tensors, "states")


def _flat_states(optimizer: Any) -> list[tuple[list[Any], list[dict[str, Any]]]]:
    """Pairs of parameters, and the states of the flat tensors that have a rank's part of them."""
    inner = optimizer.optimizer.state
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        flats = [inner[flat] for flat in optimizer.fp32_partitioned_groups_flat]
        seen: dict[int, Any] = {id(one): one for group in optimizer.fp16_groups for one in group}
        return [(list(seen.values()), flats)]
    flats = [inner[flat] for flat in optimizer.single_partition_of_fp32_groups]
    return [(group, [flat]) for group, flat in zip(optimizer.round_robin_bit16_groups, flats)]


def reordered_masters(engine: Any) -> dict[int, torch.Tensor]:
    """Cut the masters by the order of the partitions; DeepSpeed's own function cuts them by that of the model."""
    found = {}
    optimizer = engine.optimizer
    for group, partition in zip(optimizer.round_robin_bit16_groups, optimizer.single_partition_of_fp32_groups):
        parts: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(parts, partition.detach())
        flat = torch.cat(parts)
        for parameter in group:
            found[id(parameter)], flat = flat.split([parameter.numel(), flat.numel() - parameter.numel()])
    return found
