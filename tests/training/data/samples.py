"""A data set of numbers, and what the tests of loaders compare."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hfshard.training import ResumableDataLoader

FORK = {"num_workers": 2}
PERSISTENT = {"num_workers": 2, "persistent_workers": True}


class Numbers(Dataset[int]):
    """Each sample is its index."""

    def __init__(self, samples: int = 10) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return index


def as_lists(loader: ResumableDataLoader[Any]) -> list[Any]:
    return [batch.tolist() for batch in loader]


def are_equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(one, other) for one, other in zip(left, right))


def rng_states() -> list[Any]:
    numpy_state: Any = np.random.get_state(legacy=False)
    key = numpy_state["state"].pop("key").tobytes()
    return [random.getstate(), numpy_state, key, torch.get_rng_state().tolist()]
