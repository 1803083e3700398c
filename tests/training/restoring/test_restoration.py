"""A checkpoint of another run: an error that names what differs and says what to do, and nothing is changed by it."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from hfshard.errors import StateDictMismatchError
from hfshard.training import CheckpointManager, ResumableDataLoader, TrainingState
from tests.training import fingerprint, ingredients
from tests.training.resume import companions

STEP = 2


class Run:
    """The parts of a run by name, each of which a test may build in another way."""

    def __init__(self, seed: int, **changes: Callable[..., Any]) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        make: dict[str, Any] = {"model": ingredients.mlp, "optimizer": _adamw, "scheduler": _step_lr, "loader": _loader}
        make |= changes
        self.model: nn.Module = make["model"]()
        self.optimizer: Optimizer = make["optimizer"](self.model)
        self.scheduler = make["scheduler"](self.optimizer)
        self.members: dict[str, Any] = {
            "model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler,
            "loader": make["loader"](), "ema": companions.ema(self.model)["ema"],
            "first": Counter(), "second": Counter(),
        }  # fmt: skip
        for name in changes.keys() - {"model", "optimizer", "scheduler", "loader"}:
            self.members[name] = changes[name]()
        self.members = {name: one for name, one in self.members.items() if one is not None}
        self.state = TrainingState(**self.members)

    def train(self) -> None:
        for batch, _ in zip(self.members["loader"], range(STEP)):
            self.optimizer.zero_grad()
            ingredients.squared_error(self.model, batch).backward()
            self.optimizer.step()
            self.scheduler.step()
            self.members["ema"].update_parameters(self.model)
            self.members["first"].count += 1
            self.members["second"].count += 2

    def everything(self, *without: str) -> dict[str, str]:
        """All that a restore could change."""
        found = dict(fingerprint.of_rngs()) if "rng" not in without else {}
        if "optimizer" not in without:
            found |= fingerprint.of_optimizer(self.optimizer, self.model, "optimizer")
        for name, one in self.members.items():
            if name not in ("optimizer", *without):
                found |= fingerprint.flatten(one.state_dict(), name)
        return found


class Counter:
    """A user's object."""

    def __init__(self, refuses: bool = False) -> None:
        self.count, self.refuses = 0, refuses

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.refuses and state["count"]:
            raise RuntimeError("not with me")
        self.count = state["count"]


def _adamw(model: nn.Module) -> Optimizer:
    first: Any = model.get_submodule("first")
    last: Any = model.get_submodule("last")
    return torch.optim.AdamW([{"params": first.parameters()}, {"params": last.parameters(), "lr": 0.01}])


def _step_lr(optimizer: Optimizer) -> Any:
    return lr_scheduler.StepLR(optimizer, 2)


def _loader(**options: Any) -> ResumableDataLoader[ingredients.Pair]:
    return ResumableDataLoader(ingredients.Points(), **{"batch_size": 2, "shuffle": True, "seed": 3, **options})


def _wider() -> nn.Module:
    model = ingredients.mlp()
    model.register_module("first", nn.Linear(4, 9))
    model.register_module("last", nn.Linear(9, 1))
    return model


def _deeper() -> nn.Module:
    model = ingredients.mlp()
    model.register_module("extra", nn.Linear(1, 1))
    return model


def _shallower() -> nn.Module:
    model = ingredients.mlp()
    model.register_module("last", nn.Linear(8, 1, bias=False))
    return model


def _one_group(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters())


def _without_head(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.get_submodule("first").parameters())


def _moved(model: nn.Module) -> Optimizer:
    first: Any = model.get_submodule("first")
    last: Any = model.get_submodule("last")
    rest: dict[str, Any] = {"params": [first.bias, *last.parameters()], "lr": 0.01}
    return torch.optim.AdamW([{"params": [first.weight]}, rest])


def _three(model: nn.Module) -> Optimizer:
    first: Any = model.get_submodule("first")
    last: Any = model.get_submodule("last")
    groups: list[dict[str, Any]] = [{"params": [one]} for one in (first.weight, first.bias)]
    return torch.optim.AdamW([*groups, {"params": last.parameters()}])


@dataclass(frozen=True, slots=True)
class Other:
    """How the run that restores differs from the one that was saved."""

    changes: dict[str, Callable[..., Any]]
    words: tuple[str, ...]
    """In the message."""
    unfit: tuple[str, ...]
    """The parts that strict=False leaves as they were built."""


OTHERS = {
    "wider-model": Other(
        {"model": _wider}, ("'model'", "first.weight", "[8, 4]", "[9, 4]"), ("model", "optimizer", "ema")
    ),
    "model-with-more": Other({"model": _deeper}, ("'model'", "extra.weight", "extra.bias"), ("model", "ema")),
    "model-with-less": Other({"model": _shallower}, ("'model'", "last.bias"), ("model", "optimizer", "ema")),
    "other-dtype": Other(
        {"model": ingredients.mlp_bf16},
        ("'model'", "first.weight", "float32", "bfloat16"),
        ("model", "optimizer", "ema"),
    ),
    "one-group": Other({"optimizer": _one_group}, ("'optimizer'", "had 2 groups", "has 1"), ("optimizer", "scheduler")),
    "three-groups": Other({"optimizer": _three}, ("'optimizer'", "had 2 groups", "has 3"), ("optimizer", "scheduler")),
    "missing-group": Other(
        {"optimizer": _without_head}, ("'optimizer'", "had 2 groups", "last.weight"), ("optimizer", "scheduler")
    ),
    "moved-parameter": Other(
        {"optimizer": _moved}, ("'optimizer'", "'first.bias' was in another group"), ("optimizer", "scheduler")
    ),
    "other-optimizer": Other(
        {"optimizer": lambda model: torch.optim.SGD(_adamw(model).param_groups, lr=0.1)},
        ("'optimizer'", "SGD", "AdamW"), ("optimizer",),
    ),
    "other-scheduler": Other(
        {"scheduler": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9)},
        ("'scheduler'", "StepLR", "ExponentialLR"), ("scheduler",),
    ),
    "other-batch-size": Other(
        {"loader": lambda: _loader(batch_size=3)}, ("'loader'", "batch_size 2", "has 3"), ("loader",)
    ),
    "other-seed": Other({"loader": lambda: _loader(seed=4)}, ("'loader'", "seed 3", "has 4"), ("loader",)),
    "other-length": Other(
        {"loader": lambda: ResumableDataLoader(ingredients.Points(11), batch_size=2, shuffle=True, seed=3)},
        ("'loader'", "length of the dataset 10", "has 11"), ("loader",),
    ),
    "missing-in-the-checkpoint": Other({"third": Counter}, ("has no 'third'",), ("third",)),
    "missing-in-the-state": Other({"second": lambda: None}, ("'second'", "second=..."), ()),
    "another-kind": Other({"second": lambda: nn.Linear(2, 2)}, ("'second'",), ("second",)),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A checkpoint, and the numbers that are in it."""
    root = tmp_path_factory.mktemp("run")
    run = Run(1)
    run.train()
    with CheckpointManager(root) as manager:
        manager.save(STEP, run.state)
    return root, run.everything()


Saved = tuple[Path, dict[str, str]]


def test_a_run_that_is_the_same_is_restored(saved: Saved) -> None:
    run = Run(2)
    assert CheckpointManager(saved[0]).restore(run.state) == STEP
    assert run.everything() == saved[1]


@pytest.mark.parametrize("name", OTHERS)
def test_another_run_is_refused_by_name_and_left_as_it_was(name: str, saved: Saved) -> None:
    other = OTHERS[name]
    run = Run(2, **other.changes)
    before = run.everything()
    with pytest.raises(StateDictMismatchError) as caught:
        CheckpointManager(saved[0]).restore(run.state)
    message = str(caught.value)
    missing = [word for word in (*other.words, "checkpoint-00000002") if word not in message]
    assert not missing, message
    assert "Build" in message or "Pass" in message or "pass" in message, message
    assert run.everything() == before


@pytest.mark.parametrize("name", OTHERS)
def test_not_strict_restores_what_fits_and_reports_the_rest(
    name: str, saved: Saved, caplog: pytest.LogCaptureFixture
) -> None:
    other = OTHERS[name]
    run = Run(2, **other.changes)
    with caplog.at_level(logging.WARNING, "hfshard"):
        restored = CheckpointManager(saved[0]).restore(run.state, strict=False)
    assert restored == STEP
    said = " ".join(restored.differences)
    assert not [word for word in other.words if word not in said], said
    warned = " ".join(record.getMessage() for record in caplog.records)
    assert not [word for word in other.words if word not in warned], warned
    kept = run.everything(*other.unfit)
    expected = {path: text for path, text in saved[1].items() if path in kept}
    assert kept == expected and len(expected) > len(dict(fingerprint.of_rngs()))


def test_not_strict_without_a_difference_reports_none(saved: Saved) -> None:
    assert CheckpointManager(saved[0]).restore(Run(2).state, strict=False).differences == ()


def test_not_strict_loads_the_weights_that_fit_beside_those_that_do_not(saved: Saved) -> None:
    run, same = Run(2, model=_shallower), Run(3)
    manager = CheckpointManager(saved[0])
    manager.restore(same.state)
    manager.restore(run.state, strict=False)
    for name in ("first.weight", "first.bias", "last.weight"):
        assert torch.equal(run.model.get_parameter(name), same.model.get_parameter(name))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", ["first", "second", "loader"])
def test_an_object_that_refuses_its_state_leaves_all_as_it_was(name: str, strict: bool, saved: Saved) -> None:
    refusing = {name: lambda: Counter(refuses=True)}
    run = Run(2, **refusing)
    if name == "loader":
        run = Run(2)
        run.members["loader"].load_state_dict = Counter(refuses=True).load_state_dict
    before = run.everything()
    with pytest.raises((StateDictMismatchError, RuntimeError, KeyError), match=f"'{name}'"):
        CheckpointManager(saved[0]).restore(run.state, strict=strict)
    assert run.everything() == before


def test_gradients_of_before_are_dropped_by_a_restore(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, TrainingState(model=model))
        (model(torch.ones(1, 2)).sum() * float("nan")).backward()
        manager.restore_latest(TrainingState(model=model))
    assert model.weight.grad is None


def test_a_scaler_that_was_on_is_refused_where_it_is_off(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, TrainingState(scaler=torch.amp.GradScaler("cpu")))
        with pytest.raises(StateDictMismatchError, match="'scaler' is a GradScaler that is off"):
            manager.restore_latest(TrainingState(scaler=torch.amp.GradScaler("cpu", enabled=False)))
