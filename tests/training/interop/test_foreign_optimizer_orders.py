"""Whose the states of an old optimizer are, where the model or its groups stand in another order; or it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from hfshard.training import CheckpointManager, TrainingState
from hfshard.training.interop.convert_run import convert_foreign
from tests.training.interop.programs import old, refused


class Ordered(nn.Module):
    """Two layers, of equal shapes or not, in an order of choice."""

    a: nn.Linear
    b: nn.Linear

    def __init__(self, names: str, b_width: int = 3) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(3, {"a": 3, "b": b_width}[name]))

    def forward(self, x: torch.Tensor) -> Any:
        return self.b(self.a(x).relu())


def backwards(parameters: Any) -> list[nn.Parameter]:
    """The parameters of the second layer before those of the first one."""
    weight, bias, *others = parameters
    return [*others, weight, bias]


def two_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for number in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 3) * number).square().sum().backward()
        optimizer.step()


def ordered(tmp_path: Path, b_width: int, build: Any = Adam) -> tuple[Ordered, torch.optim.Optimizer, str]:
    """A run whose model has "a" before "b", and the file that it has saved."""
    torch.manual_seed(3)
    model = Ordered("ab", b_width)
    optimizer = build(model.parameters())
    two_steps(model, optimizer)
    return model, optimizer, old(tmp_path, model, optimizer)


@pytest.mark.parametrize(
    "build",
    [lambda one: Adam(one), lambda one: Adam(backwards(one))],
    ids=["by the names", "by the groups that were built, where only they fit"],
)
def test_the_state_follows_its_parameters_into_another_order(
    build: Any, tmp_path: Path, manager: CheckpointManager
) -> None:
    straight, optimizer, path = ordered(tmp_path, 2, build)
    other = Ordered("ba", b_width=2)
    its_optimizer = Adam(other.parameters(), lr=0.5)
    manager.restore(TrainingState(other, its_optimizer), path)
    two_steps(straight, optimizer)
    two_steps(other, its_optimizer)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in straight.state_dict().items())


def test_an_order_that_neither_has_is_refused(tmp_path: Path, manager: CheckpointManager) -> None:
    _, _, path = ordered(tmp_path, b_width=2)
    other = Ordered("ba", b_width=2)
    of_its_own = Adam([other.a.weight, other.b.weight, other.a.bias, other.b.bias])
    refused(manager, TrainingState(other, of_its_own), path, r"are in another order .*states cannot be matched")


def test_two_orders_that_fit_are_refused(tmp_path: Path, manager: CheckpointManager) -> None:
    ordered(tmp_path, 3, lambda one: Adam(backwards(one)))  # which is what `Adam(other.parameters())` is, too
    path = str(tmp_path / "old.pt")
    other = Ordered("ba")
    state = TrainingState(other, Adam(other.parameters()))

    words = r"\('a.weight', .*; now 'b.weight', .*\), and the states fit both orders: .*Build the model.*strict=False"
    refused(manager, state, path, words)
    restored = manager.restore(state, path, strict=False)

    assert ["states cannot be matched to parameters" in one for one in restored.differences] == [True]
    assert state.components["optimizer"].state_dict()["state"] == {}
    assert torch.equal(other.a.weight, torch.load(path)["model"]["a.weight"])


@pytest.mark.parametrize("older", [False, True], ids=["no state", "states of None"])
def test_an_order_of_nothing_is_not_asked_for(older: bool, tmp_path: Path, manager: CheckpointManager) -> None:
    model, _, path = ordered(tmp_path, 3, lambda one: SGD(one, lr=0.25))
    if older:
        value = torch.load(path)
        value["optimizer"]["state"] = {number: {"momentum_buffer": None} for number in range(4)}
        torch.save(value, path)
    other = Ordered("ba")
    state = TrainingState(other, SGD(other.parameters(), lr=0.5))

    assert manager.restore(state, path).differences == ()
    assert state.components["optimizer"].param_groups[0]["lr"] == 0.25
    assert torch.equal(other.a.weight, model.a.weight)


def test_weights_that_are_missing_do_not_hide_another_order(tmp_path: Path, manager: CheckpointManager) -> None:
    _, _, path = ordered(tmp_path, 3)
    value = torch.load(path)
    del value["model"]["a.bias"]
    torch.save(value, path)
    other = Ordered("ba")
    state = TrainingState(other, Adam(other.parameters()))

    restored = manager.restore(state, path, strict=False)

    assert ["states cannot be matched to parameters" in one for one in restored.differences] == [False, True]
    assert state.components["optimizer"].state_dict()["state"] == {}


def test_weights_sorted_by_name_in_another_order_are_refused(tmp_path: Path, manager: CheckpointManager) -> None:
    class Named(nn.Module):
        def __init__(self, names: str) -> None:
            super().__init__()
            for number, name in enumerate(names):
                setattr(self, name, nn.Parameter(torch.full((2,), float(number))))

    model = Named("ba")
    optimizer = Adam(model.parameters())
    sum(one.square().sum() for one in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    path = str(tmp_path / "old.pt")
    weights = dict(sorted(model.state_dict().items()))
    torch.save({"model": weights, "optimizer": optimizer.state_dict()}, path)

    words = r"another order .*\('a', 'b'; now 'b', 'a'\): the states cannot"
    refused(manager, TrainingState(model, optimizer), path, words)


class Vectors(nn.Module):
    """Vectors of one shape, of which two are tied, with another between them; in the file they may be sorted."""

    def __init__(self) -> None:
        super().__init__()
        self.z = nn.Parameter(torch.randn(2))
        self.c = nn.Parameter(torch.randn(2))
        self.y = self.z
        self.norm = nn.LayerNorm(2)
        self.a = nn.Parameter(torch.randn(2))


def vectors(seed: int) -> tuple[nn.Module, Adam]:
    torch.manual_seed(seed)
    model = Vectors()
    return model, Adam(model.parameters())


def step_by_number(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step with another gradient for each parameter."""
    for number, one in enumerate(model.parameters()):
        one.grad = torch.full_like(one, float(number))
    optimizer.step()


def slots_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """What the optimizer holds for each parameter, after such a step."""
    return [float(optimizer.state[one]["exp_avg"][0]) for one in model.parameters()]


@pytest.mark.parametrize("sort", [list, sorted], ids=["tied", "sorted"])
def test_positions_are_those_of_parameters_not_of_names(sort: Any, tmp_path: Path, manager: CheckpointManager) -> None:
    model, optimizer = vectors(0)
    step_by_number(model, optimizer)
    path = tmp_path / "old.pt"
    torch.save({"model": dict(sort(model.state_dict().items())), "optimizer": optimizer.state_dict()}, path)

    by_torch, other = vectors(1), vectors(1)
    by_torch[1].load_state_dict(torch.load(path)["optimizer"])
    manager.restore(TrainingState(*other), path)

    assert slots_of(*by_torch) == slots_of(*other) == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])


@pytest.mark.parametrize("named", [False, True], ids=["by number", "by name"])
def test_tied_parameters_are_known_by_any_of_their_names(
    named: bool, tmp_path: Path, manager: CheckpointManager
) -> None:
    model, _ = vectors(0)
    optimizer = Adam(nn.DataParallel(model).named_parameters() if named else model.parameters())
    step_by_number(model, optimizer)
    path = old(tmp_path, model, optimizer)

    for place in (path, convert_foreign(path, manager.root).step):
        other = vectors(1)
        manager.restore(TrainingState(*other), place)
        assert slots_of(*other) == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
