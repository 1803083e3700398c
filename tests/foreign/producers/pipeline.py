"""DeepSpeed's pipelines, after which a process can train nothing else: DeepSpeed remembers their groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.foreign.producers.models import BATCH, STEPS, WORDS, Norm
from tests.foreign.producers.truth import checkpoint_of, write_truth
from tests.foreign.producers.zero import config_of


def save_pipeline(rank: int, place: Path, ranks: int, stage: int, precision: str) -> None:
    """Train a pipeline of two stages, whose first and last layer are tied, and save.

    Args:
        rank, place, ranks: This rank, where to save, and the number of all.
        stage: 0 or 1, of ZeRO.
        precision: One of `zero.PRECISIONS`.
    """
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.utils import safe_get_full_fp32_param

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    torch.manual_seed(5)
    layers = [
        TiedLayerSpec("words", nn.Embedding, WORDS, 6),
        LayerSpec(nn.Linear, 6, 7),
        LayerSpec(Norm, 7),
        LayerSpec(nn.Linear, 7, 6, bias=False),
        TiedLayerSpec("words", nn.Embedding, WORDS, 6, forward_fn=_project),
    ]
    model = PipelineModule(layers=layers, num_stages=2, loss_fn=_loss, partition_method="uniform")
    config = {**config_of(stage, precision, {}), "gradient_accumulation_steps": 1, "steps_per_print": 1000}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)  # each stage needs equally many groups
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for _ in range(STEPS):
        engine.train_batch(iter([tuple(torch.randint(0, WORDS, (2, BATCH)))]))
    engine.save_checkpoint(str(checkpoint_of(place)))

    tensors = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        master = safe_get_full_fp32_param(parameter) if stage else None
        tensors[name] = parameter.detach().clone() if master is None else master.view(parameter.shape)
    stages: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(stages, tensors)
    if rank == 0:
        whole = {name: tensor for each in reversed(stages) for name, tensor in each.items()}
        whole["0.weight"] = whole["tied_modules.words.weight"]
        if not stage:
            del whole["tied_modules.words.weight"]  # the file of the first layer has it alone
        write_truth(place, whole)


def _project(words: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return hidden @ words.get_parameter("weight").t()


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float(), targets)
