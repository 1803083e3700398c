"""The runs that the sweep saves: a tiny one for each generation, and what it is made of, bit for bit."""

from __future__ import annotations

import logging
import os
import random
import re
import shutil
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from hfshard.errors import HfshardError
from hfshard.training import CheckpointManager, TrainingState
from tests.training import fingerprint

LIMITS = {"single": 10**6, "sharded": 4096 + 64}
"""Bytes of a file; the second puts each layer into one of its own."""

STEPS_OF_TRAINING = 2

_CHECKPOINT = re.compile(r"checkpoint-\d{8}")
_PROCESS = re.compile(r"^(\.[a-z]+-\d+)-\d+")
"""A name under way ends in the number of the process that made it."""


@dataclass(frozen=True, slots=True)
class Save:
    """One save.

    Attributes:
        step: Of the checkpoint.
        generation: What is saved.
        layout: A key of `LIMITS`.
        keep: `max_to_keep`.
        metric: What `keep_best` goes by; None: there is none.
        frozen: The model is the same in every generation, so that its files are linked.
        blocking: The argument of `CheckpointManager.save`.
        killed_at: Not None: the save is killed there, from 0 (its first file-changing call) to 1 (its last).
    """

    step: int
    generation: int
    layout: str = "single"
    keep: int | None = None
    metric: float | None = None
    frozen: bool = False
    blocking: bool = True
    killed_at: float | None = None

    @property
    def content(self) -> tuple[int, bool]:
        """What tells two saved states apart."""
        return self.generation, self.frozen


class Counter:
    """Something with a state of its own."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {"count": 0, "mean": torch.zeros(2)}

    def state_dict(self) -> dict[str, Any]:
        """The state, to save it."""
        return self.values

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """Take over a saved state."""
        self.values = values


class Tiny:
    """A model that has been trained a little, with all that belongs to it."""

    def __init__(self, generation: int, *, frozen: bool = False) -> None:
        seed_torch(0)
        self.generation = generation
        self.model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.model[0].requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.counter = Counter()
        seed_torch(generation)
        before = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        for _ in range(STEPS_OF_TRAINING):
            self.optimizer.zero_grad()
            self.model(torch.randn(4, 3)).square().sum().backward()
            self.optimizer.step()
            self.scheduler.step()
        if frozen:
            self.model.load_state_dict(before)
        self.counter.values = {"count": generation, "mean": torch.full((2,), float(generation))}

    def state(self) -> TrainingState:
        """What is saved and restored."""
        return TrainingState(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, counter=self.counter)

    def fingerprint(self) -> dict[str, str]:
        """All of it, the generators of random numbers too."""
        found = dict(fingerprint.of_model(self.model)) | dict(fingerprint.of_rngs())
        found |= fingerprint.of_optimizer(self.optimizer, self.model, "optimizer")
        found |= fingerprint.of_scheduler(self.scheduler)
        return found | dict(fingerprint.flatten(self.counter.values, "counter"))


def seed_all(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed)
    seed_torch(seed)


def seed_torch(seed: int) -> None:
    """Seed its generator on the CPU; torch.manual_seed notes the call stack for each other device, which takes 2 ms."""
    torch.default_generator.manual_seed(seed)


@cache
def tiny(generation: int, frozen: bool) -> Tiny:
    """The run of a generation, made once."""
    return Tiny(generation, frozen=frozen)


@cache
def expected(generation: int, frozen: bool) -> dict[str, str]:
    """Its fingerprint at the time of the save."""
    one = tiny(generation, frozen)
    seed_all(generation)
    return one.fingerprint()


def manager_of(save: Save, run: Path) -> CheckpointManager:
    """The manager with which a save is done."""
    best = None if save.metric is None else "loss"
    return CheckpointManager(run, max_to_keep=save.keep, keep_best=best, max_shard_size=LIMITS[save.layout])


def save_with(manager: CheckpointManager, save: Save) -> None:
    """Save the generation, and wait for it."""
    state = tiny(*save.content).state()
    seed_all(save.generation)
    manager.save(save.step, state, metric=save.metric, extra={"generation": save.generation}, blocking=save.blocking)
    manager.wait_until_finished()


def perform(save: Save, run: Path) -> None:
    """Save once, with a new manager."""
    with manager_of(save, run) as manager:
        save_with(manager, save)


def perform_and_go_on(save: Save, after: Save, run: Path, seen: Path) -> None:
    """Save once; if that fails, copy what it left to `seen`, let the same manager save `after`, and raise."""
    with manager_of(save, run) as manager:
        try:
            save_with(manager, save)
        except (OSError, HfshardError, KeyboardInterrupt):
            if run.exists():
                shutil.copytree(run, seen, symlinks=True)
            save_with(manager, after)
            raise


def restored(run: Path, step: int | None) -> tuple[Any, dict[str, str]]:
    """Restore a step, or the newest whole one, into a newly built run; return where it starts, and its fingerprint."""
    fresh = Tiny(0)
    seed_all(10**6)
    with CheckpointManager(run) as manager:
        state = fresh.state()
        start = manager.restore_latest(state) if step is None else manager.restore(state, step)
        return start, fresh.fingerprint()


def generation_of(run: Path, step: int | None, saves: tuple[Save, ...]) -> str:
    """Which of some saves a checkpoint is, to the bit: "generation@step"; "none"; or what is wrong, in other words."""
    try:
        start, found = restored(run, step)
    except (HfshardError, OSError) as error:
        return f"error: {type(error).__name__}: {error}"
    if start is None:
        return "none"
    for save in saves:
        if save.step == start and start.extra == {"generation": save.generation}:
            want = expected(*save.content)
            differing = [key for key in want if found.get(key) != want[key]]
            metrics = {} if save.metric is None else {"loss": save.metric}
            if differing or found.keys() != want.keys() or start.metrics != metrics:
                return f"mixed: {save.generation}@{save.step} differs in {differing[:5]}"
            return name_of(save)
    return f"unknown: {start} with {start.extra}"


def name_of(save: Save) -> str:
    """The word for a save that `generation_of` returns."""
    return f"{save.generation}@{save.step}"


def steps_in(run: Path) -> list[int]:
    """All finished ones."""
    return CheckpointManager(run).all_steps()


def litter(run: Path) -> list[str]:
    """What lies in a run's directory and is not a checkpoint."""
    names = sorted(os.listdir(run)) if run.is_dir() else []
    return [name for name in names if not _CHECKPOINT.fullmatch(name)]


def contents(run: Path) -> frozenset[tuple[str, bytes]]:
    """Every file with its bytes, and every directory; the numbers of processes left out."""
    found = set()
    for base, directories, files in os.walk(run):
        below = _PROCESS.sub(r"\1", os.path.relpath(base, run))
        found |= {(os.path.join(below, _PROCESS.sub(r"\1", name)), b"a directory") for name in directories}
        found |= {(os.path.join(below, name), Path(base, name).read_bytes()) for name in files}
    return frozenset(found)


def warm() -> None:
    """Have everything imported and built before a process is forked."""
    logging.getLogger("hfshard").addHandler(logging.NullHandler())
    for generation in range(1, 6):
        for frozen in (False, True):
            expected(generation, frozen)


def successor(save: Save, others: tuple[Save, ...]) -> Save:
    """The save after a stopped one: of another step and generation, with the same policy."""
    last = max(one.step for one in (save, *others))
    return replace(save, step=last + 1, generation=save.generation + 1, metric=save.metric, blocking=True)
