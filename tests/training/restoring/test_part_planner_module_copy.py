"""Weights that a hook of the model refuses: the model, and all that was restored before it, is as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from hfshard.errors import StateDictMismatchError
from hfshard.training import CheckpointManager, TrainingState
from hfshard.training.restoring.part_planner import may_refuse
from tests.crash.runs.content import Counter


class Counting(nn.Linear):
    """Has a state that is no tensor."""

    def __init__(self, count: int) -> None:
        super().__init__(2, 2)
        self.count = count

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


class Refusing(nn.BatchNorm1d):
    """Refuses its tensors once it has them."""

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        if int(self.num_batches_tracked or 0) > 0:
            raise ValueError("not for me")


def build(seed: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: Any = nn.Sequential(Counting(seed), nn.Linear(2, 2), Refusing(2))
    model[1].weight = model[0].weight
    model(torch.ones(2, 2)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=float(seed), momentum=0.9)
    optimizer.step()
    return model, optimizer


def test_refused_weights_leave_the_whole_state_as_it_was(tmp_path: Path) -> None:
    model, optimizer = build(1)
    other, its_optimizer = build(2)
    other[2].num_batches_tracked.zero_()
    before = {name: value.clone() for name, value in other.state_dict().items() if isinstance(value, torch.Tensor)}
    counter, its_counter = Counter(), Counter()
    counter.values = {"count": 7, "mean": torch.ones(2)}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, TrainingState(model, optimizer, counter=counter))
        with pytest.raises(StateDictMismatchError, match=r"'model' refused its state .* Nothing was restored"):
            manager.restore(TrainingState(other, its_optimizer, counter=its_counter), 1)

    assert {name for name, value in before.items() if not torch.equal(value, other.state_dict()[name])} == set()
    assert other[1].weight is other[0].weight
    assert (other[0].count, its_optimizer.param_groups[0]["lr"]) == (2, 2.0)
    assert its_counter.values["count"] == Counter().values["count"] != 7


@pytest.mark.compat
def test_models_without_hooks_of_their_own_need_no_copy() -> None:
    assert not may_refuse(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.TransformerEncoderLayer(4, 2)))
    assert not may_refuse(weight_norm(nn.Linear(2, 2)))
    assert may_refuse(nn.Sequential(Refusing(2)))
    hooked = nn.Linear(2, 2)
    hooked.register_load_state_dict_post_hook(lambda *_: None)
    assert may_refuse(hooked)
