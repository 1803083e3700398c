"""Optimizers that hold another one: what it keeps is saved or the save refused, and both stay one after a restore."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR

from hfshard.errors import InvalidArgumentError, StateDictMismatchError
from hfshard.training import CheckpointManager, TrainingState
from tests.distributed.gloo import check_ranks
from tests.training import fingerprint

STEPS = 3


class SharpnessAware(Optimizer):
    """As users write it: it climbs, and another optimizer, with the same groups and a state of its own, steps."""

    def __init__(self, params: Iterable[torch.Tensor], rho: float, momentum: float) -> None:
        super().__init__(params, {"rho": rho, "lr": 0.1, "momentum": momentum})
        self.base_optimizer = SGD(self.param_groups, lr=0.1, momentum=momentum)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["climbed"] = parameter.grad * group["rho"]
                parameter.grad.add_(self.state[parameter]["climbed"])
        self.base_optimizer.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


class Wrapping(Optimizer):
    """Its state_dict is that of the optimizer that it holds."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        super().__init__(params, {})
        self.inner = [Adam(self.param_groups[0]["params"], lr=0.1)]

    def step(self, closure: Any = None) -> Any:
        self.inner[0].step()

    def state_dict(self) -> dict[str, Any]:
        return self.inner[0].state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner[0].load_state_dict(state_dict)


class Sharing(Wrapping):
    """It has the groups of the optimizer that it holds, and forgets to take those that a load gives to that."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        super().__init__(params)
        self.param_groups = self.inner[0].param_groups


class Run:
    """A layer, trained by one of them, with a rate that falls in each step."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(3, 2)
        of_kind: dict[str, Any] = {"wrapping": Wrapping, "sharing": Sharing}
        of_kind |= {"no momentum": lambda params: SharpnessAware(params, 0.5, 0.0)}
        make = of_kind.get(kind, lambda params: SharpnessAware(params, 0.5, 0.9))
        self.optimizer: Any = make(self.model.parameters())
        self.parts: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        if kind != "wrapping":
            self.parts["scheduler"] = StepLR(self.optimizer, 1, gamma=0.5)
        if kind == "both":
            self.parts["inner"] = self.optimizer.base_optimizer

    def state(self, **more: Any) -> TrainingState:
        return TrainingState(**self.parts, **more)

    def train(self) -> dict[str, str]:
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            self.model(torch.ones(1, 3)).square().sum().backward()
            self.optimizer.step()
            if "scheduler" in self.parts:
                self.parts["scheduler"].step()
        return dict(fingerprint.of_model(self.model))


@pytest.mark.parametrize("kind", ["both", "no momentum", "wrapping", "sharing"])
def test_a_run_goes_on_as_one_that_was_never_stopped(kind: str, tmp_path: Path) -> None:
    straight = Run(kind)
    straight.train()
    CheckpointManager(tmp_path).save(STEPS, straight.state())
    expected = straight.train()

    resumed = Run(kind)
    CheckpointManager(tmp_path).restore(resumed.state())

    assert resumed.train() == expected


def test_a_state_that_would_be_lost_is_refused_by_name(tmp_path: Path) -> None:
    run = Run("alone")
    run.train()

    with pytest.raises(
        InvalidArgumentError,
        match=r"'optimizer' \(SharpnessAware\) steps with its base_optimizer \(SGD\), .*"
        r"lacks that one's 'momentum_buffer', .*TrainingState\(..., inner=optimizer.base_optimizer\)",
    ):
        CheckpointManager(tmp_path / "run").save(STEPS, run.state())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["both", "wrapping"])
def test_a_restore_that_fails_leaves_both_as_they_were(kind: str, tmp_path: Path) -> None:
    saved = Run(kind)
    saved.train()
    CheckpointManager(tmp_path).save(STEPS, saved.state())
    other = Run(kind)
    expected = Run(kind).train()

    with pytest.raises(StateDictMismatchError, match="refused its state"):
        other.model.register_load_state_dict_post_hook(_refuse)
        CheckpointManager(tmp_path).restore(other.state())

    assert other.train() == expected


def _refuse(*_: object) -> None:
    raise ValueError("these weights are not for me")


def _zero(rank: int, place: Path) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of what it uses itself

    model = nn.Linear(3, 2)
    state = TrainingState(model=model, optimizer=ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1))
    said = "'optimizer' is a ZeroRedundancyOptimizer: each rank has only a part of its state"
    with pytest.raises(Exception, match=said):
        CheckpointManager(place / "run").save(1, state)
    assert not (place / "run").exists()
    CheckpointManager(place / "other").save(1, TrainingState(model=model, optimizer=SGD(model.parameters(), lr=0.1)))
    with pytest.raises(Exception, match=said):
        CheckpointManager(place / "other").restore(state)


def test_parts_of_a_state_that_have_no_name_are_refused_on_every_rank(tmp_path: Path) -> None:
    check_ranks(tmp_path, 2, _zero, tmp_path)
