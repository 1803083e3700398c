"""Every optimizer and scheduler goes on from a file of torch.save: with its dtypes, and without its functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hfshard.errors import UnsafePickleError
from hfshard.training import CheckpointManager, TrainingState
from tests.training import ingredients
from tests.training.fingerprint import flatten, of_scheduler
from tests.training.resume import optimizers, schedulers

OWN_OBJECTS = {"own-bound-method", "lambda-holds-optimizer", "sequential-stateful"}
"""Schedulers whose state dict has more than data."""


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 3) -> None:
    """Steps with gradients that are made up."""
    generator = torch.Generator().manual_seed(count)
    for _ in range(count):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.rand(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step(lambda: 0.5)


ONE_OPTIMIZER = {name: case for name, case in optimizers.ALL.items() if not name.startswith(("sparse", "muon"))}
"""Those with gradients that are dense, and with nothing beside them."""


@pytest.mark.parametrize("name", ONE_OPTIMIZER)
def test_the_state_of_every_optimizer_is_restored_bit_for_bit(name: str, tmp_path: Path) -> None:
    case = ONE_OPTIMIZER[name]
    model, other = (case.get("model", ingredients.mlp)() for _ in range(2))
    optimizer, its_optimizer = case["optimizer"](model), case["optimizer"](other)
    trained(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "old.pt")

    restored = CheckpointManager(tmp_path / "run").restore(TrainingState(other, its_optimizer), tmp_path / "old.pt")

    assert restored.differences == ()
    expected = dict(flatten(optimizer.state_dict(), ""))
    assert dict(flatten(its_optimizer.state_dict(), "")) == expected
    assert any("state" in key for key in expected)


@pytest.mark.parametrize("name", sorted(schedulers.ALL.keys() - {"own-crowded"}))  # torch.save refuses its lambda
def test_every_scheduler_goes_on(name: str, tmp_path: Path) -> None:
    kind = schedulers.ALL[name]
    states = []
    for _ in range(2):
        model: Any = nn.ModuleDict({"first": nn.Linear(2, 3), "last": nn.Linear(3, 1)})
        optimizer: Any = optimizers.two_groups(model)
        states.append(TrainingState(model, optimizer, kind.make(optimizer)))
    before, after = states

    def steps(state: TrainingState, count: int) -> list[float]:
        rates = []
        for number in range(count):
            state.components["optimizer"].step()
            state.components["scheduler"].step(*([1 / (number + 1)] if kind.takes_loss else []))
            rates += [group["lr"] for group in state.components["optimizer"].param_groups]
        return rates

    steps(before, 4)
    value = {name: part.state_dict() for name, part in before.components.items()}
    torch.save(value, tmp_path / "old.pt")
    manager = CheckpointManager(tmp_path / "run")
    if name in OWN_OBJECTS:
        with pytest.raises(UnsafePickleError, match="without running code"):
            manager.restore(after, tmp_path / "old.pt")
    restored = manager.restore(after, tmp_path / "old.pt", strict=name not in OWN_OBJECTS)

    assert bool(restored.differences) == (name in OWN_OBJECTS)
    assert dict(of_scheduler(after.components["scheduler"])) == dict(of_scheduler(before.components["scheduler"]))
    assert steps(after, 5) == steps(before, 5)
