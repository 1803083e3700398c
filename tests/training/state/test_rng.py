"""States of random number generators that a stranger wrote, and gradients that were accumulating at a save."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

from hfshard.errors import DamagedCheckpointError, StateDictMismatchError
from hfshard.training import CheckpointManager, Gradients, TrainingState
from hfshard.training.state.rng import check_rng_state, device_places, rng_state


@pytest.mark.parametrize("place", [10**40, 625, -1, None])
def test_place_beyond_the_buffer_of_numpy_is_damage(place: object) -> None:
    numpy.random.random()
    state = rng_state()
    state["numpy"]["state"]["pos"] = place

    with pytest.raises(DamagedCheckpointError, match=r"training_state\.json"):
        check_rng_state(state, "run/training_state.json")


@pytest.mark.parametrize(
    ("saved", "current", "now", "count", "places"),
    [
        (4, 1, 5, 8, {1: 5, 0: 0, 2: 2, 3: 3}),  # rank 5 of two machines of 4, now on one of 8
        (8, 5, 1, 4, {5: 1, 0: 0, 2: 2, 3: 3}),  # and back
        (4, 2, 2, 4, {0: 0, 1: 1, 2: 2, 3: 3}),
        (4, None, 2, 8, {0: 0, 1: 1, 2: 2, 3: 3}),  # an older checkpoint
        (8, None, 1, 4, {0: 0, 1: 1, 2: 2, 3: 3}),
        (1, 0, 3, 4, {0: 3}),
    ],
)
def test_the_state_of_the_own_device_goes_to_the_own_device(
    saved: int, current: int | None, now: int, count: int, places: dict[int, int]
) -> None:
    assert device_places(saved, current, now, count) == places


@pytest.mark.parametrize("number", [1, -1, "0", True])
def test_a_current_device_without_a_state_is_damage(number: object) -> None:
    state = rng_state() | {"cuda": [torch.zeros(16, dtype=torch.uint8)], "current_devices": {"cuda": number}}

    with pytest.raises(DamagedCheckpointError, match="its current device"):
        check_rng_state(state, "run/training_state.json")


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
