"""What a rank sends of its own to the first one when a checkpoint is saved: JSON and bytes, and no pickle."""

from __future__ import annotations

import math

import pytest
import torch

from hfshard.errors import UnstorableTensorError
from hfshard.training.spread_save import RankContribution
from hfshard.training.state.collect_state import RankState

TENSORS = {
    "rng": torch.arange(5, dtype=torch.uint8),
    "half": torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
    "small": torch.tensor([0.5, 2.0]).to(torch.float8_e4m3fn),
    "flag": torch.tensor(True),
    "none": torch.empty(0, 3),
    "columns": torch.arange(6.0).reshape(2, 3).t(),
    "conjugated": torch.tensor([1 + 2j]).conj(),
    "nan": torch.tensor([math.nan]),
}


def test_a_contribution_arrives_as_it_was_sent() -> None:
    nested = {"rng": {"python": [3, None]}, "components": {"läder": {"kind": "loader", "state": 7}}}

    found = RankContribution.from_bytes(RankContribution(12, RankState(nested, TENSORS)).to_bytes())

    assert found.state is not None
    assert (found.step, found.problem, found.state.nested) == (12, "", nested)
    assert list(found.state.tensors) == list(TENSORS)
    for name, tensor in TENSORS.items():
        arrived = found.state.tensors[name]
        assert (arrived.dtype, arrived.shape) == (tensor.dtype, tensor.shape), name
        assert arrived.tolist() == tensor.tolist() or name == "nan"
    assert found.state.tensors["nan"].isnan().all()


def test_names_of_one_tensor_are_names_of_one_where_they_arrive() -> None:
    one = torch.ones(2)

    state = RankContribution.from_bytes(RankContribution(1, RankState({}, {"a": one, "b": one})).to_bytes()).state

    assert state is not None
    assert list(state.tensors) == ["a", "b"] and state.tensors["a"] is state.tensors["b"]


def test_a_problem_arrives_without_a_state() -> None:
    sent = RankContribution(problem="ValueError: no")

    assert RankContribution.from_bytes(sent.to_bytes()) == sent


def test_a_tensor_that_cannot_be_stored_is_refused_where_it_is() -> None:
    with pytest.raises(UnstorableTensorError, match="sparse"):
        RankContribution(1, RankState({}, {"sparse": torch.ones(2).to_sparse()})).to_bytes()
