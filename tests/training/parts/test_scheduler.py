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
