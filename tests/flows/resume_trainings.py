"""Trainings by transformers' Trainer, and with what an Accelerator has prepared: straight, killed, resumed."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Never
from unittest.mock import patch

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

from hfshard.training import (
    CheckpointCallback,
    CheckpointManager,
    Gradients,
    ResumableDataLoader,
    prepare_loader,
    prepared_state,
)
from tests.flows.resume_runs import everything_of, report

STEPS, EPOCHS = 20, 3
SAMPLES = 26
"""Of which 4 make a batch: 6 batches and one of 2 in an epoch."""
WORDS = 30


@dataclass(frozen=True, slots=True)
class Case:
    """A training by Trainer, and where it is killed."""

    killed_after: int
    resumed_after: tuple[int, ...]
    """The step of its last checkpoint, or, where a thread saves, that of the one before."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Of TrainingArguments."""
    resumed_arguments: dict[str, Any] = field(default_factory=dict)
    """What is other in the resumed process."""
    callback: dict[str, Any] = field(default_factory=dict)
    augmented: bool = False
    nadam_bf16: bool = False
    as_upstream: bool = False
    """Whether to compare with a Trainer without the callback."""
    oldest: bool = False
    """Whether it runs on the oldest versions too: together these call all that Trainer keeps to itself."""


_BEST = {
    "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "lr_scheduler_type": "reduce_lr_on_plateau",
    "lr_scheduler_kwargs": {"patience": 1}, "metric_for_best_model": "loss", "greater_is_better": False,
    "load_best_model_at_end": True, "save_total_limit": 2,
}  # fmt: skip
_WORKERS = {"dataloader_num_workers": 2}
_EVALUATED = {"eval_strategy": "steps", "eval_steps": 4, "dataloader_persistent_workers": True, **_WORKERS}
_TWO = {"gradient_accumulation_steps": 2, "save_steps": 11, "logging_steps": 4}
TRAINER = {
    "amid an epoch, with dropout": Case(11, (9,), {"save_steps": 3, "logging_steps": 2}, as_upstream=True, oldest=True),
    "at an epoch's end": Case(10, (7,), {"save_strategy": "epoch", "eval_strategy": "epoch"}),
    "at an epoch's last step, evaluated after it": Case(9, (7,), {"save_steps": 7, "eval_strategy": "epoch"}),
    "gradient accumulation": Case(13, (11,), _TWO, as_upstream=True, oldest=True),
    "evaluated, best kept, on plateau": Case(15, (14,), _BEST, as_upstream=True, oldest=True),
    "augmentation": Case(12, (10,), {"save_steps": 5}, augmented=True),
    "augmentation, in 2 workers after the resume": Case(13, (10,), {"save_steps": 5}, _WORKERS, augmented=True),
    "2 persistent workers, evaluated": Case(12, (10,), {"save_steps": 5, **_EVALUATED}, augmented=True),
    "NAdam in bfloat16, saved by a thread": Case(
        11, (9, 6), {"save_steps": 3}, callback={"blocking": False}, nadam_bf16=True
    ),
    "grouped by length": Case(12, (10,), {"train_sampling_strategy": "group_by_length", "save_steps": 5}),
}


class Sentences(Dataset[dict[str, Any]]):
    """Random words of random lengths; augmented, with words replaced by what three RNGs draw."""

    def __init__(self, augmented: bool, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.words = torch.randint(1, WORDS, (SAMPLES, 6), generator=generator)
        self.labels = torch.randint(0, 2, (SAMPLES,), generator=generator).tolist()
        self.augmented = augmented

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        words = self.words[index].clone()
        if self.augmented:
            words[0], words[1] = random.randrange(1, WORDS), int(np.random.randint(1, WORDS))
            words[2] = torch.randint(1, WORDS, ())
        return {"input_ids": words[: 3 + index % 4], "labels": self.labels[index], "augmented": self.augmented}


def collated(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A batch; where augmented, a tenth of its words is masked, as for a masked language model, by torch's RNG."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    rows = [torch.nn.functional.pad(sample["input_ids"], (0, longest - len(sample["input_ids"]))) for sample in samples]
    words: Tensor = default_collate(rows)
    mask = (words > 0).long()
    if samples[0]["augmented"]:
        words[torch.rand(words.shape) < 0.1] = WORDS - 1
    return {"input_ids": words, "attention_mask": mask, "labels": torch.tensor([one["labels"] for one in samples])}


class Ending(TrainerCallback):
    """Dies by SIGKILL when the step after the last one has begun."""

    def __init__(self, last: int) -> None:
        self.last = last

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.last:
            os.kill(os.getpid(), signal.SIGKILL)


def arguments_for(directory: Path, **arguments: Any) -> TrainingArguments:
    """What all Trainers here have in common, and what is other."""
    known: dict[str, Any] = {
        "output_dir": str(directory), "learning_rate": 0.01, "seed": 11, "use_cpu": True, "report_to": [],
        "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    return TrainingArguments(**{**known, **arguments})


def trainer(case: Case, directory: Path, **arguments: Any) -> Trainer:
    """As a script builds it."""
    torch.set_num_threads(1)
    torch.manual_seed(5)
    config = BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=8, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2,
    )  # fmt: skip
    net = BertForSequenceClassification(config)
    optimizers: tuple[Any, Any] = (None, None)
    if case.nadam_bf16:
        net = net.bfloat16()
        optimizer = torch.optim.NAdam(net.parameters(), lr=0.01)
        optimizers = optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    known = {"per_device_train_batch_size": 4, "max_steps": STEPS, "logging_steps": 1, "remove_unused_columns": False}
    return Trainer(
        model=net,
        args=arguments_for(directory / "run", **{**known, **case.arguments, **arguments}),
        data_collator=collated,
        train_dataset=Sentences(case.augmented, seed=1),
        eval_dataset=Sentences(augmented=False, seed=2),
        optimizers=optimizers,
    )


def everything(trained: Trainer) -> dict[str, str]:
    """All that two trainings are compared by, bit for bit; what they have logged, without times."""
    state, timed = trained.state, ("runtime", "per_second")
    log = [
        {name: entry[name] for name in sorted(entry) if not name.endswith(timed)}
        for entry in state.log_history
        if "train_runtime" not in entry
    ]
    best = [state.best_metric, state.best_global_step]
    own: dict[str, Any] = {"step": state.global_step, "epoch": state.epoch, "best": best, "flos": state.total_flos}
    return everything_of(trained.model, trained.optimizer, trained.lr_scheduler, log=log, **own)


def run_trainer(name: str, role: str, directory: Path) -> None:
    """One role of a case; "upstream" does without the callback."""
    case, newest = TRAINER[name], None
    place = directory / role if role in ("straight", "upstream") else directory
    trained = trainer(case, place, **(case.resumed_arguments if role == "resumed" else {}))
    if role != "upstream":
        newest = CheckpointCallback(**case.callback).attach(trained).latest()
    if role == "killed":
        trained.add_callback(Ending(case.killed_after))
    trained.train(resume_from_checkpoint=newest)
    restored = int(newest.removeprefix(f"{directory}/run/checkpoint-")) if newest else None
    report(directory, role, restored, [], everything(trained))


@dataclass(frozen=True, slots=True)
class AccelerateCase:
    """A training, by the batches of all its epochs, which are saved and killed after."""

    killed_after: int
    save_every: int
    resumed_after: tuple[int, ...]
    accelerator: dict[str, Any] = field(default_factory=dict)
    loader: dict[str, Any] = field(default_factory=dict)
    scaler: bool = False
    """A GradScaler, as for float16 on a GPU."""
    gradients: bool = False
    """Save in the middle of a gradient accumulation too."""


_THREE = {"gradient_accumulation_steps": 3}
ACCELERATE = {
    "shuffle and dropout": AccelerateCase(11, 5, (10,)),
    "at an epoch's end": AccelerateCase(9, 7, (7,)),
    "gradient accumulation": AccelerateCase(13, 3, (6,), _THREE),
    "amid a gradient accumulation": AccelerateCase(12, 5, (10,), _THREE, gradients=True),
    "autocast to bfloat16, 2 workers": AccelerateCase(11, 5, (10,), {"mixed_precision": "bf16"}, {"num_workers": 2}),
    "scaler": AccelerateCase(11, 5, (10,), scaler=True),
}


class Points(Dataset[Tensor]):
    """Points that python's, numpy's and torch's RNG move."""

    def __init__(self) -> None:
        self.points = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return self.points[index] * random.random() + float(np.random.standard_normal()) + torch.randn(4)


def train_epoch(accelerator: Accelerator, model: Any, optimizer: Any, scheduler: Any, loader: Any) -> Iterator[float]:
    """The loss of each batch, until the epoch ends."""
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        yield loss.item()


def run_accelerate(name: str, role: str, directory: Path) -> None:
    """One role of a case."""
    case = ACCELERATE[name]
    torch.set_num_threads(1)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    accelerator = Accelerator(cpu=True, **case.accelerator)
    if case.scaler:
        accelerator.scaler = torch.amp.GradScaler("cpu", growth_interval=4)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    data = ResumableDataLoader(Points(), batch_size=4, shuffle=True, seed=1, **case.loader)
    loader = prepare_loader(accelerator, data)
    more: Mapping[str, Any] = {"gradients": Gradients(model)} if case.gradients else {}
    state = prepared_state(accelerator, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, **more)
    losses = []
    with CheckpointManager(directory / ("straight" if role == "straight" else "run")) as manager:
        restored = manager.restore_latest(state)
        done = int(restored or 0)
        for _ in range(loader.epoch, EPOCHS):
            for loss in train_epoch(accelerator, model, optimizer, scheduler, loader):
                done += 1
                losses.append({"loss": loss})
                if done % case.save_every == 0 and (accelerator.sync_gradients or case.gradients):
                    manager.save(done, state)
                if role == "killed" and done == case.killed_after:
                    os.kill(os.getpid(), signal.SIGKILL)
    own = {"step": accelerator.step, "scaler": accelerator.scaler.state_dict() if case.scaler else None}
    report(directory, role, restored and int(restored), losses, everything_of(model, optimizer, scheduler, **own))


@contextmanager
def as_launched(rank: int, world_size: int) -> Iterator[None]:
    """What `torchrun` tells a rank, for Accelerate to find; afterwards, all that Accelerate keeps is gone."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    launched = {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}  # nobody listens: the group is there already
    with patch.dict(os.environ, {name: str(value) for name, value in launched.items()}):
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


def count_as_gpus() -> None:
    """Let Accelerate do on the CPU what it does on GPUs, by the same code.

    Otherwise it takes FSDP2 for DistributedDataParallel there, and refuses tensor parallel models.
    """
    state: dict[str, Any] = PartialState(cpu=True)._shared_state
    assert state["device"].type == "cpu" and state["distributed_type"] == DistributedType.MULTI_CPU
    state["distributed_type"] = DistributedType.MULTI_GPU


def refuse_whole_state(*args: object, **kwargs: object) -> Never:
    """Takes the place of `Accelerator.get_state_dict`, which gathers the whole model on each rank."""
    raise AssertionError("a whole state dict was asked for")
