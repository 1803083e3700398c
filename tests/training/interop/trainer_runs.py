"""Trainings by transformers' Trainer alone, and the same model, optimizer and data in a loop of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

import hfshard
from hfshard.training import ResumableDataLoader, TrainingState
from tests.flows import resume_trainings as trainer_child
from tests.flows.resume_trainings import Case, Sentences
from tests.training.fingerprint import of_model, of_optimizer, of_rngs, of_scheduler
from tests.training.interop.accelerate_runs import OPTIMIZER_OF_SCHEDULER

SAVED_AT, STEPS = 9, 12
"""An epoch has 7 batches: the checkpoint is after the second batch of the second one."""
ARGUMENTS = {
    "max_steps": STEPS,
    "save_steps": SAVED_AT,
    "train_sampling_strategy": "sequential",
    "lr_scheduler_type": "cosine",
    "weight_decay": 0.1,
    "warmup_steps": 2,
}


def new_trainer(place: Path, **arguments: Any) -> Trainer:
    """As a script builds it, with dropout, and parameters in two groups."""
    made = trainer_child.trainer(Case(0, ()), place, **{**ARGUMENTS, **arguments})
    made.model_accepts_loss_kwargs = False
    return made


def parts_of(place: Path, arguments: Mapping[str, Any] | None = None, **loading: Any) -> TrainingState:
    """The parts of such a training, fresh, for a loop of one's own; with other arguments for its loader."""
    made = new_trainer(place, **(arguments or {}))
    made.create_optimizer_and_scheduler(STEPS)
    known = {"batch_size": 4, "collate_fn": trainer_child.collated, **loading}
    loader = ResumableDataLoader(Sentences(augmented=False, seed=1), **known)
    return TrainingState(model=made.model, optimizer=made.optimizer, scheduler=made.lr_scheduler, loader=loader)


def restore(state: TrainingState, checkpoint: Path, **options: Any) -> Any:
    return hfshard.CheckpointManager(checkpoint.parent / "ours").restore(state, checkpoint, **options)


def train(state: TrainingState, first: int) -> None:
    """Train from a step to the last, as Trainer does."""
    model, optimizer, scheduler, loader = (
        state.components[name] for name in ("model", "optimizer", "scheduler", "loader")
    )
    model.train()
    step = first
    while step < STEPS:
        for batch in loader:
            model(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            if step == STEPS:
                break


def everything(model: Any, optimizer: Any, scheduler: Any) -> dict[str, str]:
    """What two trainings are compared by, bit for bit."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    parts = of_model(model), of_optimizer(optimizer, model, "optimizer"), of_scheduler(scheduler), of_rngs()
    return {path: value for part in parts for path, value in part if path != OPTIMIZER_OF_SCHEDULER}


def everything_of(state: TrainingState) -> dict[str, str]:
    """The same of the parts of a loop of one's own."""
    return everything(*(state.components[name] for name in ("model", "optimizer", "scheduler")))
