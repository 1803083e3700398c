"""Gradients that were accumulating when the checkpoint was taken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from hfshard.errors import StateDictMismatchError
from hfshard.training import CheckpointManager, Gradients, TrainingState


def run(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, TrainingState]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, TrainingState(model=model, optimizer=optimizer, gradients=Gradients(model))


def backward(model: nn.Module, value: float) -> None:
    model(torch.full((2, 3), value)).square().sum().backward()


def test_a_checkpoint_between_micro_batches_is_resumed_exactly(tmp_path: Path) -> None:
    model, optimizer, state = run(0)
    backward(model, 1.0)
    with CheckpointManager(tmp_path) as manager:
        manager.save(0, state)
    again, other, restored = run(1)
    backward(again, 7.0)
    CheckpointManager(tmp_path).restore_latest(restored)
    for one, its_optimizer in ((model, optimizer), (again, other)):
        backward(one, 2.0)
        its_optimizer.step()
    for mine, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert (mine.grad is None) == (theirs.grad is None)
        assert mine.grad is None or (theirs.grad is not None and torch.equal(mine.grad, theirs.grad))
    assert again.get_parameter("0.bias").grad is None


def test_gradients_of_another_model_are_refused() -> None:
    model, _, _ = run(0)
    with pytest.raises(
        StateDictMismatchError, match=r"gradient of '0.weight' of shape \[2\], but the model has \[4, 3\]"
    ):
        Gradients(model).load_state_dict({"0.weight": torch.ones(2)})
