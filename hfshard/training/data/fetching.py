"""The sampler and dataset within a ResumableDataLoader: tasks, and a dataset that loads each under its own seeds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import get_worker_info

from hfshard.training.data.sampling import BatchOrder
from hfshard.training.data.seeding import current_states, restore_states, seed_generators, seeds_for

Task = tuple[int, int, Any]
"""Epoch, batch, and the indexes of its samples."""

PendingBatches = deque[tuple[int, int | None]]
"""Numbers of the batches that are being loaded, each with the checksum of the indexes up to it."""

_OWN = frozenset({"_dataset", "_collate", "_is_batched", "_seed", "_of_rank", "_numpy_bits"})


def keep_batch(batch: Any) -> Any:
    """Return a batch as it is: the `collate_fn` of a loader whose batches are collated already."""
    return batch


class TaskSampler:
    """The tasks of the inner loader's workers, as the sampler of a plain DataLoader."""

    def __init__(self) -> None:
        self._tasks: Iterator[Task] = iter(())

    def begin(self, order: BatchOrder, epoch: int, start: int) -> PendingBatches:
        """Begin another epoch; whoever gives out its batches pops them from the deque that is returned."""
        pending: PendingBatches = deque()

        def tasks() -> Iterator[Task]:
            for batch, indexes in enumerate(order, start):
                pending.append((batch, order.checksum))
                yield epoch, batch, indexes

        self._tasks = tasks()
        return pending

    def __iter__(self) -> Iterator[Task]:
        return self._tasks  # torch asks twice before the first task


class SeededDataset:
    """Maps a task to (number of the batch, collated batch); all other attributes are those of the dataset.

    In the main process the RNGs are restored after each batch. In a worker nobody else draws from them.

    Args:
        dataset: The user's.
        collate: The user's `collate_fn`.
        is_batched: Whether the indexes are several; False: a single index.
        seed: Determines the seeds of a batch, together with epoch and batch.
        rank: Whose samples these are: each rank draws other numbers; the first one draws those of a single process.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], is_batched: bool, seed: int, rank: int = 0) -> None:
        self._dataset = dataset
        self._collate = collate
        self._is_batched = is_batched
        self._seed = seed
        self._of_rank = (f"rank {rank}",) if rank else ()
        self._numpy_bits = np.random.MT19937(0)  # one for each, so that a dataset may itself use a loader

    def __getitem__(self, task: Task) -> tuple[int, Any]:
        epoch, batch, indexes = task
        seeds = seeds_for("batch", self._seed, epoch, batch, *self._of_rank)
        if get_worker_info() is not None:
            seed_generators(seeds, self._numpy_bits)
            return batch, self._load(indexes)
        states = current_states()
        try:
            seed_generators(seeds, self._numpy_bits)
            return batch, self._load(indexes)
        finally:
            restore_states(states)

    def __len__(self) -> int:
        return len(self._dataset)

    def _load(self, indexes: Any) -> Any:
        if not self._is_batched:
            items = self._dataset[indexes]
        elif get_items := getattr(self._dataset, "__getitems__", None):
            items = get_items(indexes)
        else:
            items = [self._dataset[index] for index in indexes]
        return self._collate(items)

    # A `worker_init_fn` sees this as `get_worker_info().dataset`: the attributes here are the dataset's.

    def __getattr__(self, name: str) -> Any:
        if name in _OWN or (
            name.startswith("__") and name.endswith("__")
        ):  # pickle asks for these before there is state
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._dataset, name, value)
