"""A DataLoader that resumes at the next batch, with the same order and augmentation as if it had never stopped."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from hfshard.errors import HfshardError, InvalidArgumentError, StaleIteratorError, StateDictMismatchError
from hfshard.training.data.sampling import (
    BatchOrder,
    EpochSampler,
    PendingBatches,
    SeededDataset,
    Task,
    TaskSampler,
    identity_collate,
    own_order,
    rank_of,
    sampler_order,
)
from hfshard.training.data.seeding import seeds_for

_T_co = TypeVar("_T_co", covariant=True)
_END = (-1, None)
_OF_WORKERS: Final = (
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
)
"""Arguments of a DataLoader, and its attributes, that determine no batch."""


class ResumableDataLoader(DataLoader[_T_co]):
    """A `torch.utils.data.DataLoader` with a position, which `state_dict` returns and `load_state_dict` restores.

        loader = ResumableDataLoader(dataset, batch_size=8, shuffle=True, seed=1)
        for epoch in range(loader.epoch, epochs):
            for batch in loader:
                ...

    This resumes exactly at the batch after the last one that the loop received; skipping loads nothing. A checkpoint
    that was saved at the last batch of an epoch resumes after it: the rest of that epoch is empty, so the loop does
    what it does at the end of an epoch.

    The order depends only on the seed and the epoch. Before each batch is loaded, Python's, numpy's and torch's RNGs
    are seeded from seed, epoch and batch: in the worker or, with `num_workers=0`, in this process, where they are
    restored afterwards. So whatever a dataset or `collate_fn` draws from them is the same for any number of workers,
    even if that number changes, and iterating changes no RNG of the training loop. The dataset's own RNG
    (`self.rng = numpy.random.default_rng()`) is not seen: draw from the global ones instead.

    The `set_epoch` method of a `sampler` or `batch_sampler` is called for each epoch, if there is one. While the
    sampler runs, the global RNGs, and a generator of torch, numpy or Python that it has, are seeded from seed and
    epoch, and restored afterwards. An order that depends on anything else is noticed at a resume within an epoch, which
    compares the indexes. Indexes are requested up to 64 batches ahead. With several ranks use a `DistributedSampler`:
    its rank is part of each batch's seeds, so that each rank augments differently.

    A loop that is left early keeps its position for `state_dict`; the next `iter()` begins the next epoch, except
    after `load_state_dict`, which continues, and after `set_epoch`, which begins that epoch. There is only one
    position, so only the newest iterator can be used. Pass `plain_loader(loader)` to code that builds its own loader
    from this one's parts, as `Accelerator.prepare` does.

    Args:
        generator: Only its `initial_seed()` is used, as the seed.
        in_order: Must be True; without order there is no position.
        seed: Any int; determines the order and what is drawn while data are loaded.

    All other arguments are those of torch's DataLoader.

    Raises:
        InvalidArgumentError: The dataset is an `IterableDataset`, which has no positions; `in_order=False`; or there
            are two seeds.
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
                f"The dataset of a ResumableDataLoader must be indexable, but {type(dataset).__name__} is an "
                "IterableDataset, which can only resume itself. Use torchdata.stateful_dataloader.StatefulDataLoader "
                "with a dataset that has state_dict and load_state_dict: a CheckpointManager accepts it as the loader."
            )
        if not in_order:
            raise InvalidArgumentError(
                "A ResumableDataLoader must return batches in order: otherwise 'batch 7' has no meaning. Pass "
                "in_order=True."
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
        """The checksum of the indexes of the epoch so far."""
        self._next_start: tuple[int, int] | None = None
        """The next iterator's start; None: here if no batch of the epoch was used, else the next epoch."""
        self._turn = 0
        """Counts changes of the position; after each one, older iterators cannot be used."""
        self._tasks = TaskSampler()
        self._inner: DataLoader[Any] | None = None
        """The loader that iterates; kept only with persistent workers, so that attributes may be set later."""

    @property
    def epoch(self) -> int:
        """The epoch of the position, from 0."""
        return self._epoch

    @property
    def batch(self) -> int:
        """The number of batches of the epoch that the loop has received."""
        return self._batch

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of another epoch. For the current one: stay, and do not leave it at the next `iter()`.

            loader.set_epoch(loader.epoch + 1)

        Args:
            epoch: From 0.
        """
        epoch = checked_int(epoch, "epoch")
        if epoch < 0:
            raise InvalidArgumentError(
                f"The epoch of a ResumableDataLoader must be 0 or more, got {epoch}.", actual=epoch
            )
        if epoch != self._epoch:
            self._go_to(epoch, 0)
            self._next_start = None
        elif self._next_start is None:
            self._next_start = (epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the settings that it depends on: ints, bools and a str.

        Example:
            position = loader.state_dict()
        """
        return {
            "format": STATE_FORMAT,
            "epoch": self._epoch,
            "batch": self._batch,
            "indexes_crc32": self._checksum,
            **settings_of(self, self.seed),
        }

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Check that a state fits this loader; nothing is changed.

            loader.check_state_dict(loader.state_dict())

        Raises:
            StateDictMismatchError: A setting differs; the message says which one, and what to do.
        """
        check_loader_state(state_dict, settings_of(self, self.seed))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go to the position of a `state_dict`; the next `iter()` continues there.

            loader.load_state_dict(loader.state_dict())

        Raises:
            StateDictMismatchError: The state does not fit, as in `check_state_dict`; nothing was changed.
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
        self._epoch = epoch
        self._batch = batch
        self._checksum = None

    def order(self, epoch: int, start: int = 0) -> BatchOrder:
        """Return the indexes of an epoch's batches, from a given one on; only the sampler's epoch is changed.

        Example:
            first_indexes = next(loader.order(epoch=0))
        """
        if not self._is_own_order:
            sampler = self.sampler if self.batch_sampler is None else self.batch_sampler
            return sampler_order(sampler, self.seed, epoch, start)
        own = self.sampler if isinstance(self.sampler, EpochSampler) else range(len(self.dataset))  # type: ignore[arg-type]
        return own_order(own, self.batch_size, self.drop_last, epoch, start)

    def _check_indexes(self, order: BatchOrder) -> None:
        if None not in (self._checksum, order.checksum) and self._checksum != order.checksum:
            raise StateDictMismatchError(
                f"Cannot resume the data loader in the middle of epoch {self._epoch}: the {self._batch} batches before "
                f"the checkpoint had other samples than {type(self.sampler).__name__} and the dataset give now. Make "
                "the order depend only on set_epoch() or the global RNGs, and build the loader with the same "
                f"arguments; or start an epoch with loader.set_epoch({self._epoch + 1}).",
                expected=self._checksum,
                actual=order.checksum,
            )

    def _make_inner(self) -> DataLoader[Any]:
        """Create a plain loader of tasks; it has its own generator, so that it does not draw from the global RNGs."""
        return DataLoader(
            seeded_dataset(self),  # type: ignore[arg-type]
            batch_size=None,
            sampler=self._tasks,
            collate_fn=identity_collate,
            generator=torch.Generator(torch.get_default_device()),  # the device where torch draws the workers' seed
            **worker_options(self),
        )


def worker_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the arguments of a loader that say how its batches are fetched, for one with other batches."""
    return {name: getattr(loader, name) for name in _OF_WORKERS}


def seeded_dataset(loader: ResumableDataLoader[Any]) -> SeededDataset:
    """Return a loader's dataset, wrapped so that it takes tasks and loads each under its own seeds."""
    rank = rank_of(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
    return SeededDataset(loader.dataset, loader.collate_fn, loader.batch_sampler is not None, loader.seed, rank)


class _EpochIterator:
    """One iteration over an epoch: returns the batches and moves the loader's position."""

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
                "This iterator of a ResumableDataLoader is no longer the newest: iter(), set_epoch() or "
                "load_state_dict() was called after it began. A loader has one position: read from the newest "
                "iterator, or create a loader for each."
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
            if pending == number:  # those before it failed, and the loop continued
                break
        loader._batch = number + 1
        loader._checksum = checksum
        return data

    def _finish(self) -> None:
        if self._pending and not self._has_failed:
            raise HfshardError(
                f"The dataset raised StopIteration in batch {self._loader.batch} of epoch {self._loader.epoch}, which "
                "would end the epoch silently. Make it raise IndexError, or the error that occurred."
            )
        self._batches = None
        self._loader._go_to(self._loader.epoch + 1, 0)
        self._loader._next_start = None


# The settings in a ResumableDataLoader's state, and checks that a state and numbers fit a loader.


STATE_FORMAT: Final = 1
_PLACES: Final = ("epoch", "batch")
_SETTINGS: Final = {
    "seed": "seed",
    "sampler": "sampler",
    "num_samples": "length of the dataset",
    "batch_size": "batch_size",
    "drop_last": "drop_last",
    "batches": "number of batches in an epoch",
}
"""Settings that must be the same at a resume -> their names in messages."""


def settings_of(loader: DataLoader[Any], seed: int) -> dict[str, Any]:
    """Return the settings that a position depends on: ints, bools and a str."""
    is_users_batches = loader.batch_size is None and loader.batch_sampler is not None
    by = loader.batch_sampler if is_users_batches else loader.sampler
    return {
        "seed": seed,
        "sampler": type(by).__name__,
        "num_samples": length_of(loader.dataset),
        "batch_size": getattr(by, "batch_size", None) if is_users_batches else loader.batch_size,
        "drop_last": bool(getattr(by, "drop_last", False)) if is_users_batches else loader.drop_last,
        "batches": None if is_users_batches else length_of(loader),  # a batch sampler may give fewer in some epochs
    }


def after_epoch(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Move a loader's state from the last batch of an epoch to the beginning of the next epoch.

    Other loaders' states are returned as they are.
    """
    if not {"indexes_crc32", *_PLACES, *_SETTINGS} <= state_dict.keys():
        return state_dict
    return {**state_dict, "epoch": state_dict["epoch"] + 1, "batch": 0, "indexes_crc32": None}


def check_loader_state(state_dict: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Check that a state fits a loader with these settings.

    Raises:
        StateDictMismatchError: A value differs; the message says which one, and what to do.
    """
    if not isinstance(state_dict, Mapping) or state_dict.get("format") != STATE_FORMAT:
        found = state_dict.get("format") if isinstance(state_dict, Mapping) else type(state_dict).__name__
        raise StateDictMismatchError(
            f"This is not a ResumableDataLoader's state of format {STATE_FORMAT} (found: {found!r}). Resume with"
            " the loader that the checkpoint was saved with, or without the loader's state.",
            expected=STATE_FORMAT,
            actual=found,
        )
    if missing := [name for name in (*_PLACES, *_SETTINGS) if name not in state_dict]:
        raise StateDictMismatchError(
            f"The data loader's state has no {', '.join(missing)}. Resume from another checkpoint.",
            missing_keys=tuple(missing),
        )
    for name, title in _SETTINGS.items():
        was = state_dict[name]
        now = settings[name]
        if was != now:
            raise StateDictMismatchError(
                f"Cannot resume the data loader: the checkpoint was saved with {title} {was!r}, but this loader has "
                f"{now!r}. Build the loader as in the saved run; or leave it out, restore(state, ..., "
                f"without=['loader']), and start an epoch with loader.set_epoch({state_dict['epoch']}).",
                expected=was,
                actual=now,
            )
    for name in _PLACES:
        if type(state_dict[name]) is not int or state_dict[name] < 0:
            raise StateDictMismatchError(
                f"The data loader's state has {name} {state_dict[name]!r}, which is not a valid position. Resume from "
                "another checkpoint.",
                actual=state_dict[name],
            )
    if settings["batches"] is not None and state_dict["batch"] > settings["batches"]:
        raise StateDictMismatchError(
            f"The data loader's state is at batch {state_dict['batch']} of {settings['batches']}. Resume from"
            " another checkpoint.",
            expected=settings["batches"],
            actual=state_dict["batch"],
        )


def length_of(sized: Any) -> int | None:
    """Return the length of an object; None if it has none."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def checked_seed(seed: int, generator: torch.Generator | None) -> int:
    """Return the seed as a plain int; if there is a generator, its seed."""
    seed = checked_int(seed, "seed")
    if generator is None:
        return seed
    if seed:
        raise InvalidArgumentError(
            f"A ResumableDataLoader cannot combine seed={seed} with a generator (seed {generator.initial_seed()}). "
            "Pass only one of them."
        )
    return int(generator.initial_seed())


def checked_int(value: Any, name: str) -> int:
    """Return a number, which may be numpy's or a tensor, as a plain int that can be stored."""
    if not isinstance(value, bool):
        with suppress(TypeError):
            return operator.index(value)
    raise InvalidArgumentError(f"The {name} of a ResumableDataLoader must be an int, got {value!r}.", actual=value)


# A plain DataLoader with the batches of a ResumableDataLoader, for code that takes loaders apart.


class TaskBatches:
    """A batch sampler whose batches are one task each, so that batches keep their seeds when they are split or skipped.

    `Accelerator.prepare`, `skip_first_batches` and Trainer build a new loader from the dataset, batch sampler and
    collate_fn of another. Here, these three determine a batch completely.

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
        epoch = self.epoch  # read at the first batch: torch creates two iterators, and uses one
        self.epoch += 1
        for batch, indexes in enumerate(self._loader.order(epoch)):
            yield [(epoch, batch, indexes)]


def plain_loader(loader: ResumableDataLoader[Any]) -> DataLoader[Any]:
    """Build a plain DataLoader with the same batches in the same epochs, which draws from no global RNG either.

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
        collate_fn=single_batch,
        generator=torch.Generator(torch.get_default_device()).manual_seed(0),
        **worker_options(loader),
    )


def single_batch(done: list[tuple[int, Any]]) -> Any:
    """Return the collated batch of the only task."""
    [(_, batch)] = done
    return batch
