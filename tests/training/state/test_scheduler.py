"""What a scheduler may hold: numbers and plain objects are stored, and an object that is more than that is refused."""

from __future__ import annotations

import enum
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from hfshard.errors import UnstorableTensorError
from hfshard.training import CheckpointManager, TrainingState


class Phase(enum.Enum):
    WARM = "warm"
    DECAY = "decay"


class Holds(LRScheduler):
    """A scheduler that holds an object."""

    def __init__(self, optimizer: Any, held: object) -> None:
        self.held = held
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        return self.base_lrs


class Counted(dict[str, int]):
    """More than its attributes."""


@pytest.mark.parametrize("held", [Phase.WARM, random.Random(0), Counted(a=7)], ids=["enum", "random", "dict"])
def test_an_object_that_is_more_than_its_attributes_is_refused_in_a_scheduler(tmp_path: Path, held: object) -> None:
    model = nn.Linear(2, 2)
    scheduler = Holds(torch.optim.SGD(model.parameters(), lr=0.1), held)
    with pytest.raises(UnstorableTensorError, match="'scheduler/held' is a "):
        CheckpointManager(tmp_path).save(1, TrainingState(model=model, scheduler=scheduler))
    assert list(tmp_path.iterdir()) == []


class Warm(LRScheduler):
    """A user's: some steps of warm-up, and then another scheduler, which it holds."""

    def __init__(self, optimizer: Any) -> None:
        self.after = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=5)
        self.all = {"by name": self.after, "myself": self}
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        if self.last_epoch < 2:
            return [base * (self.last_epoch + 1) / 3 for base in self.base_lrs]
        self.after.step()
        return self.after.get_last_lr()


@pytest.mark.parametrize("turned", [1, -1], ids=["same-order", "other-order"])
def test_a_scheduler_that_a_scheduler_holds_goes_on_where_it_was(tmp_path: Path, turned: int) -> None:
    def built(order: int) -> tuple[torch.optim.Optimizer, Any, TrainingState]:
        model = nn.Linear(2, 2)
        groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.01}]
        optimizer = torch.optim.SGD(groups[::order])
        scheduler = Warm(optimizer)
        return optimizer, scheduler, TrainingState(model=model, optimizer=optimizer, scheduler=scheduler)

    def rates(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[list[float]]:
        found: list[list[float]] = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            found.append([group["lr"] for group in optimizer.param_groups])
        return found

    optimizer, scheduler, state = built(1)
    rates(optimizer, scheduler, 4)
    CheckpointManager(tmp_path).save(4, state)
    other_optimizer, other, other_state = built(turned)
    CheckpointManager(tmp_path).restore(other_state)
    assert other.after.T_cur == scheduler.after.T_cur and other.all["by name"] is other.after
    assert rates(other_optimizer, other, 4) == [rate[::turned] for rate in rates(optimizer, scheduler, 4)]
