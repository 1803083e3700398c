"""A module that was built with other ties than the one that was saved is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from hfshard.errors import StateDictMismatchError
from hfshard.training import CheckpointManager, TrainingState


def test_a_tie_that_the_checkpoint_does_not_have_is_refused(tmp_path: Path) -> None:
    saved, tied = (nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "ab"}) for _ in range(2))
    tied["b"].weight = tied["a"].weight
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, TrainingState(model=saved))
        with pytest.raises(StateDictMismatchError, match=r"one tensor, or overlap, in the 'model' that was"):
            manager.restore_latest(TrainingState(model=tied))
