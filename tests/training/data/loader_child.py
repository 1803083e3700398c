"""A dataset that draws from every RNG, and the runs over it that are killed, resumed, and not stopped."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hfshard.training import ResumableDataLoader

SAMPLES = 22
BATCHES = 6
"""Of 4 samples each; the last one has 2."""
EPOCHS = 3


def drawn() -> list[float]:
    """A number of each RNG."""
    return [random.random(), float(np.random.rand()), float(np.random.randn()), torch.rand(()).item()]


class Augmented(Dataset[Tensor]):
    """Each sample is its index and a number of each RNG."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        self.loaded.append(index)
        return torch.tensor([float(index), *drawn()], dtype=torch.float64)


def collate(items: list[Tensor]) -> Tensor:
    """Stacked, with a last row that is drawn here."""
    return torch.stack([*items, torch.tensor([-1.0, *drawn()], dtype=torch.float64)])


def make(**arguments: Any) -> ResumableDataLoader[Tensor]:
    """The loader of all runs, but for how it works."""
    return ResumableDataLoader(Augmented(), 4, True, collate_fn=collate, seed=3, **arguments)


def run(directory: Path, arguments: dict[str, Any], stop: tuple[int, int] | None) -> None:
    """Resume if there is a state, and note all batches; at the stop, write the state, and die of SIGKILL."""
    os.setpgrp()  # the workers are to die, too: they would keep the test waiting for 5 s
    loader = make(**arguments)
    state = directory / "state.json"
    if state.exists():
        loader.load_state_dict(json.loads(state.read_text()))
    handed: list[Tensor] = []
    for epoch in range(loader.epoch, EPOCHS):
        for batch in loader:
            handed.append(batch)
            if (epoch, loader.batch) == stop:
                state.write_text(json.dumps(loader.state_dict()))
                torch.save(handed, directory / "before.pt")
                os.killpg(0, signal.SIGKILL)
    torch.save(handed, directory / "after.pt")
