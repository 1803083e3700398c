"""What is matched by position follows the groups and parameters into another order, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import lr_scheduler as torch_schedulers
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import SWALR

from hfshard.errors import StateDictMismatchError
from hfshard.training import CheckpointManager, TrainingState
from tests.training import fingerprint

RATES = {"a": 0.1, "b": 0.01}
Make = Callable[[Optimizer, Callable[..., list[Any]]], Any]
"""Makes a scheduler; the second argument puts a value for `a` and one for `b` into the order of the groups."""


class Power:
    """A callable with a state of its own."""

    def __init__(self, base: float) -> None:
        self.base, self.calls = base, 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return float(self.base**self.calls)


class Run:
    """A model of two layers, each with a group of its own; the groups stand in the order of `names`."""

    def __init__(self, names: str, make: Make | None = None, **more: Any) -> None:
        torch.manual_seed(1)
        self.model = nn.ModuleDict({name: nn.Linear(2, 1) for name in "ab"})
        groups = [{"params": self.model[name].parameters(), "lr": RATES[name]} for name in names]
        self.optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        self.names = names
        self.scheduler: Any = make(self.optimizer, self.in_order) if make else None
        self.state = TrainingState(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, **more)

    def in_order(self, a: Any, b: Any) -> list[Any]:
        return [{"a": a, "b": b}[name] for name in self.names]

    def train(self, steps: int) -> list[dict[str, tuple[float, float]]]:
        """The rate and the momentum of each layer at each step."""
        found: list[dict[str, tuple[float, float]]] = []
        for _ in range(steps):
            self.optimizer.step()
            if isinstance(self.scheduler, torch_schedulers.ReduceLROnPlateau) or hasattr(self.scheduler, "is_better"):
                self.scheduler.step(1.0)
            elif self.scheduler is not None:
                self.scheduler.step()
            groups = self.optimizer.param_groups
            found.append({name: (one["lr"], one["momentum"]) for name, one in zip(self.names, groups, strict=True)})
        return found


def _chained(optimizer: Optimizer, by: Callable[..., list[Any]]) -> Any:
    lambdas = torch_schedulers.LambdaLR(optimizer, by(Power(0.9), lambda step: 0.5**step))
    return torch_schedulers.ChainedScheduler([torch_schedulers.ConstantLR(optimizer, 0.5, 4), lambdas])


def _sequential(optimizer: Optimizer, by: Callable[..., list[Any]]) -> Any:
    restarts = torch_schedulers.CosineAnnealingWarmRestarts(optimizer, T_0=2)
    lambdas = torch_schedulers.LambdaLR(optimizer, by(Power(0.9), lambda step: 0.5**step))
    linear = torch_schedulers.LinearLR(optimizer, total_iters=3)
    return torch_schedulers.SequentialLR(optimizer, [linear, lambdas, restarts], milestones=[2, 4])


def _of_transformers(name: str, **options: Any) -> Make:
    def make(optimizer: Optimizer, by: Callable[..., list[Any]]) -> Any:
        from transformers import optimization

        given = {key: by(*value) if isinstance(value, tuple) else value for key, value in options.items()}
        return getattr(optimization, name)(optimizer, **given)

    return make


SCHEDULERS: dict[str, Make] = {
    "lambda": lambda optimizer, by: torch_schedulers.LambdaLR(optimizer, by(Power(0.9), Power(0.5))),
    "lambda-mixed": lambda optimizer, by: torch_schedulers.LambdaLR(optimizer, by(Power(0.9), lambda step: 0.5**step)),
    "multiplicative": lambda optimizer, by: torch_schedulers.MultiplicativeLR(optimizer, by(Power(0.9), Power(0.5))),
    "step": lambda optimizer, by: torch_schedulers.StepLR(optimizer, 2),
    "cosine": lambda optimizer, by: torch_schedulers.CosineAnnealingLR(optimizer, T_max=5),
    "warm-restarts": lambda optimizer, by: torch_schedulers.CosineAnnealingWarmRestarts(optimizer, T_0=3),
    "cyclic": lambda optimizer, by: torch_schedulers.CyclicLR(
        optimizer, by(0.1, 0.01), by(0.3, 0.02), 3, base_momentum=by(0.5, 0.6), max_momentum=by(0.8, 0.9)  # type: ignore[arg-type]
    ),
    "one-cycle": lambda optimizer, by: torch_schedulers.OneCycleLR(optimizer, by(0.3, 0.02), 20),
    "plateau": lambda optimizer, by: torch_schedulers.ReduceLROnPlateau(
        optimizer, patience=0, factor=0.5, min_lr=by(0.04, 0.001)
    ),
    "swa": lambda optimizer, by: SWALR(optimizer, by(0.05, 0.001), 6),  # type: ignore[arg-type]
    "chained": _chained,
    "sequential": _sequential,
    "hf-linear": _of_transformers("get_linear_schedule_with_warmup", num_warmup_steps=2, num_training_steps=20),
    "hf-greedy": _of_transformers(
        "get_greedy_schedule", patience=0, factor=0.5, min_lr=(0.04, 0.001), max_lr=(0.2, 0.02), smooth=True,
        window_size=2, reset_start=2,
    ),
}  # fmt: skip


def _saved(path: Path, run: Run, steps: int = 3) -> Run:
    run.train(steps)
    with CheckpointManager(path) as manager:
        manager.save(steps, run.state)
    return run


@pytest.mark.compat
@pytest.mark.parametrize("name", SCHEDULERS)
def test_rates_follow_their_groups_into_another_order(tmp_path: Path, name: str) -> None:
    first = _saved(tmp_path, Run("ab", SCHEDULERS[name]))
    second = Run("ba", SCHEDULERS[name])
    assert CheckpointManager(tmp_path).restore(second.state).differences == ()
    if hasattr(first.scheduler, "get_last_lr"):
        assert second.scheduler.get_last_lr() == first.scheduler.get_last_lr()[::-1]
    assert second.train(6) == first.train(6)


class Listing(LRScheduler):
    """A user's scheduler with an attribute of his own."""

    def __init__(self, optimizer: Optimizer, own: Any) -> None:
        self.own = own
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        return [base * 0.9**self.last_epoch for base in self.base_lrs]


def _listing(a: Any, b: Any, kind: Callable[[list[Any]], Any] = list) -> Make:
    return lambda optimizer, by: Listing(optimizer, kind(by(a, b)))


OWN: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "by-number": lambda values: dict(enumerate(values)),
    "tensor": torch.tensor,
    "column": lambda values: torch.tensor([values, values]),
    "array": np.array,
    "nested": lambda values: {"limits": [0, {"of": tuple(values)}, 1]},
    "callable": lambda values: {"curve": _power(values)},
}


def _power(values: list[Any]) -> Power:
    power = Power(0.5)
    power.base = list(values)  # type: ignore[assignment]
    return power


@pytest.mark.parametrize("kind", OWN)
def test_a_list_of_the_users_that_is_built_in_the_new_order_follows_it(tmp_path: Path, kind: str) -> None:
    first = _saved(tmp_path, Run("ab", _listing(3.0, 5.0, OWN[kind])))
    second = Run("ba", _listing(3.0, 5.0, OWN[kind]))
    CheckpointManager(tmp_path).restore(second.state)
    expected = dict(fingerprint.flatten(Run("ba", _listing(3.0, 5.0, OWN[kind])).scheduler.own, "own"))
    assert dict(fingerprint.flatten(second.scheduler.own, "own")) == expected
    assert second.train(2) == first.train(2)


@pytest.mark.parametrize("kind", OWN)
def test_a_list_of_the_users_that_may_be_the_groups_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    first = _saved(tmp_path, Run("ab", _listing(3.0, 5.0, OWN[kind])))
    second = Run(
        "ba", _listing(0.0, 0.0, OWN[kind])
    )  # it is made in training: the checkpoint's values are the only ones
    manager = CheckpointManager(tmp_path)
    with pytest.raises(
        StateDictMismatchError, match=r"'own[\w.]*' of 'scheduler' has 2 entries .* groups of 'optimizer'"
    ):
        manager.restore(second.state)
    assert second.optimizer.param_groups[0]["lr"] == 0.01
    assert "'own" in manager.restore(second.state, strict=False).differences[0]
    assert second.scheduler.last_epoch == 0
    same = Run("ab", _listing(0.0, 0.0, OWN[kind]))
    manager.restore(same.state)
    assert same.train(2) == first.train(2)


def test_entries_that_are_all_the_same_are_in_any_order(tmp_path: Path) -> None:
    first = _saved(tmp_path, Run("ab", _listing(3.0, 3.0)))
    second = Run("ba", _listing(0.0, 0.0))
    CheckpointManager(tmp_path).restore(second.state)
    assert second.scheduler.own == [3.0, 3.0] and second.train(2) == first.train(2)


def test_rates_of_groups_that_are_other_ones_now_are_not_given_by_position(tmp_path: Path) -> None:
    _saved(tmp_path, Run("ab", SCHEDULERS["cosine"]))
    second = Run("ab", SCHEDULERS["cosine"])
    groups = second.optimizer.param_groups
    groups[0]["params"].append(groups[1]["params"].pop())
    differences = CheckpointManager(tmp_path).restore(second.state, strict=False).differences
    assert len(differences) == 2 and "'base_lrs' of 'scheduler' has 2 entries" in differences[1]
    assert second.scheduler.last_epoch == 0


def test_rates_are_refused_where_the_optimizer_is_no_part_of_the_state(tmp_path: Path) -> None:
    def state(run: Run) -> TrainingState:
        return TrainingState(model=run.model, scheduler=run.scheduler)

    first = Run("ab", SCHEDULERS["cosine"])
    manager = CheckpointManager(tmp_path)
    manager.save(1, state(first))
    manager.restore(state(Run("ab", SCHEDULERS["cosine"])))
    with pytest.raises(StateDictMismatchError, match=r"'base_lrs' of 'scheduler' .* groups of its optimizer"):
        manager.restore(state(Run("ba", SCHEDULERS["cosine"])))


def test_a_scheduler_under_another_name_follows_its_optimizer_too(tmp_path: Path) -> None:
    make = SCHEDULERS["hf-greedy"]  # by its class it is no scheduler of torch's

    def built(names: str) -> tuple[Any, TrainingState]:
        run = Run(names)
        greedy = make(run.optimizer, run.in_order)
        return greedy, TrainingState(model=run.model, optimizer=run.optimizer, greedy=greedy)

    manager = CheckpointManager(tmp_path)
    manager.save(1, built("ab")[1])
    other, other_state = built("ba")
    manager.restore(other_state)
    assert (other.min_lrs, other.max_lrs, other._init_lrs) == ([0.001, 0.04], [0.02, 0.2], [0.01, 0.1])
    assert [group["lr"] for group in other.optimizer.param_groups] == [0.01, 0.1]


def test_schedulers_in_another_order_are_refused_by_name(tmp_path: Path) -> None:
    def chained(is_turned: bool) -> Make:
        def make(optimizer: Optimizer, by: Any) -> Any:
            parts = [torch_schedulers.StepLR(optimizer, 2), torch_schedulers.ExponentialLR(optimizer, 0.9)]
            return torch_schedulers.ChainedScheduler(parts[::-1] if is_turned else parts)

        return make

    _saved(tmp_path, Run("ab", chained(False)))
    with pytest.raises(StateDictMismatchError, match=r"'_schedulers' of 'scheduler' was .*'StepLR'.*'ExponentialLR'"):
        CheckpointManager(tmp_path).restore(Run("ab", chained(True)).state)


def test_a_function_is_not_given_the_attributes_of_a_callable(tmp_path: Path) -> None:
    _saved(tmp_path, Run("ab", SCHEDULERS["lambda-mixed"]))
    turned = Run("ab", lambda optimizer, by: torch_schedulers.LambdaLR(optimizer, by(lambda step: 0.5, Power(0.9))))
    with pytest.raises(StateDictMismatchError, match=r"'lr_lambdas\[0\]' of 'scheduler' was another callable"):
        CheckpointManager(tmp_path).restore(turned.state)


class Average:
    """A user's average of the weights, which keeps them by position."""

    def __init__(self, keep: Callable[[list[torch.Tensor]], Any], model: nn.Module) -> None:
        self.kept = keep([one.detach().clone() for one in model.parameters()])

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state["kept"]


KEPT: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "list": list,
    "by-number": lambda tensors: dict(enumerate(tensors)),
    "vector": lambda tensors: torch.cat([one.flatten() for one in tensors]),
    "as-optimizers-do": lambda tensors: {"state": {key: {"slot": one} for key, one in enumerate(tensors) if key != 1}},
}


@pytest.mark.parametrize("kind", KEPT)
def test_an_average_by_position_is_refused_where_parameters_stand_in_another_order(tmp_path: Path, kind: str) -> None:
    def state(names: str) -> TrainingState:
        model = nn.ModuleDict({name: nn.Linear(2, 1) for name in names})
        return TrainingState(model=model, average=Average(KEPT[kind], model), counter=Average(len, model))

    manager = CheckpointManager(tmp_path)
    manager.save(1, state("ab"))
    manager.restore(state("ab"))
    with pytest.raises(StateDictMismatchError, match=r"'kept[.\w]*' of 'average' has entries by parameter position"):
        manager.restore(state("ba"))
    differences = manager.restore(state("ba"), strict=False).differences
    assert len(differences) == 1 and "'average'" in differences[0]
