"""States of random number generators that a stranger wrote."""

from __future__ import annotations

import numpy
import pytest

from hfshard.errors import DamagedCheckpointError
from hfshard.training.parts.rng import check_rng_state, rng_state


@pytest.mark.parametrize("place", [10**40, 625, -1, None])
def test_place_beyond_the_buffer_of_numpy_is_damage(place: object) -> None:
    numpy.random.random()
    state = rng_state()
    state["numpy"]["state"]["pos"] = place

    with pytest.raises(DamagedCheckpointError, match=r"training_state\.json"):
        check_rng_state(state, "run/training_state.json")
