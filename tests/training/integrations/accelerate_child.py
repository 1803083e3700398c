"""Trainings with what an Accelerator has prepared, each in a process of its own: straight, killed, resumed."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import Dataset

from hfshard.training import CheckpointManager, Gradients, ResumableDataLoader, prepare_loader, prepared_state
from tests.training.fingerprint import flatten, of_model, of_optimizer, of_rngs, of_scheduler

EPOCHS = 3
SAMPLES = 26
"""Of which 4 make a batch: 6 batches and one of 2 in an epoch."""


@dataclass(frozen=True, slots=True)
class Case:
    """A training, by the batches of all its epochs, which are saved and killed after."""

    killed_after: int
    save_every: int
    accelerator: dict[str, Any] = field(default_factory=dict)
    loader: dict[str, Any] = field(default_factory=dict)
    scaler: bool = False
    """A GradScaler, as for float16 on a GPU."""
    gradients: bool = False
    """Save in the middle of a gradient accumulation too."""


CASES = {
    "shuffle and dropout": Case(11, 5),
    "at an epoch's end": Case(9, 7),
    "gradient accumulation": Case(13, 3, {"gradient_accumulation_steps": 3}),
    "amid a gradient accumulation": Case(12, 5, {"gradient_accumulation_steps": 3}, gradients=True),
    "autocast to bfloat16, 2 workers": Case(11, 5, {"mixed_precision": "bf16"}, {"num_workers": 2}),
    "scaler": Case(11, 5, scaler=True),
}


class Points(Dataset[Tensor]):
    """Points that python's, numpy's and torch's RNG move."""

    def __init__(self) -> None:
        self.points = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return self.points[index] * random.random() + float(np.random.standard_normal()) + torch.randn(4)


def run_role(name: str, role: str, directory: Path) -> None:
    """The body of a process; what comes of it is written to `role`.json."""
    case = CASES[name]
    torch.set_num_threads(1)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    accelerator = Accelerator(cpu=True, **case.accelerator)
    if case.scaler:
        accelerator.scaler = torch.amp.GradScaler("cpu", growth_interval=4)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    data = ResumableDataLoader(Points(), batch_size=4, shuffle=True, seed=1, **case.loader)
    loader = prepare_loader(accelerator, data)
    more: Mapping[str, Any] = {"gradients": Gradients(model)} if case.gradients else {}
    state = prepared_state(accelerator, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, **more)
    losses = []
    with CheckpointManager(directory / ("straight" if role == "straight" else "run")) as manager:
        done = int(manager.restore_latest(state) or 0)
        for _ in range(loader.epoch, EPOCHS):
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = model(batch).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                done += 1
                losses.append(loss.item())
                if done % case.save_every == 0 and (accelerator.sync_gradients or case.gradients):
                    manager.save(done, state)
                if role == "killed" and done == case.killed_after:
                    os.kill(os.getpid(), signal.SIGKILL)
    own = {"step": accelerator.step, "scaler": accelerator.scaler.state_dict() if case.scaler else None}
    report = {
        "losses": losses,
        "everything": dict(
            (
                *of_model(model),
                *of_optimizer(optimizer.optimizer, model, "optimizer"),
                *of_scheduler(scheduler.scheduler),
                *of_rngs(),
                *flatten(own, "accelerator"),
            )
        ),
    }
    (directory / f"{role}.json").write_text(json.dumps(report))
