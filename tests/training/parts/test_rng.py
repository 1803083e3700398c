"""States of random number generators that a stranger wrote."""

from __future__ import annotations

import numpy
import pytest

from hfshard.errors import DamagedCheckpointError
from hfshard.training.parts.rng import check_rng_state, rng_state


def test_number_too_large_for_numpy_is_damage() -> None:
    numpy.random.random()
    state = rng_state()
    state["numpy"]["state"]["pos"] = 10**40

    with pytest.raises(DamagedCheckpointError, match=r"training_state\.json"):
        check_rng_state(state, "run/training_state.json")
