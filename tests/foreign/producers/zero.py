"""DeepSpeed's checkpoints: ZeRO's stages, universal ones, and pipelines."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from tests.foreign.producers.models import BATCH, build, losses, optimizer_of
from tests.foreign.producers.truth import checkpoint_of, write_truth

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},
}


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
    engine = _train(rank, build(model_name), stage, precision, options)
    engine.save_checkpoint(str(checkpoint_of(place)), tag=tag)
    _write_truth(rank, place, engine)


def save_universal(rank: int, place: Path, model_name: str, stage: int, precision: str, injects: bool) -> None:
    """Train under ZeRO, save, and convert the save to a universal one, in the same directory.

    Args:
        rank, place, model_name, stage, precision: See `save_zero`.
        injects: Whether frozen and tied parameters and buffers are written, too; needed for what transformers saves.
    """
    from deepspeed.checkpoint import ds_to_universal

    engine = _train(rank, build(model_name), stage, precision, {})
    saved = place / "saved"
    engine.save_checkpoint(str(saved), tag="step")
    _write_truth(rank, place, engine)
    if rank == 0:
        order = Namespace(
            input_folder=str(saved / "step"), output_folder=str(checkpoint_of(place) / "step"), num_extract_workers=1,
            num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=injects,
        )  # fmt: skip
        ds_to_universal.main(order)


def _train(rank: int, model: nn.Module, stage: int, precision: str, options: Mapping[str, Any]) -> Any:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, **options},
        **PRECISIONS[precision],
    }
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=config)
    for loss in losses(engine, seed=rank):
        engine.backward(loss)
        engine.step()
    assert engine.skipped_steps == 0
    return engine


def _write_truth(rank: int, place: Path, engine: Any) -> None:
    """Write the float32 masters where there are any, and the rest as it is on rank 0."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    tensors = dict(engine.module.state_dict())
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        master = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
        if master is None:
            with GatheredParameters([parameter]):
                master = parameter.detach().clone()
        tensors[name] = master.view(getattr(parameter, "ds_shape", parameter.shape))
    if rank == 0:
        write_truth(place, tensors)
