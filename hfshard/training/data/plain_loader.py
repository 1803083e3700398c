"""A plain DataLoader with the batches of a ResumableDataLoader, for code that takes loaders apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from hfshard.training.data.dataloader import ResumableDataLoader
from hfshard.training.data.fetching import SeededDataset, Task


class TaskBatches:
    """A batch sampler of batches with one task each: whoever shards or skips batches, each keeps its own seeds.

    `Accelerator.prepare`, `skip_first_batches` and Trainer build a new loader of another's dataset, batch sampler and
    collate_fn. All that makes a batch what it is, is in these here.

    Attributes:
        batch_size: 1, the tasks of a batch, so that all batches are full for those who count.
        drop_last: False; the last one was dropped before.
        epoch: Of the next iteration, which counts it on; `set_epoch` sets it.
    """

    batch_size = 1
    drop_last = False

    def __init__(self, loader: ResumableDataLoader[Any]) -> None:
        self._loader = loader
        self.epoch = loader.epoch
        self.sampler = self  # Accelerate calls set_epoch of this

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[list[Task]]:
        epoch = self.epoch  # when the first one is asked for: torch makes two iterators, and uses one
        self.epoch += 1
        for batch, indexes in enumerate(self._loader.order(epoch)):
            yield [(epoch, batch, indexes)]


def plain_loader(loader: ResumableDataLoader[Any]) -> DataLoader[Any]:
    """A plain DataLoader with the same batches in the same epochs, which draws from no RNG of the process, either.

    It has no position: the caller counts the batches of the epoch and skips them (`accelerate.skip_first_batches`,
    Trainer's own resume), which loads nothing and changes no batch.

    Args:
        loader: Used for its parts; its own position neither matters nor moves, but for the epoch to begin with.

    Example:
        batches = list(plain_loader(loader))
    """
    return DataLoader(
        SeededDataset(loader.dataset, loader.collate_fn, loader.batch_sampler is not None, loader.seed),  # type: ignore[arg-type]
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
    """The collated batch of the one task."""
    [(_, batch)] = done
    return batch
