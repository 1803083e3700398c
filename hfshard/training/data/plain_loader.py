"""A plain DataLoader with the batches of a ResumableDataLoader, for code that takes loaders apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from hfshard.training.data.dataloader import ResumableDataLoader, seeded_dataset
from hfshard.training.data.fetching import Task


class TaskBatches:
    """A batch sampler whose batches are one task each, so that batches keep their seeds when they are split or skipped.

    `Accelerator.prepare`, `skip_first_batches` and Trainer build a new loader from the dataset, batch sampler and
    collate_fn of another. Everything that determines a batch is in these three here.

    Attributes:
        batch_size: 1, the number of tasks in a batch, so that every batch counts as full.
        drop_last: False; an incomplete last batch was dropped before.
        epoch: The epoch of the next iteration, which increments it; `set_epoch` sets it.
    """

    batch_size = 1
    drop_last = False

    def __init__(self, loader: ResumableDataLoader[Any]) -> None:
        self._loader = loader
        self.epoch = loader.epoch
        self.sampler = self  # Accelerate calls set_epoch of this

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[list[Task]]:
        epoch = self.epoch  # read at the first batch: torch makes two iterators, and uses one
        self.epoch += 1
        for batch, indexes in enumerate(self._loader.order(epoch)):
            yield [(epoch, batch, indexes)]


def plain_loader(loader: ResumableDataLoader[Any]) -> DataLoader[Any]:
    """Make a plain DataLoader with the same batches in the same epochs, which draws from no global RNG either.

    It has no position: the caller counts the batches of the epoch and skips them (`accelerate.skip_first_batches`,
    Trainer's own resume), which loads nothing and changes no batch.

    Args:
        loader: Its parts are used, and its epoch is the first one; its position is not used or changed.

    Returns:
        The plain loader.

    Example:
        batches = list(plain_loader(loader))
    """
    return DataLoader(
        seeded_dataset(loader),  # type: ignore[arg-type]
        batch_sampler=TaskBatches(loader),
        num_workers=loader.num_workers,
        collate_fn=only_batch,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator(torch.get_default_device()).manual_seed(0),
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        pin_memory_device=loader.pin_memory_device,
    )


def only_batch(done: list[tuple[int, Any]]) -> Any:
    """Return the collated batch of the only task."""
    [(_, batch)] = done
    return batch
