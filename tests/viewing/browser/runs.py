"""A run of 30 checkpoints: a frozen layer that is linked, a metric with NaN, one damaged, one unfinished."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import nn

from hfshard.training import CheckpointManager, TrainingState


def make_run(root: Path, count: int = 30) -> Path:
    """Save it; step 70 is damaged, and step 310 has no manifest."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    model[0].requires_grad_(False)
    optimizer = torch.optim.Adam(model[1].parameters())
    with CheckpointManager(root) as manager:
        for number in range(1, count + 1):
            if number % 4:
                model(torch.ones(1, 64)).sum().backward()
                optimizer.step()
            loss = math.nan if number == 5 else 2.0 / number + 0.1 * math.sin(number)
            metric = {"eval_loss": loss, "accuracy": 1 - 1 / (number + 1)}
            manager.save(10 * number, TrainingState(model=model, optimizer=optimizer), metric=metric)
    (root / "checkpoint-00000070" / "optimizer.safetensors").write_bytes(b"damaged")
    unfinished = root / f"checkpoint-{10 * count + 10:08d}"
    unfinished.mkdir()
    (unfinished / "training_state.json").write_text("{}")
    return root


def make_decay(root: Path) -> Path:
    """Save three steps whose loss falls from 1 to 0.1 to 0.01."""
    with CheckpointManager(root) as manager:
        for step, loss in ((1, 1.0), (2, 0.1), (3, 0.01)):
            manager.save(step, TrainingState(model=nn.Linear(2, 2)), metric={"loss": loss})
    return root
