"""A step is an exact int, and fits into the name of a directory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hfshard.errors import InvalidArgumentError
from hfshard.training.run.manifest import checked_step
from hfshard.training.state.step import RestoredStep


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        pytest.param(0, 0, id="the lowest"),
        pytest.param(999_999_999_999_999_999, 999_999_999_999_999_999, id="the highest"),
        pytest.param(np.int64(7), 7, id="numpy"),
        pytest.param(torch.tensor(8), 8, id="a tensor"),
        pytest.param(RestoredStep(9), 9, id="a restored step"),
    ],
)
def test_integers_of_any_library_become_plain_ones(step: object, expected: int) -> None:
    checked = checked_step(step)

    assert checked == expected
    assert type(checked) is int


@pytest.mark.parametrize(
    ("step", "shown"),
    [
        pytest.param(-1, "-1", id="negative"),
        pytest.param(10**18, "1000000000000000000", id="19 digits"),
        pytest.param(1 << 20_000, "one of 20001 bits", id="more than Python prints"),
        pytest.param(True, "True", id="a truth"),
        pytest.param(3.0, "3.0", id="a float"),
        pytest.param("3", "'3'", id="a word"),
        pytest.param(None, "None", id="nothing"),
        pytest.param(torch.tensor([1, 2]), "tensor([1, 2])", id="two numbers"),
    ],
)
def test_what_is_no_step_is_refused_and_shown(step: object, shown: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        checked_step(step)

    assert str(caught.value) == f"step must be an integer from 0 to 999999999999999999, got {shown}."
