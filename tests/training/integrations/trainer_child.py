"""Trainings by transformers' Trainer, each in a process of its own: straight, killed, resumed, without the callback."""

from __future__ import annotations

import json
import os
import random
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hfshard.training import CheckpointCallback
from tests.training.fingerprint import flatten, of_model, of_optimizer, of_rngs, of_scheduler

STEPS = 20
SAMPLES = 26
"""Of which 4 make a batch: 6 batches and one of 2 in an epoch."""
WORDS = 30


@dataclass(frozen=True, slots=True)
class Case:
    """A training, and where it is killed."""

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


CASES = {
    "amid an epoch, with dropout": Case(11, (9,), {"save_steps": 3, "logging_steps": 2}, as_upstream=True),
    "at an epoch's end": Case(10, (7,), {"save_strategy": "epoch", "eval_strategy": "epoch"}),
    "at an epoch's last step, evaluated after it": Case(9, (7,), {"save_steps": 7, "eval_strategy": "epoch"}),
    "gradient accumulation": Case(
        13, (11,), {"gradient_accumulation_steps": 2, "save_steps": 11, "logging_steps": 4}, as_upstream=True
    ),
    "evaluated, best kept, on plateau": Case(
        15,
        (14,),
        {
            "eval_strategy": "steps",
            "eval_steps": 2,
            "save_steps": 2,
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "lr_scheduler_kwargs": {"patience": 1},
            "metric_for_best_model": "loss",
            "greater_is_better": False,
            "load_best_model_at_end": True,
            "save_total_limit": 2,
        },
        as_upstream=True,
    ),
    "augmentation": Case(12, (10,), {"save_steps": 5}, augmented=True),
    "augmentation, in 2 workers after the resume": Case(
        13, (10,), {"save_steps": 5}, {"dataloader_num_workers": 2}, augmented=True
    ),
    "2 persistent workers, evaluated": Case(
        12,
        (10,),
        {
            "save_steps": 5,
            "eval_strategy": "steps",
            "eval_steps": 4,
            "dataloader_num_workers": 2,
            "dataloader_persistent_workers": True,
        },
        augmented=True,
    ),
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


def model(case: Case) -> BertForSequenceClassification:
    torch.manual_seed(5)
    config = BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=8, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2,
    )  # fmt: skip
    built = BertForSequenceClassification(config)
    return built.bfloat16() if case.nadam_bf16 else built


def trainer(case: Case, directory: Path, **arguments: Any) -> Trainer:
    """As a script builds it."""
    torch.set_num_threads(1)
    net = model(case)
    optimizers: tuple[Any, Any] = (None, None)
    if case.nadam_bf16:
        optimizer = torch.optim.NAdam(net.parameters(), lr=0.01)
        optimizers = optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    known: dict[str, Any] = {
        "output_dir": str(directory / "run"),
        "per_device_train_batch_size": 4,
        "max_steps": STEPS,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "seed": 11,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "remove_unused_columns": False,
        **case.arguments,
        **arguments,
    }
    return Trainer(
        model=net,
        args=TrainingArguments(**known),
        data_collator=collated,
        train_dataset=Sentences(case.augmented, seed=1),
        eval_dataset=Sentences(augmented=False, seed=2),
        optimizers=optimizers,
    )


def timeless_log(trained: Trainer) -> list[dict[str, Any]]:
    """What a training has logged, without times."""
    timed = ("runtime", "per_second")
    return [
        {name: entry[name] for name in sorted(entry) if not name.endswith(timed)}
        for entry in trained.state.log_history
        if "train_runtime" not in entry
    ]


def everything(trained: Trainer) -> dict[str, str]:
    """All that two trainings are compared by, bit for bit."""
    state = trained.state
    own: dict[str, Any] = {
        "log": timeless_log(trained),
        "step": state.global_step,
        "epoch": state.epoch,
        "best": [state.best_metric, state.best_global_step],
        "flos": state.total_flos,
    }
    net: Any = trained.model
    optimizer: Any = trained.optimizer
    scheduler: Any = trained.lr_scheduler
    parts = (
        of_model(net),
        of_optimizer(getattr(optimizer, "optimizer", optimizer), net, "optimizer"),
        of_scheduler(scheduler),
        of_rngs(),
        flatten(own, "trainer"),
    )
    return {path: value for part in parts for path, value in part}


def run_role(name: str, role: str, directory: Path) -> None:
    """The body of a process; what comes of it is written to `role`.json."""
    case = CASES[name]
    newest = None
    if role == "upstream":
        trained = trainer(case, directory / role)
    else:
        trained = trainer(
            case,
            directory / role if role == "straight" else directory,
            **(case.resumed_arguments if role == "resumed" else {}),
        )
        checkpoints = CheckpointCallback(**case.callback).attach(trained)
        newest = checkpoints.latest()
    if role == "killed":
        trained.add_callback(Ending(case.killed_after))
    trained.train(resume_from_checkpoint=newest)
    report = {"everything": everything(trained), "from": newest}
    (directory / f"{role}.json").write_text(json.dumps(report))
