"""What an Accelerator has prepared on two ranks: resumed it ends as if it had run straight."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin, GradientAccumulationPlugin
from torch import nn
from torch.utils.data import Dataset, DistributedSampler

import hfshard
from hfshard.errors import InvalidArgumentError, StateDictMismatchError
from hfshard.training import CheckpointManager, Gradients, ResumableDataLoader, prepare_loader, prepared_state
from tests.distributed.gloo import check_ranks
from tests.training.fingerprint import flatten, of_model, of_optimizer, of_rngs, of_scheduler
from tests.training.integrations.accelerate_child import Points
from tests.training.integrations.accelerate_ranks import as_launched, count_as_gpus, refuse_whole_state

pytestmark = pytest.mark.compat

STEPS, SAVED_AT = 9, 5
"""Of 4 batches in an epoch: 26 samples make 7 batches of 4, and the two ranks get 4 each, the last one filled up."""


@dataclass(frozen=True, slots=True)
class Case:
    """How a training is spread."""

    fsdp: dict[str, Any] = field(default_factory=dict)
    """Of the plugin for FSDP2; none: DistributedDataParallel."""
    accelerator: dict[str, Any] = field(default_factory=dict)
    blocking: bool = True
    gradients: bool = False
    """Save in the middle of a gradient accumulation."""


BLOCKS = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
CASES = {
    "ddp": Case(),
    "fsdp2": Case(BLOCKS),
    "fsdp2, recomputed, accumulating": Case(
        {**BLOCKS, "activation_checkpointing": True},
        {"gradient_accumulation_plugin": {"num_steps": 2, "sync_each_batch": True}},
        blocking=False,
        gradients=True,
    ),
    "fsdp2 in bfloat16": Case({"reshard_after_forward": False}, {"mixed_precision": "bf16"}),
}


class Block(nn.Module):
    """A layer of uneven size, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 7)
        self.dropout = nn.Dropout(0.3)
        self.down = nn.Linear(7, 4)

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        moved_BD: torch.Tensor = x_BD + self.down(self.dropout(torch.relu(self.up(x_BD))))
        return moved_BD


class Prepared:
    """A training as a script builds it with Accelerate."""

    def __init__(self, case: Case, *, seed: int) -> None:
        self.case = case
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **case.fsdp) if case.fsdp else None
        arguments = dict(case.accelerator)
        if accumulation := arguments.pop("gradient_accumulation_plugin", None):
            arguments["gradient_accumulation_plugin"] = GradientAccumulationPlugin(**accumulation)
        self.accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, **arguments)
        torch.manual_seed(seed)
        model = nn.Sequential(Block(), Block(), nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        parts: Any = self.accelerator.prepare(model, optimizer, scheduler)
        self.model, self.optimizer, self.scheduler = parts
        self.accelerator.get_state_dict = refuse_whole_state
        data = ResumableDataLoader(Points(), batch_size=4, shuffle=True, seed=1)
        self.loader = prepare_loader(self.accelerator, data)
        more: dict[str, Any] = {"gradients": Gradients(self.model)} if case.gradients else {}
        self.state = prepared_state(self.accelerator, self.model, self.optimizer, self.scheduler, self.loader, **more)
        for one in (random.seed, np.random.seed, torch.manual_seed):
            one(100 * seed + self.accelerator.process_index)

    def train(self, done: int, manager: CheckpointManager) -> list[float]:
        losses = []
        while done < STEPS:
            for batch in self.loader:
                with self.accelerator.accumulate(self.model):
                    loss = self.model(batch).square().mean()
                    self.accelerator.backward(loss)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                losses.append(loss.item())
                done += 1
                if done == SAVED_AT:
                    manager.save(done, self.state, blocking=self.case.blocking)
                if done == STEPS:
                    break
        return losses

    def everything(self) -> dict[str, str]:
        """All of this rank that two trainings are compared by, bit for bit."""
        parts = (
            of_model(self.model),
            of_optimizer(self.optimizer.optimizer, self.model, "optimizer"),
            of_scheduler(self.scheduler.scheduler),
            of_rngs(),
            flatten({"step": self.accelerator.step, "batch": self.loader.batch}, "accelerator"),
        )
        return {path: value for part in parts for path, value in part}


def prepared(case: Case, *, seed: int) -> Prepared:
    if case.fsdp:
        count_as_gpus()
    return Prepared(case, seed=seed)


def run_straight_and_resumed(rank: int, place: Path) -> None:
    for name, case in CASES.items():
        with CheckpointManager(place / name) as manager:
            with as_launched(rank, 2):
                straight = prepared(case, seed=0)
                losses = straight.train(0, manager)
            with as_launched(rank, 2):
                resumed = prepared(case, seed=3)
                assert manager.restore_latest(resumed.state) == SAVED_AT
                assert resumed.train(SAVED_AT, manager) == losses[SAVED_AT:], name
        was, now = straight.everything(), resumed.everything()
        assert was.keys() == now.keys(), name
        assert {path: (value, now[path]) for path, value in was.items() if value != now[path]} == {}, name


def test_a_training_on_two_ranks_is_resumed_exactly(tmp_path: Path) -> None:
    check_ranks(tmp_path / "ranks", 2, run_straight_and_resumed, tmp_path)

    run = tmp_path / "fsdp2, recomputed, accumulating"
    alone = Prepared(Case(accelerator={"gradient_accumulation_steps": 2}, gradients=True), seed=4)
    manager = CheckpointManager(run)
    with pytest.raises(StateDictMismatchError, match=r"shared out to 2 processes when .* and are to 1 now"):
        manager.restore_latest(alone.state)
    manager.restore_latest(alone.state, strict=False)
    saved = hfshard.load_state_dict(run / f"checkpoint-{SAVED_AT:08d}")
    assert list(saved)[:2] == ["0.up.weight", "0.up.bias"]
    assert all(torch.equal(tensor, saved[name]) for name, tensor in alone.model.state_dict().items())


def save_amid_an_accumulation(rank: int, place: Path) -> None:
    with as_launched(rank, 2), CheckpointManager(place) as manager:
        one = prepared(Case(BLOCKS, {"gradient_accumulation_steps": 2}, gradients=True), seed=0)
        with one.accelerator.accumulate(one.model):
            one.accelerator.backward(one.model(torch.ones(2, 4)).sum())
        assert all(parameter.grad is None for parameter in one.model.parameters())
        with pytest.raises(InvalidArgumentError, match="not reduced before the last batch"):
            manager.save(1, one.state)
        with one.accelerator.accumulate(one.model):
            one.accelerator.backward(one.model(torch.ones(2, 4)).sum())
        manager.save(2, one.state)
        assert manager.all_steps() == [2]


def test_gradients_that_no_checkpoint_can_have_are_refused(tmp_path: Path) -> None:
    check_ranks(tmp_path / "ranks", 2, save_amid_an_accumulation, tmp_path / "run")


class Noise(Dataset[list[float]]):
    """An index, and a number that is drawn."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> list[float]:
        return [index, torch.rand(()).item()]


def share_out(rank: int) -> None:
    split: Any = DataLoaderConfiguration(split_batches=True)
    shares = {
        "each": (None, [[[0, 1], [4, 5]], [[2, 3], [6, 0]]]),
        "split": (split, [[[0], [2], [4], [6]], [[1], [3], [5], [0]]]),
    }
    for name, (configuration, expected) in shares.items():
        with as_launched(rank, 2):
            accelerator = Accelerator(cpu=True, dataloader_config=configuration)
            loader = prepare_loader(accelerator, ResumableDataLoader(Noise(), batch_size=2, collate_fn=torch.tensor))
            batches, ends, remainders = [], [], []
            for batch in loader:
                batches.append(batch)
                ends.append(loader.end_of_dataloader)
                remainders.append(accelerator.gradient_state.remainder)
            assert [batch[:, 0].int().tolist() for batch in batches] == expected[rank], name
            assert ends == [False] * (len(batches) - 1) + [True] and remainders[-1] == (3 if name == "each" else 1)
            drawn: list[Any] = [None, None]
            torch.distributed.all_gather_object(drawn, [number for batch in batches for number in batch[:, 1].tolist()])
            assert not set(drawn[0]) & set(drawn[1]), name
            sampled = ResumableDataLoader(Noise(), sampler=DistributedSampler(Noise()))
            with pytest.raises(InvalidArgumentError, match="no DistributedSampler"):
                prepare_loader(accelerator, sampled)


def test_each_rank_loads_its_share_and_draws_numbers_of_its_own(tmp_path: Path) -> None:
    check_ranks(tmp_path, 2, share_out)
