"""The small training that every way of resuming has to continue: its data, model, optimizer, and what is compared."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

SAMPLES = 24
BATCH_SIZE = 4
STEPS_PER_EPOCH = SAMPLES // BATCH_SIZE
STEPS = 27
"""Four epochs and a half."""
WIDTH = 64
"""Wide enough that every file of a checkpoint is larger than DISK_BYTES."""
DISK_BYTES = 12 * 1024
"""On the full disk, a file can grow to this size and no further."""
SEED = 17


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """One process: a training from its start, or resumed from what is in the directory."""

    way: str
    directory: Path
    """Directory of checkpoints; below it, `phase`.jsonl is what happened."""
    phase: str = "straight"
    save_every: int | None = None
    kill_after: int | None = None
    """The step that is the process's last."""
    full_from: int | None = None
    """The first step at which the disk is full."""
    resume: bool = False
    keep_one: bool = False
    shuffle: bool = True
    workers: int = 0
    dropout: float = 0.0
    augment: bool = False
    nadam_bf16: bool = False
    user_schedule: bool = False
    reordered: bool = False
    """The resumed process registers the two like-shaped layers in the other order."""


class Samples(Dataset[dict[str, Tensor]]):
    """Fixed samples; augmented, each also draws from the RNGs of Python, numpy and torch."""

    def __init__(self, augment: bool, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, WIDTH, generator=generator)
        self.y = torch.randn(SAMPLES, 1, generator=generator).to(dtype)
        self.augment, self.dtype = augment, dtype

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = self.x[index]
        if self.augment:
            x = x * (0.5 + random.random()) + 0.1 * float(np.random.standard_normal()) + 0.1 * torch.randn(WIDTH)
        return {"x": x.to(self.dtype), "labels": self.y[index]}


class Model(nn.Module):
    """Two layers of one shape, so that an optimizer's state can be mistaken for the other's, and a head."""

    def __init__(self, dropout: float, reordered: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        layers = {"first": nn.Linear(WIDTH, WIDTH), "second": nn.Linear(WIDTH, WIDTH)}
        for name in sorted(layers, reverse=reordered):
            self.add_module(name, layers[name])
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The loss, as Trainer expects it."""
        hidden = self.dropout(torch.tanh(self.get_submodule("first")(x)))
        predicted = self.head(torch.tanh(self.get_submodule("second")(hidden)))
        return {"loss": nn.functional.mse_loss(predicted, labels)}


class UserSchedule(torch.optim.lr_scheduler.LRScheduler):
    """A user's scheduler that holds one of its own methods, as torch's CyclicLR once did."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.shape = self._warm_up
        super().__init__(optimizer)

    def _warm_up(self, step: int) -> float:
        return min(1.0, (step + 1) / 10)

    def get_lr(self) -> list[float | Tensor]:
        """The learning rate of each group."""
        return [base * self.shape(self.last_epoch) for base in self.base_lrs]


@dataclass(slots=True)
class Parts:
    """The parts of a training, freshly built."""

    data: Samples
    model: Model
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler


def build(job: TrainingJob) -> Parts:
    """Seed everything and build the parts, as a training script does at its start."""
    torch.set_num_threads(1)
    dtype = torch.bfloat16 if job.nadam_bf16 else torch.float32
    model = Model(job.dropout, job.reordered and job.resume).to(dtype)
    kind = torch.optim.NAdam if job.nadam_bf16 else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=0.01)
    scheduler = (
        UserSchedule(optimizer) if job.user_schedule else torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    )
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    return Parts(Samples(job.augment, dtype), model, optimizer, scheduler)


class Record:
    """Record of one process: a line of JSON for each step, written before the step's SIGKILL."""

    def __init__(self, job: TrainingJob) -> None:
        self._job = job
        self._file = os.open(job.directory / f"{job.phase}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def step(self, step: int, model: nn.Module) -> None:
        """Note the weights after a step."""
        self.note(step=step, weights=digest(model.state_dict().items()))

    def end_of_step(self, step: int) -> None:
        """Kill this process, if this is the step."""
        if step == self._job.kill_after:
            os.kill(os.getpid(), signal.SIGKILL)

    def finish(self, parts: Parts) -> None:
        """Note all that is to be the same at the end: optimizer, learning rate, RNG."""
        state = parts.optimizer.state
        slots = (
            (f"{name}/{slot}", value)
            for name, parameter in parts.model.named_parameters()
            for slot, value in state[parameter].items()
        )
        self.note(
            end={
                "optimizer": digest(slots),
                "lr": repr(parts.optimizer.param_groups[0]["lr"]),
                "RNGs": digest([("torch", torch.get_rng_state())]) + str(random.random()) + str(np.random.random()),
            }
        )

    def note(self, **line: Any) -> None:
        """Write a line."""
        os.write(self._file, (json.dumps(line) + "\n").encode())


def digest(tensors: Iterable[tuple[str, Any]]) -> str:
    """A short digest of names, dtypes and every bit of the values."""
    total = hashlib.sha256()
    for name, value in sorted(tensors):
        if isinstance(value, Tensor):
            total.update(f"{name} {value.dtype}".encode())
            total.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            total.update(f"{name} {value!r}".encode())
    return total.hexdigest()[:16]
