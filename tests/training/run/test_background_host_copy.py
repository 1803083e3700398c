"""Copies of a state: made on the CPU and outside of inference mode, wherever a save is called."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from hfshard.training import CheckpointManager, TrainingState
from tests.training.ingredients import Keeps


def test_a_save_does_not_use_another_default_device(tmp_path: Path) -> None:
    keeps = Keeps(torch.arange(5.0))
    with CheckpointManager(tmp_path) as manager:
        with torch.device("meta"):
            manager.save(1, TrainingState(keeps=keeps), blocking=False)
        manager.wait_until_finished()
        keeps.tensor = torch.zeros(5)
        manager.restore_latest(TrainingState(keeps=keeps))
    assert keeps.tensor.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_what_is_saved_and_restored_in_inference_mode_can_be_trained(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    optimizer = torch.optim.Adam(model.parameters())
    state = TrainingState(model=model, optimizer=optimizer)
    with CheckpointManager(tmp_path) as manager:
        for step in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            with torch.inference_mode(step == 0):
                manager.save(step, state, blocking=False)
                manager.wait_until_finished()
                manager.restore_latest(state)
    assert all(int(one["step"]) == 2 for one in optimizer.state.values())
