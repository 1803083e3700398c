"""The samples of each batch of an epoch: a function of the seed and the epoch, which can start at any batch."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from typing import Any, Final

import torch
from torch.utils.data import Sampler

from hfshard.errors import StateDictMismatchError
from hfshard.training.data.seeding import PrivateRng, is_generator, seeds_for

_BURST: Final = 64
"""Batches that are drawn from a sampler at a time, so that swapping the RNG states costs 2 us a batch, not 150."""
_CHUNK: Final = 4096
"""Indexes that become Python's ints at a time."""


class EpochSampler(Sampler[int]):
    """All indexes in an order for each epoch that depends on seed and epoch only; it draws from no global RNG.

    It is `loader.sampler` of a `ResumableDataLoader` that shuffles, so that code which builds another loader from that
    one's parts, as Accelerate does, keeps the order. Without `set_epoch`, each iteration is the next epoch.

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
        """Return the indexes of an epoch as an int64 array of numpy, 8 bytes a sample."""
        generator = torch.Generator().manual_seed(seeds_for("order", self.seed, epoch).torch)
        return torch.randperm(len(self.data_source), generator=generator, device="cpu").numpy()

    def __len__(self) -> int:
        return len(self.data_source)

    def __iter__(self) -> Iterator[int]:
        order = self.order(self.epoch)  # read at the first index: torch makes two iterators, and uses one
        self.epoch += 1
        for begin in range(0, len(order), _CHUNK):
            yield from order[begin : begin + _CHUNK].tolist()


class BatchOrder:
    """An iterator over the batches of one epoch, from the first that was not used yet.

    Attributes:
        checksum: CRC-32 of all indexes up to the last batch that was given, without those that are not ints; None where
            the order can't change.

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
        if isinstance(indexes, Iterator):  # it can be read only once, and can't be sent to workers
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
    """Return the batches of an order of ours. Skipping costs a CRC of 8 bytes a sample, and nothing without shuffling.

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
    """Return the batches of a sampler of the user's; it draws from RNG states that seed and epoch determine.

    `set_epoch` is called on it and on the samplers within it, where they have it. A generator of torch, numpy or Python
    that one of them holds is seeded for the epoch as well. The first batches are drawn again and discarded.

    Raises:
        StateDictMismatchError: It ends before the batch to start at.
    """
    parts = list(_samplers_within(sampler))
    for part in parts:
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
    generators = {id(value): value for part in parts for value in _attribute_values(part) if is_generator(value)}
    order = BatchOrder(_in_bursts(sampler, PrivateRng("sampler", seed, epoch, generators=list(generators.values()))))
    skipped = sum(1 for _ in islice(order, start))
    if skipped < start:
        raise StateDictMismatchError(
            f"The sampler {type(sampler).__name__} gives {skipped} batches in epoch {epoch}, and the checkpoint was"
            f" saved after {start} of them. Build the sampler as it was then.",
            expected=start,
            actual=skipped,
        )
    return order


def rank_of(sampler: Any) -> int:
    """The rank whose samples a sampler, or one within it, gives; 0 where it gives all."""
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
    """A sampler and those that it wraps, by the two attribute names that torch and Accelerate use."""
    seen: set[int] = set()
    waiting = [sampler]
    while waiting:
        part = waiting.pop()
        if part is not None and id(part) not in seen:
            seen.add(id(part))
            yield part
            waiting += [getattr(part, "batch_sampler", None), getattr(part, "sampler", None)]


def _attribute_values(part: Any) -> Iterable[Any]:
    return vars(part).values() if hasattr(part, "__dict__") else ()
