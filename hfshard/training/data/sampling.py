"""The samples of each batch of an epoch, starting at any batch; each batch is loaded under its own seeds."""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import chain, islice
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import Sampler, get_worker_info

from hfshard.errors import StateDictMismatchError
from hfshard.training.data.seeding import (
    PrivateRng,
    current_states,
    is_generator,
    restore_states,
    seed_generators,
    seeds_for,
)

_BURST: Final = 64
"""Batches that are drawn from a sampler at a time, so that swapping the RNG states costs 2 us a batch, not 150."""
_CHUNK: Final = 4096
"""Indexes that are converted to Python ints at a time."""


class EpochSampler(Sampler[int]):
    """All indexes, in an order that depends only on the seed and the epoch; it draws from no global RNG.

    It is the `loader.sampler` of a `ResumableDataLoader` that shuffles, so that code which builds another loader from
    the first one's parts, as Accelerate does, keeps the order. Without `set_epoch`, each iteration is the next epoch.

    Args:
        data_source: Only its length is used.
        seed: Any int.
    """

    def __init__(self, data_source: Sized, seed: int = 0) -> None:
        self.data_source = data_source
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch

    def order(self, epoch: int) -> Any:
        """Return the indexes of an epoch as an int64 numpy array, 8 bytes a sample."""
        generator = torch.Generator().manual_seed(seeds_for("order", self.seed, epoch).torch)
        return torch.randperm(len(self.data_source), generator=generator, device="cpu").numpy()

    def __len__(self) -> int:
        return len(self.data_source)

    def __iter__(self) -> Iterator[int]:
        order = self.order(self.epoch)  # read at the first index: torch creates two iterators, and uses one
        self.epoch += 1
        for begin in range(0, len(order), _CHUNK):
            yield from order[begin : begin + _CHUNK].tolist()


class BatchOrder:
    """An iterator over the batches of one epoch, starting at the first unused one.

    Attributes:
        checksum: CRC-32 of all indexes up to the last batch that was returned, without those that are not ints; None if
            the order cannot change.

    Args:
        batches: The batches that remain.
        checksum: The checksum of the indexes before them.
    """

    def __init__(self, batches: Iterator[Any], checksum: int | None = 0) -> None:
        self._batches = batches
        self.checksum = checksum

    def __iter__(self) -> BatchOrder:
        return self

    def __next__(self) -> Any:
        indexes = next(self._batches)
        if isinstance(indexes, Iterator):  # it can be read only once, and cannot be sent to workers
            indexes = list(indexes)
        if self.checksum is not None:
            try:
                numbers = array("q", (indexes,) if isinstance(indexes, int) else indexes)
            except (TypeError, ValueError, OverflowError):
                return indexes  # keys that are not numbers, such as names
            self.checksum = zlib.crc32(numbers, self.checksum)
        return indexes


def own_order(
    sampler: EpochSampler | range, batch_size: int | None, drop_last: bool, epoch: int, start: int
) -> BatchOrder:
    """Return the batches of an hfshard order. Skipping costs a CRC of 8 bytes a sample; without shuffling, nothing.

    Args:
        sampler: A sampler that shuffles, or the indexes in order.
        batch_size: None gives single indexes.
        drop_last: Leave out an incomplete last batch.
        epoch: The epoch, from 0.
        start: The first batch to return.
    """
    order = sampler if isinstance(sampler, range) else sampler.order(epoch)
    size = batch_size or 1
    ends = range((start + 1) * size, len(order) + (1 if drop_last else size), size)
    checksum = None if isinstance(order, range) else zlib.crc32(order[: start * size])
    if batch_size is None:
        return BatchOrder((int(order[end - 1]) for end in ends), checksum)
    if isinstance(order, range):
        return BatchOrder(map(list, (order[end - size : end] for end in ends)), checksum)
    return BatchOrder((order[end - size : end].tolist() for end in ends), checksum)


def sampler_order(sampler: Iterable[Any], seed: int, epoch: int, start: int) -> BatchOrder:
    """Return the batches of the user's sampler; it draws from RNG states that seed and epoch determine.

    `set_epoch` is called on it and on the samplers within it, if they have it. A generator of torch, numpy or Python
    that one of them has is seeded for the epoch as well. The first batches are drawn again and discarded.

    Raises:
        StateDictMismatchError: The sampler ends before the batch to start at.
    """
    parts = list(_samplers_within(sampler))
    for part in parts:
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
    held = chain.from_iterable(getattr(part, "__dict__", {}).values() for part in parts)
    generators = {id(value): value for value in held if is_generator(value)}
    order = BatchOrder(_in_bursts(sampler, PrivateRng("sampler", seed, epoch, generators=list(generators.values()))))
    skipped = sum(1 for _ in islice(order, start))
    if skipped < start:
        raise StateDictMismatchError(
            f"The sampler {type(sampler).__name__} returned {skipped} batches in epoch {epoch}, but the checkpoint was "
            f"saved after {start}. Build the sampler as in the saved run.",
            expected=start,
            actual=skipped,
        )
    return order


def rank_of(sampler: Any) -> int:
    """Return the rank whose samples a sampler, or one within it, gives; 0 if it gives all."""
    ranks = [getattr(part, "rank", None) for part in _samplers_within(sampler)]
    return next((rank for rank in ranks if isinstance(rank, int)), 0)


def _in_bursts(sampler: Iterable[Any], rng: PrivateRng) -> Iterator[Any]:
    iterator: Iterator[Any] | None = None
    while True:
        with rng:
            iterator = iter(sampler) if iterator is None else iterator
            burst = list(islice(iterator, _BURST))
        yield from burst
        if len(burst) < _BURST:
            return


def _samplers_within(sampler: Any) -> Iterator[Any]:
    """Yield a sampler and those that it wraps, by the two attribute names that torch and Accelerate use."""
    seen: set[int] = set()
    waiting = [sampler]
    while waiting:
        part = waiting.pop()
        if part is not None and id(part) not in seen:
            seen.add(id(part))
            yield part
            waiting += [getattr(part, "batch_sampler", None), getattr(part, "sampler", None)]


# The sampler and dataset within a ResumableDataLoader: tasks, and a dataset that loads each under its own seeds.


Task = tuple[int, int, Any]
"""Epoch, batch, and the indexes of its samples."""

PendingBatches = deque[tuple[int, int | None]]
"""Numbers of the batches that are being loaded, each with the checksum of the indexes up to it."""

_OWN = frozenset({"_dataset", "_collate", "_is_batched", "_seed", "_of_rank", "_numpy_bits"})


def identity_collate(batch: Any) -> Any:
    """Return a batch as it is: the `collate_fn` of a loader whose batches are collated already."""
    return batch


class TaskSampler:
    """The tasks of the inner loader's workers, as the sampler of a plain DataLoader."""

    def __init__(self) -> None:
        self._tasks: Iterator[Task] = iter(())

    def begin(self, order: BatchOrder, epoch: int, start: int) -> PendingBatches:
        """Begin another epoch; the iterator that returns its batches pops them from the returned deque."""
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
    """Maps a task to (number of the batch, collated batch); all other attributes are the dataset's.

    In the main process the RNGs are restored after each batch. In a worker nothing else draws from them.

    Args:
        dataset: The user's dataset.
        collate: The user's `collate_fn`.
        is_batched: Whether a task has several indexes; False: a single index.
        seed: Determines the seeds of a batch, together with epoch and batch.
        rank: The rank that these samples belong to: each rank draws other numbers; the first one draws those of a
            single process.
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
        ):  # pickle asks for these before the state exists
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._dataset, name, value)
