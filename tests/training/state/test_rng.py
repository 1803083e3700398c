"""States of random number generators that a stranger wrote."""

from __future__ import annotations

import numpy
import pytest
import torch

from hfshard.errors import DamagedCheckpointError
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
