#!/usr/bin/env python3
"""Save and load a run ten times with schedulers that hold bound methods, and print the bytes: hfshard's and torch's."""

from __future__ import annotations

import io
import math
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, LRScheduler

from hfshard.training import CheckpointManager, TrainingState

CYCLES = 10
STEPS_PER_CYCLE = 5
WIDTH = 64
MOMENTUM_BYTES = 4 * (WIDTH * WIDTH + WIDTH + WIDTH + 1)
"""Of float32, one number for each parameter."""


class Halving:
    """Scales a CyclicLR: each cycle half of the one before, never below a floor. CyclicLR holds its bound method."""

    def __init__(self, floor: float) -> None:
        self.floor = floor

    def scale(self, cycle: float) -> float:
        """The factor of a cycle."""
        return max(self.floor, float(0.5 ** (cycle - 1)))


class Cosine(LRScheduler):
    """A scheduler as people write them: it holds its own method, and by it itself, its optimizer and its momentum."""

    def __init__(self, optimizer: torch.optim.Optimizer, period: int) -> None:
        self.period = period
        self.fn = self._cos
        super().__init__(optimizer)

    def _cos(self, step: int) -> float:
        return 0.5 * (1 + math.cos(math.pi * step / self.period))

    def get_lr(self) -> list[float | torch.Tensor]:
        """The learning rate of each group, as torch's schedulers give it."""
        return [base * self.fn(self.last_epoch) for base in self.base_lrs]


class Decay:
    """A callable for LambdaLR that holds the optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __call__(self, step: int) -> float:
        """The factor of a step."""
        return float(0.9**step)


Build = Callable[[torch.optim.Optimizer], LRScheduler]


def cyclic(**arguments: Any) -> Build:
    """A CyclicLR of 8 steps a cycle, for an optimizer to come."""
    return lambda optimizer: CyclicLR(optimizer, 0.001, 0.1, step_size_up=4, **arguments)


SCHEDULERS: dict[str, Build] = {
    "triangular": cyclic(mode="triangular"),
    "triangular2": cyclic(mode="triangular2"),
    "exp_range": cyclic(mode="exp_range", gamma=0.99),
    "scale_fn=method": cyclic(scale_fn=Halving(floor=0.1).scale),
    "self.fn=self._cos": lambda optimizer: Cosine(optimizer, period=40),
    "LambdaLR(object)": lambda optimizer: LambdaLR(optimizer, Decay(optimizer)),
}


def new_run(build: Build) -> tuple[nn.Module, torch.optim.Optimizer, LRScheduler]:
    """A model, its optimizer and its scheduler, as a new process would build them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, build(optimizer)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: LRScheduler) -> None:
    """A few steps, so that there is momentum, and a rate that has moved."""
    for _ in range(STEPS_PER_CYCLE):
        optimizer.zero_grad()
        model(torch.randn(8, WIDTH)).square().mean().backward()
        optimizer.step()
        scheduler.step()


def sizes_with_hfshard(build: Build, run: Path) -> list[int]:
    """Bytes of the checkpoint's directory after each cycle: build, restore, train, save."""
    sizes = []
    for cycle in range(CYCLES):
        model, optimizer, scheduler = new_run(build)
        state = TrainingState(model=model, optimizer=optimizer, scheduler=scheduler)
        with CheckpointManager(run, max_to_keep=1) as manager:
            manager.restore_latest(state)
            train(model, optimizer, scheduler)
            checkpoint = Path(manager.save((cycle + 1) * STEPS_PER_CYCLE, state))
        sizes.append(sum(file.stat().st_size for file in checkpoint.iterdir()))
    return sizes


def sizes_with_torch_save(build: Build) -> tuple[list[int], bool]:
    """Bytes of torch.save(scheduler.state_dict()) after each such cycle, and whether weights_only=True reads it."""
    sizes: list[int] = []
    saved: list[bytes] = []
    for _ in range(CYCLES):
        parts: tuple[Any, ...] = new_run(build)
        for part, content in zip(parts, saved):
            part.load_state_dict(torch.load(io.BytesIO(content), weights_only=False))
        train(*parts)
        saved = [saved_bytes(part.state_dict()) for part in parts]
        sizes.append(len(saved[-1]))
    try:
        torch.load(io.BytesIO(saved[-1]), weights_only=True)
    except pickle.UnpicklingError:
        return sizes, False
    return sizes, True


def saved_bytes(value: Any) -> bytes:
    """What torch.save writes."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def print_table(columns: dict[str, list[int]]) -> None:
    """Print the sizes, a line for each save."""
    widths = {name: max(len(name), 9) for name in columns}
    print("save  " + "  ".join(name.rjust(width) for name, width in widths.items()))
    for cycle in range(CYCLES):
        print(f"{cycle + 1:>4}  " + "  ".join(f"{columns[name][cycle]:>{width},}" for name, width in widths.items()))
    print()


def main() -> int:
    """Print both tables; 0 if no checkpoint of hfshard's ever changed its size, else 1."""
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}. A run is built, loaded, trained and saved {CYCLES} times.")
    print("Bytes of each save: CyclicLR in four ways, then two schedulers as users write them.\n")
    with tempfile.TemporaryDirectory(prefix="hfshard-example-") as work:
        ours = {name: sizes_with_hfshard(build, Path(work, name)) for name, build in SCHEDULERS.items()}
    print("hfshard, CheckpointManager.save: the whole checkpoint of model, optimizer and scheduler")
    print_table(ours)
    theirs = {name: sizes_with_torch_save(build) for name, build in SCHEDULERS.items()}
    print("torch.save(scheduler.state_dict()): the scheduler alone")
    print_table({name: sizes for name, (sizes, _) in theirs.items()})
    for name, (sizes, is_readable) in theirs.items():
        if sizes[-1] > MOMENTUM_BYTES and not is_readable:
            print(f"{name}: torch.save wrote model, optimizer and momentum once more; weights_only=True refuses it.")
    is_constant = all(len(set(sizes)) == 1 for sizes in ours.values())
    print(f"hfshard's sizes are constant, to the byte: {'yes' if is_constant else 'NO'}")
    return 0 if is_constant else 1


if __name__ == "__main__":
    sys.exit(main())
