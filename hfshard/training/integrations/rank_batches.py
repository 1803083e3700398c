"""Which of the batches each process of an Accelerator loads, in an order that all compute alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from accelerate import Accelerator
from torch.utils.data import DataLoader

from hfshard.training.data.dataloader import ResumableDataLoader
from hfshard.training.data.sampling import sampler_order
from hfshard.training.data.seeding import seeds_for

_BATCH_DIMS: Final = ("dp_replicate", "dp_shard")
"""The dimensions of Accelerate's device mesh along which processes get batches of their own; the last ones of a mesh,
for tensor and context parallelism, have ranks that share a batch."""


@dataclass(frozen=True, slots=True)
class BatchShare:
    """Which of the processes that get batches of their own this one is; those that share batches have equal shares."""

    index: int
    count: int

    @classmethod
    def of(cls, accelerator: Accelerator) -> BatchShare:
        """The share of this process."""
        mesh = accelerator.torch_device_mesh
        if mesh is None:
            return cls(accelerator.process_index, accelerator.num_processes)
        count = prod(mesh[name].size() for name in _BATCH_DIMS if name in mesh.mesh_dim_names)
        return cls(accelerator.process_index // (accelerator.num_processes // count), count)

    def loader(self, loader: DataLoader[Any], batches: Any, seed: int) -> ResumableDataLoader[Any]:
        """Make the loader of this share, which draws what no other share draws; the first one's what one process does.

        Args:
            loader: Gives all but the batches.
            batches: The batch sampler of this share.
            seed: The same on all ranks.
        """
        own_seed = seed if self.index == 0 else seeds_for("rank", seed, self.index).torch
        return ResumableDataLoader(
            loader.dataset,
            batch_sampler=batches if self.count == 1 else RankBatches(batches, seed),
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
            pin_memory_device=loader.pin_memory_device,
            in_order=loader.in_order,
            seed=own_seed,
        )


class RankBatches:
    """The batch sampler of one rank, whose order is drawn under seeds that all ranks have in common.

    So the loader around it may have a seed of its own, under which this rank's batches are augmented.

    Args:
        batches: Gives the batches of this rank, by an order that it computes for all of them.
        seed: The same on all ranks.
    """

    def __init__(self, batches: Any, seed: int) -> None:
        self._batches = batches
        self._seed = seed
        self._epoch = 0
        self.batch_size: int | None = getattr(batches, "batch_size", None)
        self.drop_last: bool = getattr(batches, "drop_last", False)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return sampler_order(self._batches, self._seed, self._epoch, 0)
