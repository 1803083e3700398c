"""A DataLoader that resumes at the next batch, with the same order and the same augmentation as if never stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from hfshard.errors import HfshardError, InvalidArgumentError, StaleIteratorError, StateDictMismatchError
from hfshard.training.data.fetching import PendingBatches, SeededDataset, TaskSampler, identity
from hfshard.training.data.loader_state import STATE_FORMAT, check_state, checked_int, checked_seed, settings_of
from hfshard.training.data.sampling import BatchOrder, EpochSampler, own_order, sampler_order
from hfshard.training.data.seeding import seeds_for

_T_co = TypeVar("_T_co", covariant=True)
_END = (-1, None)


class ResumableDataLoader(DataLoader[_T_co]):
    """A `torch.utils.data.DataLoader` with a position, which `state_dict` gives and `load_state_dict` goes back to.

        loader = ResumableDataLoader(dataset, batch_size=8, shuffle=True, seed=1)
        for epoch in range(loader.epoch, epochs):
            for batch in loader:
                ...

    resumes exactly at the batch after the last one that the loop was handed; skipping loads nothing. A checkpoint of
    the last batch of an epoch resumes behind it: the rest of that epoch is then empty, and what the loop does at an
    epoch's end is done as it would have been.

    The order depends on seed and epoch alone. Before each batch is loaded, python's, numpy's and torch's RNGs are
    seeded from seed, epoch and batch, in the worker or, with `num_workers=0`, here, where they are put back
    afterwards. So what a dataset or `collate_fn` draws from them is the same for any number of workers, also if that
    changes in between; and iterating changes no RNG of the training loop. An RNG of the dataset's own
    (`self.rng = numpy.random.default_rng()`) is not seen: draw from the global ones instead.

    A `sampler` or `batch_sampler` is told each epoch by `set_epoch`, if it has that, and is otherwise run as it is,
    with the global RNGs, and with a `torch.Generator` that it holds, seeded from seed and epoch, and put back. One
    whose order depends on anything else is found out when it is resumed: the indexes are compared. It is asked for up
    to 64 batches ahead. With several ranks use a `DistributedSampler`; for other augmentation on each rank, another
    seed on each.

    A loop that is left early keeps its position for `state_dict`; the next `iter()` begins the next epoch, except
    after `load_state_dict`, which continues, and after `set_epoch`, which begins that epoch. There is one position,
    and so only the newest iterator can be used. Code that builds a loader of its own from this one's parts, as
    `Accelerator.prepare` does, is to be given `plain_loader(loader)` (see there).

    Args:
        generator: Only its `initial_seed()` is used, as the seed.
        in_order: True; without order there is no position.
        seed: Any int; the seed of the order and of what is drawn while loading.

    All other arguments are those of torch's DataLoader.

    Raises:
        InvalidArgumentError: An `IterableDataset`, which has no positions to go to; `in_order=False`; two seeds.
    """

    def __init__(
        self,
        dataset: Dataset[_T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        seed: int = 0,
    ) -> None:
        self.seed = checked_seed(seed, generator)
        if isinstance(dataset, IterableDataset):
            raise InvalidArgumentError(
                f"A ResumableDataLoader needs a dataset with indexes, and {type(dataset).__name__} is an"
                " IterableDataset, which only itself can resume. Use torchdata.stateful_dataloader.StatefulDataLoader"
                " with a dataset that has state_dict and load_state_dict: a CheckpointManager takes it as the loader."
            )
        if not in_order:
            raise InvalidArgumentError(
                "A ResumableDataLoader gives batches in order, or 'batch 7' would have no meaning: in_order=True."
            )
        own_shuffle = bool(shuffle) and sampler is None and batch_sampler is None
        self._is_own_order = sampler is None and batch_sampler is None
        super().__init__(
            dataset,
            batch_size,
            None if own_shuffle else shuffle,
            EpochSampler(dataset, self.seed) if own_shuffle else sampler,  # type: ignore[arg-type]
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        self._epoch = 0
        self._batch = 0
        self._checksum: int | None = None
        """Of the indexes of the epoch so far."""
        self._next_start: tuple[int, int] | None = None
        """Where the next iterator begins; None: at the position if no batch was consumed, else at the next epoch."""
        self._turn = 0
        """Counts the moves, each of which ends the use of older iterators."""
        self._tasks = TaskSampler()
        self._inner: DataLoader[Any] | None = None
        """What iterates; kept only with persistent workers, so that other attributes may be set later, as in torch."""

    @property
    def epoch(self) -> int:
        """The epoch of the position, from 0; that of the next batch, unless the last one's end was not yet seen."""
        return self._epoch

    @property
    def batch(self) -> int:
        """How many batches of the epoch the loop has been handed."""
        return self._batch

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of another epoch. Of the same one: stay, but do not leave the epoch at the next `iter()`.

        Args:
            epoch: From 0.
        """
        epoch = checked_int(epoch, "epoch")
        if epoch < 0:
            raise InvalidArgumentError(f"The epoch of a ResumableDataLoader is from 0 on, not {epoch}.", actual=epoch)
        if epoch != self._epoch:
            self._go_to(epoch, 0)
            self._next_start = None
        elif self._next_start is None:
            self._next_start = (epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """The position, and the settings without which it means nothing: ints, bools and a str."""
        return {
            "format": STATE_FORMAT,
            "epoch": self._epoch,
            "batch": self._batch,
            "indexes_crc32": self._checksum,
            **settings_of(self, self.seed),
        }

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Check that a state fits this loader; changes nothing.

        Raises:
            StateDictMismatchError: It says which value was and is, and what to do.
        """
        check_state(state_dict, settings_of(self, self.seed))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go to the position of a `state_dict`; the next `iter()` continues there.

        Raises:
            StateDictMismatchError: The state does not fit; nothing was changed. See `check_state_dict`.
        """
        self.check_state_dict(state_dict)
        self._go_to(state_dict["epoch"], state_dict["batch"])
        self._checksum = state_dict.get("indexes_crc32")
        self._next_start = (self._epoch, self._batch)

    def __iter__(self) -> _EpochIterator:  # type: ignore[override]
        start = self._next_start
        if start is None:
            start = (self._epoch + 1, 0) if self._batch else (self._epoch, 0)
        order = self.order(*start)
        if start == (self._epoch, self._batch):
            self._check_indexes(order)
        self._next_start = None
        self._go_to(*start)
        self._checksum = order.checksum
        pending = self._tasks.begin(order, *start)
        if self._inner is None or not self.persistent_workers:
            self._inner = self._make_inner()
        self._inner.generator.manual_seed(seeds_for("workers", self.seed, self._epoch).torch)
        return _EpochIterator(self, iter(self._inner), pending)

    def _go_to(self, epoch: int, batch: int) -> None:
        self._turn += 1
        self._epoch, self._batch, self._checksum = epoch, batch, None

    def order(self, epoch: int, start: int = 0) -> BatchOrder:
        """The indexes of the batches of an epoch, from one on; moves nothing but the sampler's epoch."""
        if not self._is_own_order:
            sampler = self.sampler if self.batch_sampler is None else self.batch_sampler
            return sampler_order(sampler, self.seed, epoch, start)
        own = self.sampler if isinstance(self.sampler, EpochSampler) else range(len(self.dataset))  # type: ignore[arg-type]
        return own_order(own, self.batch_size, self.drop_last, epoch, start)

    def _check_indexes(self, order: BatchOrder) -> None:
        if None not in (self._checksum, order.checksum) and self._checksum != order.checksum:
            raise StateDictMismatchError(
                f"The data loader can't resume in the middle of epoch {self._epoch}: the {self._batch} batches before"
                f" the checkpoint had other samples than {type(self.sampler).__name__} and the dataset give now. Make"
                " its order a function of set_epoch() or of the global RNGs, and its arguments those of then; or begin"
                f" an epoch: loader.set_epoch({self._epoch + 1}).",
                expected=self._checksum,
                actual=order.checksum,
            )

    def _make_inner(self) -> DataLoader[Any]:
        """A plain loader of our tasks: with its own generator, it draws from nobody's RNG."""
        return DataLoader(
            SeededDataset(self.dataset, self.collate_fn, self.batch_sampler is not None, self.seed),  # type: ignore[arg-type]
            batch_size=None,
            sampler=self._tasks,
            num_workers=self.num_workers,
            collate_fn=identity,
            pin_memory=self.pin_memory,
            timeout=self.timeout,
            worker_init_fn=self.worker_init_fn,
            multiprocessing_context=self.multiprocessing_context,
            generator=torch.Generator(torch.get_default_device()),  # where torch draws the workers' seed
            prefetch_factor=self.prefetch_factor,
            persistent_workers=self.persistent_workers,
            pin_memory_device=self.pin_memory_device,
        )


class _EpochIterator:
    """One iteration: hands out batches and moves the loader's position."""

    def __init__(self, loader: ResumableDataLoader[Any], batches: Iterator[Any], pending: PendingBatches) -> None:
        self._loader = loader
        self._turn = loader._turn
        self._batches: Iterator[Any] | None = batches
        self._pending = pending
        self._has_failed = False

    def __iter__(self) -> _EpochIterator:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        loader = self._loader
        if self._batches is None:
            raise StopIteration
        if self._turn != loader._turn:
            raise StaleIteratorError(
                "This iterator of a ResumableDataLoader is no longer the newest: iter(), set_epoch() or"
                " load_state_dict() was called after it began. The loader has one position, so read from the newest,"
                " or make a loader for each."
            )
        try:
            number, data = next(self._batches, _END)
        except BaseException:
            self._has_failed = True
            raise
        if number < 0:
            self._finish()
            raise StopIteration
        while self._pending:
            pending, checksum = self._pending.popleft()
            if pending == number:  # those before it have failed, and the loop went on
                break
        loader._batch, loader._checksum = number + 1, checksum
        return data

    def _finish(self) -> None:
        if self._pending and not self._has_failed:
            raise HfshardError(
                f"The dataset raised StopIteration in batch {self._loader.batch} of epoch {self._loader.epoch}, which"
                " would end the epoch unseen. Let it raise IndexError, or what went wrong."
            )
        self._batches = None
        self._loader._go_to(self._loader.epoch + 1, 0)
        self._loader._next_start = None
