"""Loads that may still fail: when one does, all that were loaded before it get their states back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from hfshard.errors import StateDictMismatchError
from hfshard.training import CheckpointManager, TrainingState


class Refuses(LRScheduler):
    """A scheduler that refuses its state."""

    def get_lr(self) -> Any:
        return self.base_lrs

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        raise ValueError("I am another one")


def test_a_scheduler_that_refuses_leaves_all_as_it_was(tmp_path: Path) -> None:
    def build() -> dict[str, Any]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return {"model": model, "optimizer": optimizer, "scheduler": Refuses(optimizer)}

    saved = build()
    built = build()
    saved["model"](torch.ones(1, 2)).sum().backward()
    saved["optimizer"].step()
    saved["scheduler"].step()
    weights = {name: one.clone() for name, one in built["model"].state_dict().items()}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, TrainingState(**saved))
        with pytest.raises(StateDictMismatchError, match=r"'scheduler' refused its state .*Nothing was restored"):
            manager.restore_latest(TrainingState(**built))
    assert built["scheduler"].last_epoch == 0
    assert not built["optimizer"].state
    assert all(torch.equal(one, weights[name]) for name, one in built["model"].state_dict().items())
