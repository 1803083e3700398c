"""Trainings whose states Accelerate alone has saved, and the same objects for a restore of ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn

from hfshard.training import TrainingState
from hfshard.training.state.training_state import unwrapped
from tests.training.fingerprint import of_model, of_optimizer, of_rngs, of_scheduler

SAVED_AT, STEPS = 3, 6
OPTIMIZER_OF_SCHEDULER = "scheduler/'optimizer'"
"""An optimizer that Accelerate has wrapped, or the same one."""


class RunsCode:
    """Says that it was unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.place,)


class Count:
    """An object of the user's own, with tensors in its state."""

    def __init__(self) -> None:
        self.seen = torch.zeros(2, dtype=torch.int64)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]


class Parts:
    """Two models, each with an optimizer and a scheduler, as a GAN has them; dropout draws random numbers."""

    def __init__(self, accelerator: Accelerator | None = None, models: int = 2) -> None:
        torch.manual_seed(5)
        self.models: list[Any] = [nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1)) for _ in range(2)]
        self.optimizers: list[Any] = [torch.optim.AdamW(self.models[0].parameters(), lr=0.01)]
        self.optimizers.append(torch.optim.SGD(self.models[1].parameters(), lr=0.1, momentum=0.9))
        self.schedulers: list[Any] = [torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizers[0], 20)]
        self.schedulers.append(torch.optim.lr_scheduler.CyclicLR(self.optimizers[1], 0.01, 0.1, step_size_up=3))
        for parts in (self.models, self.optimizers, self.schedulers):
            del parts[models:]
        self.count = Count()
        if accelerator is not None:
            self.models = [accelerator.prepare(one) for one in self.models]
            self.optimizers = [accelerator.prepare(one) for one in self.optimizers]
            self.schedulers = [accelerator.prepare(one) for one in self.schedulers]
            accelerator.register_for_checkpointing(self.count)

    def state(self) -> TrainingState:
        """The parts, under the names of their files."""
        named = {
            f"{name}_{number}" if number else name: part
            for name, parts in (("model", self.models), ("optimizer", self.optimizers), ("scheduler", self.schedulers))
            for number, part in enumerate(parts)
        }
        return TrainingState(**named, count=self.count)

    def train(self, first: int, last: int) -> None:
        """Train from a step to another."""
        for step in range(first, last):
            batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
            for model, optimizer, scheduler in zip(self.models, self.optimizers, self.schedulers):
                model(batch).square().mean().backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            self.count.seen += step

    def everything(self) -> dict[str, str]:
        """What two trainings are compared by, bit for bit."""
        return dict(self._everything())

    def _everything(self) -> Iterator[tuple[str, str]]:
        for number, (model, optimizer, scheduler) in enumerate(zip(self.models, self.optimizers, self.schedulers)):
            net = getattr(model, "module", model)
            parts = (
                of_model(net),
                of_optimizer(unwrapped(optimizer), net, "optimizer"),
                of_scheduler(unwrapped(scheduler)),
            )
            for path, value in (entry for part in parts for entry in part):
                if path != OPTIMIZER_OF_SCHEDULER:
                    yield f"{number} {path}", value
        yield from of_rngs()
        yield "count", str(self.count.seen.tolist())


def forget_accelerate() -> None:
    """What Accelerate keeps in its classes is gone."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def save_by_accelerate(place: Path, **options: Any) -> Path:
    """Train to the third step, and save."""
    accelerator = Accelerator(cpu=True)
    parts = Parts(accelerator)
    parts.train(0, SAVED_AT)
    accelerator.save_state(str(place), **options)
    return place
