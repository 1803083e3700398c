"""Programs that save with torch.save, each in its own way, and resume by each part's own load_state_dict."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop, lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hfshard.errors import StateDictMismatchError
from hfshard.training import CheckpointManager, TrainingState
from tests.training.fingerprint import flatten


class WithItsOwnMethod(lr_scheduler.CyclicLR):
    """Scales by a method of its own, which its state holds."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.fn = self.halved
        super().__init__(optimizer, 0.01, 0.1, step_size_up=3, mode="triangular")

    def halved(self, cycle: float) -> float:
        return float(0.5**cycle)


@dataclass
class Parts:
    """The parts of a run."""

    model: Any
    optimizer: Any
    scheduler: Any = None
    scaler: Any = None
    ema: Any = None

    @property
    def named(self) -> dict[str, Any]:
        return {name: part for name, part in vars(self).items() if part is not None}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def adamw(model: nn.Module) -> Parts:
    return Parts(model, AdamW(model.parameters(), lr=0.05))


def with_sgd(schedule: Callable[[Optimizer], Any], lr: float = 0.01) -> Callable[[nn.Module], Parts]:
    def build(model: nn.Module) -> Parts:
        optimizer = SGD(model.parameters(), lr=lr, momentum=0.9)
        return Parts(model, optimizer, schedule(optimizer))

    return build


stepped = with_sgd(lambda optimizer: lr_scheduler.StepLR(optimizer, 2), lr=0.1)
one_cycle = with_sgd(lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20))
cyclic = with_sgd(lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3, mode="exp_range"))


def two_groups(model: nn.Module) -> Parts:
    decayed = [one for one in model.parameters() if one.ndim > 1]
    others = [one for one in model.parameters() if one.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = AdamW(groups, lr=0.05)
    return Parts(model, optimizer, lr_scheduler.CosineAnnealingLR(optimizer, 20))


def named_groups(model: nn.Module) -> Parts:
    return Parts(model, Adam(model.named_parameters(), lr=0.05, amsgrad=True))


def plateau(model: nn.Module) -> Parts:
    optimizer = RMSprop(model.parameters(), lr=0.01)
    return Parts(model, optimizer, lr_scheduler.ReduceLROnPlateau(optimizer, patience=0))


def warm_up(model: nn.Module) -> Parts:
    optimizer = Adagrad(model.parameters(), lr=0.1)
    rising = lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 4)
    falling = lr_scheduler.ExponentialLR(optimizer, 0.9)
    return Parts(model, optimizer, lr_scheduler.SequentialLR(optimizer, [rising, falling], [2]))


def scaled(model: nn.Module) -> Parts:
    return replace(adamw(model), scaler=torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2))


def averaged(model: nn.Module) -> Parts:
    return replace(stepped(model), ema=AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)))


def train(parts: Parts, first: int, last: int) -> None:
    """Steps whose batches depend on their number alone."""
    for number in range(first, last):
        x = torch.linspace(-1, 1, 24).reshape(6, 4).roll(number, 0) * (number + 1)
        loss = parts.model(x).square().mean()
        parts.optimizer.zero_grad()
        if parts.scaler is None:
            loss.backward()
            parts.optimizer.step()
        else:
            parts.scaler.scale(loss).backward()
            parts.scaler.step(parts.optimizer)
            parts.scaler.update()
        if isinstance(parts.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            parts.scheduler.step(loss.item())
        elif parts.scheduler is not None:
            parts.scheduler.step()
        if parts.ema is not None:
            parts.ema.update_parameters(parts.model)


def save_of(parts: Parts, **keys: str) -> dict[str, Any]:
    """The state of each part under a key."""
    return {key: parts.named[name].state_dict() for name, key in keys.items()}


def old(tmp_path: pathlib.Path, model: nn.Module, optimizer: Optimizer, **more: Any) -> str:
    """Save a model, its optimizer and more under their names, and return the file."""
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more}, tmp_path / "old.pt")
    return str(tmp_path / "old.pt")


Save = Callable[[Parts], Any]
Load = Callable[[Parts, Any], None]


@dataclass
class Program:
    """How a program saves a run, and resumes it."""

    build: Callable[[nn.Module], Parts]
    save: Save
    load: Load
    step: int = 0
    """What the restored step is."""
    lacks: tuple[str, ...] = ("the random number generators",)
    differs: tuple[str, ...] = ()
    """What is left out, with strict=False; without any, strict restores the file."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of torch.save."""
    keys: dict[str, str] | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    """Some of what is left over."""


def under(more: dict[str, Any] | None = None, prefix: str = "", **keys: str) -> tuple[Save, Load]:
    """Save each part under a key, the weights with a wrapper's prefix, and more beside them."""

    def save(parts: Parts) -> Any:
        states = save_of(parts, **keys)
        states[keys["model"]] = {f"{prefix}{name}": one for name, one in states[keys["model"]].items()}
        return {**states, **(more or {})}

    def load(parts: Parts, value: Any) -> None:
        weights = value[keys["model"]]
        value[keys["model"]] = {name.removeprefix(prefix): one for name, one in weights.items()}
        for name, key in keys.items():
            parts.named[name].load_state_dict(value[key])

    return save, load


def save_for_lightning(parts: Parts) -> Any:
    return {
        "epoch": 1,
        "global_step": 4,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": parts.model.state_dict(),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 1}}}},
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_path": "a.ckpt"}},
        "optimizer_states": [parts.optimizer.state_dict()],
        "lr_schedulers": [parts.scheduler.state_dict()],
        "hparams_name": "kwargs",
        "hyper_parameters": {"lr": 0.1, "folder": pathlib.PurePosixPath("runs/one")},
    }


def load_of_lightning(parts: Parts, value: Any) -> None:
    parts.model.load_state_dict(value["state_dict"])
    parts.optimizer.load_state_dict(value["optimizer_states"][0])
    parts.scheduler.load_state_dict(value["lr_schedulers"][0])


def save_nested(parts: Parts) -> Any:
    return {"model": {"state_dict": parts.model.state_dict()}, "optim": parts.optimizer.state_dict(), "iteration": 7}


def load_nested(parts: Parts, value: Any) -> None:
    parts.model.load_state_dict(value["model"]["state_dict"])
    parts.optimizer.load_state_dict(value["optim"])


def load_all_but_the_method(parts: Parts, value: Any) -> None:
    value["scheduler"].pop("fn")
    for name, part in parts.named.items():
        part.load_state_dict(value[name])


_NO_STEP = "the number of steps (0 is taken)"
_EPOCH = "the number of steps (that of the epoch, "

UNDER_THEIR_NAMES = under(model="model", optimizer="optimizer", scheduler="scheduler")
PROGRAMS = {
    "the tutorial's": Program(
        adamw,
        *under({"epoch": 5, "loss": 0.25}, model="model_state_dict", optimizer="optimizer_state_dict"),
        step=5, lacks=(_EPOCH,), extra={"epoch": 5, "loss": 0.25},
    ),
    "imagenet's, from DataParallel": Program(
        stepped,
        *under(
            {"epoch": 2, "arch": "resnet", "best_acc1": torch.tensor(51.5)}, "module.",
            model="state_dict", optimizer="optimizer", scheduler="scheduler",
        ),
        step=2, extra={"arch": "resnet", "best_acc1": torch.tensor(51.5)},
    ),
    "torchvision's, with arguments": Program(
        two_groups,
        *under(
            {"epoch": 2, "args": argparse.Namespace(lr=0.1, output_dir=pathlib.PurePosixPath("out/a"))},
            model="model", optimizer="optimizer", scheduler="lr_scheduler",
        ),
        step=2, extra={"args": {"lr": 0.1, "output_dir": "out/a"}},
    ),
    "timm's, with an average": Program(
        averaged,
        *under(
            {"arch": "net", "version": 2, "epoch": 1, "metric": np.float64(0.5)},
            model="state_dict", optimizer="optimizer", scheduler="lr_sched", ema="state_dict_ema",
        ),
        step=1, extra={"metric": np.float64(0.5)},
    ),
    "compiled": Program(
        adamw, *under({"step": 40, "epoch": 1}, "_orig_mod.", model="model", optimizer="optimizer"), step=40
    ),
    "compiled in DistributedDataParallel": Program(
        stepped,
        *under({"iter": 12}, "module._orig_mod.", model="model", optimizer="optimizer", scheduler="sched"),
        step=12,
    ),
    "net and opt": Program(adamw, *under(model="net", optimizer="opt"), lacks=(_NO_STEP,)),
    "network": Program(adamw, *under({"steps": 3}, model="network", optimizer="optimizer_state"), step=3),
    "module": Program(adamw, *under({"global_step": torch.tensor(6)}, model="module", optimizer="optim"), step=6),
    "nested, of iterations": Program(adamw, save_nested, load_nested, step=7),
    "Lightning's": Program(
        stepped, save_for_lightning, load_of_lightning, step=4, extra={"hparams_name": "kwargs"},
    ),
    "a scaler": Program(
        scaled, *under({"step": 4}, model="model", optimizer="optimizer", scaler="scaler"), step=4
    ),
    "names in the groups": Program(named_groups, *under(model="model", optimizer="optimizer")),
    "OneCycleLR": Program(one_cycle, *UNDER_THEIR_NAMES),
    "CyclicLR": Program(cyclic, *UNDER_THEIR_NAMES),
    "ReduceLROnPlateau": Program(plateau, *UNDER_THEIR_NAMES),
    "SequentialLR": Program(warm_up, *UNDER_THEIR_NAMES),
    "older than zip files": Program(
        stepped,
        *under({"epoch": 1}, model="state_dict", optimizer="optimizer", scheduler="scheduler"),
        step=1, options={"_use_new_zipfile_serialization": False},
    ),
    "keys of its own": Program(
        adamw, *under(model="generator.g", optimizer="trainer"), keys={"model": "generator.g", "optimizer": "trainer"}
    ),
    "a scheduler with its own method": Program(
        with_sgd(WithItsOwnMethod),
        UNDER_THEIR_NAMES[0],
        load_all_but_the_method,
        differs=("'scheduler.fn' in",),
    ),
}  # fmt: skip


def built(program: Program, seed: int) -> Parts:
    torch.manual_seed(seed)
    return program.build(net())


def result(parts: Parts) -> dict[str, Any]:
    """All weights, buffers and optimizer states, and the learning rates."""
    return dict(flatten({name: part.state_dict() for name, part in parts.named.items() if name != "scheduler"}, ""))


def refused(manager: CheckpointManager, state: TrainingState, path: str, match: str, **options: Any) -> None:
    """Restore what does not fit, and compare the state with what it was before."""
    before = {name: repr(part.state_dict()) for name, part in state.components.items() if name != "loader"}
    with pytest.raises(StateDictMismatchError, match=match) as caught:
        manager.restore(state, path, **options)
    assert before == {name: repr(part.state_dict()) for name, part in state.components.items() if name != "loader"}
    assert caught.value.path == path
