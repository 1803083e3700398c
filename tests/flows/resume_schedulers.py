"""Every scheduler of torch and transformers, and those that users write: name -> how it is made."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from torch.optim import Optimizer, lr_scheduler, swa_utils
from torch.optim.lr_scheduler import LRScheduler

TOTAL = 24
"""Steps: more than a test takes."""


def tenth(step: int) -> float:
    return 1 / (1 + 0.1 * step)


def grown(step: int) -> float:
    return 1.05 - 0.01 * step


class Counting:
    """A callable with a state of its own: what it answers depends on how often it was asked."""

    def __init__(self) -> None:
        self.calls = 0
        self.answers: dict[int, float] = {}

    def __call__(self, step: float) -> float:
        self.calls += 1
        self.answers = {self.calls % 2: 0.97**self.calls}
        return self.answers[self.calls % 2]


class Watching:
    """A callable that holds the optimizer, and looks into its state; the pickle of one holds both."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 1 / (1 + len(self.optimizer.state) + 0.1 * self.calls)


class Cyclic:
    """An object one of whose methods is the scale of a CyclicLR."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def scale(self, x: float) -> float:
        return math.exp(-self.rate * x)


class OwnScheduler(LRScheduler):
    """A user's: which of its methods it uses stands in an attribute, as a bound method."""

    def __init__(self, optimizer: Optimizer, total: int) -> None:
        self.total = total
        self.fn = self._cos
        self.history: list[float] = []
        super().__init__(optimizer)

    def _cos(self, step: int) -> float:
        return 0.5 * (1 + math.cos(math.pi * step / self.total))

    def get_lr(self) -> list[Any]:
        self.history = [*self.history[-4:], self.fn(self.last_epoch)]
        return [base * self.fn(self.last_epoch) for base in self.base_lrs]


class Crowded(LRScheduler):
    """A user's, with whatever may lie in an attribute: objects with state, in lists too, functions, itself."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.curve = Counting()
        self.curves: list[Any] = [Counting(), Cyclic(0.1)]
        self.by_name: dict[str, Any] = {
            "tenth": tenth,
            "scale": Cyclic(0.2).scale,
            "lambda": lambda x: x,
            "partial": partial(tenth, 3),
        }
        self.recent: deque[float] = deque(maxlen=2)
        self.array = np.ones(3)
        self.watched, self.myself = optimizer, self
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        factor = self.curve(1) * self.curves[0](1) * self.by_name["tenth"](self.last_epoch)
        self.curves[1].rate += 0.1
        self.recent.append(factor * self.by_name["scale"](self.curves[1].rate))
        self.array *= 0.99
        return [base * sum(self.recent) * float(self.array[0]) for base in self.base_lrs]


class PlainScheduler:
    """A user's that inherits from nothing, and keeps the optimizer's own groups in its state."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.count = 0
        self.worst = -math.inf
        self.bounds = {0: (0.1, 0.2), 1: (math.inf, 3)}

    def step(self) -> None:
        self.count += 1
        self.worst = max(self.worst, *(group["lr"] for group in self.optimizer.param_groups))
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * 0.93

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "worst": self.worst, "bounds": self.bounds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count, self.worst, self.bounds = state["count"], state["worst"], state["bounds"]


def _lambdas(optimizer: Optimizer, make: Callable[[], Any]) -> LRScheduler:
    return lr_scheduler.LambdaLR(optimizer, [make() for _ in optimizer.param_groups])


def _in_turn(milestones: list[int], *parts: Callable[[Optimizer], Any]) -> Callable[[Optimizer], Any]:
    return lambda optimizer: lr_scheduler.SequentialLR(optimizer, [part(optimizer) for part in parts], milestones)


def _chained(optimizer: Optimizer) -> Any:
    first = lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=4)
    second = lr_scheduler.MultiStepLR(optimizer, [3, 6, 6, 9])
    return lr_scheduler.ChainedScheduler([first, second, lr_scheduler.LambdaLR(optimizer, Counting())])


def _one_cycle(**options: Any) -> Callable[[Optimizer], LRScheduler]:
    return partial(lr_scheduler.OneCycleLR, max_lr=[0.05, 0.02], total_steps=TOTAL, **options)


def _cyclic(**options: Any) -> Callable[[Optimizer], LRScheduler]:
    return partial(lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.05, step_size_up=2, step_size_down=3, **options)


def of_transformers(name: str, **options: Any) -> Callable[[Optimizer], Any]:
    def make(optimizer: Optimizer) -> Any:
        from transformers import optimization

        return getattr(optimization, name)(optimizer, **options)

    return make


@dataclass(frozen=True, slots=True)
class Kind:
    """How a scheduler is made, and what its step takes."""

    make: Callable[[Optimizer], Any]
    takes_loss: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    """More for the case."""


def _hf(name: str, takes_loss: bool = False, **options: Any) -> Kind:
    return Kind(of_transformers(f"get_{name}", **options), takes_loss)


_WARM: dict[str, Any] = {"num_warmup_steps": 3}
_WARM_TOTAL: dict[str, Any] = {"num_warmup_steps": 3, "num_training_steps": TOTAL}

TORCH: dict[str, Kind] = {
    "lambda-function": Kind(partial(lr_scheduler.LambdaLR, lr_lambda=tenth)),
    "lambda-lambda": Kind(partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.9**step)),
    "lambda-mixed-list": Kind(lambda optimizer: lr_scheduler.LambdaLR(optimizer, [Counting(), tenth])),
    "lambda-callable": Kind(partial(_lambdas, make=Counting)),
    "lambda-bound-method": Kind(partial(_lambdas, make=lambda: Cyclic(0.1).scale)),
    "lambda-holds-optimizer": Kind(lambda optimizer: lr_scheduler.LambdaLR(optimizer, Watching(optimizer))),
    "multiplicative": Kind(partial(lr_scheduler.MultiplicativeLR, lr_lambda=grown)),
    "multiplicative-callable": Kind(lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, [Counting(), grown])),
    "step": Kind(partial(lr_scheduler.StepLR, step_size=3)),
    "multi-step": Kind(partial(lr_scheduler.MultiStepLR, milestones=[2, 5, 5, 8])),
    "constant": Kind(partial(lr_scheduler.ConstantLR, total_iters=5)),
    "linear": Kind(partial(lr_scheduler.LinearLR, total_iters=9)),
    "exponential": Kind(partial(lr_scheduler.ExponentialLR, gamma=0.9)),
    "polynomial": Kind(partial(lr_scheduler.PolynomialLR, total_iters=14, power=2.0)),
    "cosine": Kind(partial(lr_scheduler.CosineAnnealingLR, T_max=5, eta_min=1e-4)),
    "cosine-warm-restarts": Kind(partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=3, T_mult=2)),
    "cyclic-triangular": Kind(_cyclic(mode="triangular")),
    "cyclic-triangular2": Kind(_cyclic(mode="triangular2")),
    "cyclic-exp-range": Kind(_cyclic(mode="exp_range", gamma=0.95)),
    "cyclic-function": Kind(_cyclic(scale_fn=tenth)),
    "cyclic-lambda": Kind(_cyclic(scale_fn=lambda x: 0.8**x, scale_mode="iterations")),
    "cyclic-bound-method": Kind(_cyclic(scale_fn=Cyclic(0.3).scale)),
    "cyclic-callable": Kind(lambda optimizer: _cyclic(scale_fn=Counting())(optimizer)),
    "one-cycle-cos": Kind(_one_cycle()),
    "one-cycle-linear": Kind(_one_cycle(anneal_strategy="linear")),
    "one-cycle-three-phases": Kind(_one_cycle(three_phase=True)),
    "one-cycle-linear-three-phases": Kind(_one_cycle(anneal_strategy="linear", three_phase=True, cycle_momentum=False)),
    "plateau": Kind(partial(lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.7), True),
    "plateau-max": Kind(
        partial(lr_scheduler.ReduceLROnPlateau, mode="max", patience=1, cooldown=1, min_lr=[1e-3, 1e-4]), True
    ),
    "sequential": Kind(
        _in_turn(
            [3, 7],
            partial(lr_scheduler.LinearLR, total_iters=3),
            partial(lr_scheduler.CosineAnnealingLR, T_max=4),
            partial(lr_scheduler.ExponentialLR, gamma=0.9),
        )
    ),
    "sequential-stateful": Kind(
        _in_turn(
            [4, 8],
            lambda optimizer: lr_scheduler.LambdaLR(optimizer, [Counting(), Watching(optimizer)]),
            partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=2),
            partial(OwnScheduler, total=TOTAL),
        )
    ),
    "chained": Kind(_chained),
    "swa": Kind(partial(swa_utils.SWALR, swa_lr=0.05, anneal_epochs=6)),
    "swa-linear": Kind(lambda optimizer: swa_utils.SWALR(optimizer, [0.05, 0.01], 6, "linear")),  # type: ignore[arg-type]
}

USERS: dict[str, Kind] = {
    "own-bound-method": Kind(partial(OwnScheduler, total=TOTAL)),
    "own-crowded": Kind(Crowded),
    "own-without-base": Kind(PlainScheduler),
}


TRANSFORMERS: dict[str, Kind] = {
    "hf-constant": _hf("constant_schedule"),
    "hf-constant-warmup": _hf("constant_schedule_with_warmup", **_WARM),
    "hf-linear": Kind(of_transformers("get_linear_schedule_with_warmup", **_WARM_TOTAL), options={"compat": True}),
    "hf-cosine": _hf("cosine_schedule_with_warmup", **_WARM_TOTAL),
    "hf-cosine-restarts": _hf("cosine_with_hard_restarts_schedule_with_warmup", num_cycles=3, **_WARM_TOTAL),
    "hf-polynomial": _hf("polynomial_decay_schedule_with_warmup", power=2.0, **_WARM_TOTAL),
    "hf-inverse-sqrt": _hf("inverse_sqrt_schedule", **_WARM),
    "hf-cosine-min-lr": _hf("cosine_with_min_lr_schedule_with_warmup", min_lr=1e-4, **_WARM_TOTAL),
    "hf-cosine-min-lr-rate": _hf("cosine_with_min_lr_schedule_with_warmup_lr_rate", min_lr_rate=0.1, **_WARM_TOTAL),
    "hf-wsd": _hf("wsd_schedule", num_decay_steps=6, num_stable_steps=4, **_WARM),
    "hf-wsd-1-sqrt": _hf("wsd_schedule", num_decay_steps=6, num_stable_steps=4, decay_type="1-sqrt", **_WARM),
    "hf-plateau": _hf("reduce_on_plateau_schedule", True, patience=1),
    "hf-greedy": _hf("greedy_schedule", True, patience=1, factor=0.9, smooth=True, window_size=3, reset_start=2),
}

ALL: dict[str, Kind] = TORCH | USERS | TRANSFORMERS
