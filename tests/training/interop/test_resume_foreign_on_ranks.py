"""Directories that Trainer and Accelerate have saved on two ranks of DistributedDataParallel, restored on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

import hfshard
from hfshard.training import TrainingState
from tests.distributed.gloo import check_ranks
from tests.flows.resume_trainings import as_launched
from tests.training.interop.accelerate_runs import Parts
from tests.training.interop.trainer_runs import everything, new_trainer, parts_of

pytestmark = pytest.mark.compat


class Draws(TrainerCallback):
    """Lets each rank draw another number of random numbers; notes what it has when it saves."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.saved: dict[str, str] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        torch.rand(1 + self.rank)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saved = everything(kwargs["model"], kwargs["optimizer"], kwargs["lr_scheduler"])


def resume_trainers(rank: int, place: Path) -> None:
    draws = Draws(rank)
    saving = new_trainer(place, max_steps=2, save_steps=2)
    saving.add_callback(draws)
    saving.train()

    state = parts_of(place)
    net, optimizer, scheduler = (state.components[name] for name in ("model", "optimizer", "scheduler"))
    torch.manual_seed(99)
    own = TrainingState(model=DistributedDataParallel(net), optimizer=optimizer, scheduler=scheduler)
    restored = hfshard.CheckpointManager(place / "ours").restore(own, place / "run" / "checkpoint-2")

    assert (restored, restored.differences, restored.lacking) == (2, (), ())
    assert everything(net, optimizer, scheduler) == draws.saved


def resume_accelerates(rank: int, place: Path) -> None:
    accelerator = Accelerator(cpu=True)
    saving = Parts(accelerator)
    saving.train(0, 2)
    torch.rand(1 + rank)
    accelerator.save_state(str(place / "accelerate"))
    accelerator.wait_for_everyone()
    expected = saving.everything()

    parts = Parts()
    torch.manual_seed(99)
    restored = hfshard.CheckpointManager(place / "ours").restore(
        parts.state(), place / "accelerate", keys={"count": "custom_checkpoint_0"}
    )

    assert (restored.differences, len(restored.lacking)) == ((), 2)
    assert parts.everything() == expected


def resume_both(rank: int, place: Path) -> None:
    with as_launched(rank, 2):
        resume_trainers(rank, place)
    with as_launched(rank, 2):
        resume_accelerates(rank, place)


def test_each_rank_gets_its_own_random_numbers(tmp_path: Path) -> None:
    check_ranks(tmp_path / "ranks", 2, resume_both, tmp_path)
