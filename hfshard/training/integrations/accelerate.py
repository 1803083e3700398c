"""One training state for what Accelerate prepared, and a loader for an Accelerator that keeps its position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, DataLoaderShard, DataLoaderStateMixin
from accelerate.utils import DistributedType, send_to_device
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from hfshard.errors import InvalidArgumentError, StateDictMismatchError
from hfshard.training.data.dataloader import ResumableDataLoader, worker_options
from hfshard.training.data.sampling import sampler_order
from hfshard.training.data.seeding import seeds_for
from hfshard.training.state.rng import Gradients
from hfshard.training.state.training_state import TrainingState

_REFUSED: Final = frozenset(
    one for name in ("DEEPSPEED", "MEGATRON_LM", "XLA") if (one := getattr(DistributedType, name, None)) is not None
)
"""Backends that keep parts of the state to themselves."""
_PROCESSES: Final = "processes"
"""The key of a position: the number of processes that had their own batches."""


class PreparedLoader(DataLoaderStateMixin):  # type: ignore[misc]
    """A ResumableDataLoader whose batches are moved to an Accelerator's device; created by `prepare_loader`.

    The Accelerator learns where an epoch ends, so a gradient accumulation ends there. Only the workers of the loader
    fetch batches ahead of the loop.

    Args:
        loader: Provides the batches of this process.
        accelerator: The Accelerator to whose device they are moved.
        processes: The number of processes with their own batches. The last of several may repeat samples, which
            `gather_for_metrics` then leaves out.
    """

    def __init__(self, loader: ResumableDataLoader[Any], accelerator: Accelerator, processes: int = 1) -> None:
        batches: Any = loader.batch_sampler
        self.loader = loader
        self.device = accelerator.device
        self.gradient_state = accelerator.gradient_state
        self.processes = processes
        self.total_batch_size = (getattr(batches, "batch_size", None) or 1) * (
            1 if accelerator.split_batches else processes
        )
        self._drop_last = processes == 1 or batches.drop_last  # `begin` reads it: whether no batch repeats samples

    @property
    def dataset(self) -> Any:
        """The loader's dataset."""
        return self.loader.dataset

    @property
    def epoch(self) -> int:
        """The loader's epoch."""
        return self.loader.epoch

    @property
    def batch(self) -> int:
        """The number of batches of the epoch that the loop has received."""
        return self.loader.batch

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch, as `ResumableDataLoader.set_epoch` does."""
        self.loader.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        self.begin()
        try:
            for batch in batches:
                self.end_of_dataloader = self.loader.batch == len(self.loader)
                yield send_to_device(batch, self.device)
        finally:
            self.end()


def prepare_loader(accelerator: Accelerator, loader: ResumableDataLoader[Any]) -> PreparedLoader:
    """Prepare a loader; use it instead of `accelerator.prepare(loader)`, which builds one without a position.

        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        loader = prepare_loader(accelerator, ResumableDataLoader(dataset, batch_size=8, shuffle=True))

    With several processes, each gets its share of the batches, as from `accelerator.prepare`, and draws other numbers
    while it loads them; those of a tensor parallel group get the same.

    Args:
        accelerator: The Accelerator.
        loader: The loader of all batches, not prepared. With one process it is used, not copied.

    Returns:
        The loader to iterate.

    Raises:
        InvalidArgumentError: The Accelerator is not supported; or the loader is not a ResumableDataLoader, or one whose
            batches cannot be shared out.
    """
    _check_supported(accelerator)
    if not isinstance(loader, ResumableDataLoader):
        raise InvalidArgumentError(
            f"The loader must be a ResumableDataLoader that was not prepared, got a {type(loader).__name__}. Create "
            "one: hfshard.training.ResumableDataLoader takes a DataLoader's arguments."
        )
    share = BatchShare.of(accelerator)
    if share.count == 1:
        return PreparedLoader(loader, accelerator)
    return PreparedLoader(_share_of_batches(accelerator, loader, share), accelerator, share.count)


def prepared_state(
    accelerator: Accelerator,
    model: nn.Module | None = None,
    optimizer: Any = None,
    scheduler: Any = None,
    loader: Any = None,
    **stateful: Any,
) -> TrainingState:
    """Create the training state of prepared objects, with the Accelerator's scaler and its count of batches.

        state = prepared_state(accelerator, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
        step = manager.restore_latest(state) or 0

    Save where a gradient accumulation has ended (`accelerator.sync_gradients`), or pass `gradients=Gradients(model)`:
    without it, gradients are not saved, and a save in the middle is rejected.

    Args:
        accelerator: The Accelerator, with one process, DistributedDataParallel, or FSDP2.
        model, optimizer, scheduler: What `accelerator.prepare` returned.
        loader: What `prepare_loader` returned, or any loader with a position, as in TrainingState.
        stateful: More parts, as in TrainingState.

    Returns:
        The state, for a CheckpointManager. With several processes, all of them save and restore.

    Raises:
        InvalidArgumentError: The Accelerator is not supported, or the loader has no position.
    """
    _check_supported(accelerator)
    if isinstance(loader, DataLoaderShard | DataLoaderDispatcher) and not loader.use_stateful_dataloader:
        raise InvalidArgumentError(
            "accelerator.prepare built a loader that has no position. Do not prepare it: loader = "
            "prepare_loader(accelerator, ResumableDataLoader(...))."
        )
    return TrainingState(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=_Position(loader) if isinstance(loader, PreparedLoader) else loader,
        scaler=accelerator.scaler,
        accelerator=_Accumulation(accelerator, any(isinstance(part, Gradients) for part in stateful.values())),
        **stateful,
    )


class _Position:
    """The position of a process in its batches, which differ with another number of processes."""

    def __init__(self, prepared: PreparedLoader) -> None:
        self._loader = prepared.loader
        self._processes = prepared.processes

    def state_dict(self) -> dict[str, Any]:
        return {**self._loader.state_dict(), _PROCESSES: self._processes}

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        was = state_dict.get(_PROCESSES, 1) if isinstance(state_dict, Mapping) else self._processes
        if was != self._processes:
            raise StateDictMismatchError(
                f"The batches were shared out to {was} processes when the checkpoint was saved, but are shared out to "
                f"{self._processes} now. Resume with {was}; or pass strict=False, which leaves the loader as it is, "
                "and start an epoch with loader.set_epoch(...).",
                expected=was,
                actual=self._processes,
            )
        self._loader.check_state_dict(state_dict)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.check_state_dict(state_dict)
        self._loader.load_state_dict(state_dict)


class _Accumulation:
    """The number of batches that the Accelerator has counted since its count last restarted."""

    def __init__(self, accelerator: Accelerator, has_gradients: bool) -> None:
        self._accelerator = accelerator
        self._has_gradients = has_gradients

    def state_dict(self) -> dict[str, Any]:
        accelerator = self._accelerator
        is_over = accelerator.sync_gradients
        if not is_over and accelerator.is_fsdp2 and not accelerator.gradient_state.plugin_kwargs.get("sync_each_batch"):
            raise InvalidArgumentError(
                "Under FSDP2, accumulated gradients are not reduced before the last batch, so no checkpoint can "
                "contain them until then. Save where the accumulation has ended (if accelerator.sync_gradients: "
                "manager.save(step, state)), or pass the Accelerator a GradientAccumulationPlugin with "
                "sync_each_batch=True."
            )
        if not (is_over or self._has_gradients):
            raise InvalidArgumentError(
                "A checkpoint in the middle of a gradient accumulation would lose the gradients so far. Save where it "
                "has ended (if accelerator.sync_gradients: manager.save(step, state)), or save them too: "
                "prepared_state(..., gradients=Gradients(model))."
            )
        return {"step": self._accelerator.step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._accelerator.step = state_dict["step"]


def _share_of_batches(
    accelerator: Accelerator, loader: ResumableDataLoader[Any], share: BatchShare
) -> ResumableDataLoader[Any]:
    """Create the loader of one of several processes, as `accelerator.prepare` shares batches out."""
    if loader.batch_sampler is None or accelerator.dispatch_batches or isinstance(loader.sampler, DistributedSampler):
        raise InvalidArgumentError(
            "prepare_loader shares the batches of all samples out to the processes. Pass the loader a batch_size and "
            "no DistributedSampler, and do not pass the Accelerator dispatch_batches=True, which loads all batches in "
            "one process."
        )
    batches = BatchSamplerShard(
        loader.batch_sampler,
        num_processes=share.count,
        process_index=share.index,
        split_batches=accelerator.split_batches,
        even_batches=accelerator.even_batches,
    )
    return share.loader(loader, batches, loader.seed)


def _check_supported(accelerator: Accelerator) -> None:
    kind = accelerator.distributed_type
    if kind in _REFUSED:
        raise InvalidArgumentError(
            f"This Accelerator uses {kind.value}, which keeps parts of the state to itself, so a checkpoint would lack "
            "them. Use DistributedDataParallel or FSDP2."
        )
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise InvalidArgumentError(
            "This Accelerator uses FSDP1, whose gradients between micro-batches have no names and shapes. Use FSDP2: "
            "Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))."
        )


# Shares of the batches that the processes of an Accelerator load, in an order that all compute alike.


_BATCH_DIMS: Final = ("dp_replicate", "dp_shard")
"""The dimensions of Accelerate's device mesh along which processes get their own batches; ranks along the last ones,
for tensor and context parallelism, share a batch."""


@dataclass(frozen=True, slots=True)
class BatchShare:
    """This process's index among those with their own batches; processes that share batches have equal shares."""

    index: int
    count: int

    @classmethod
    def of(cls, accelerator: Accelerator) -> BatchShare:
        """Return the share of this process."""
        mesh = accelerator.torch_device_mesh
        if mesh is None:
            return cls(accelerator.process_index, accelerator.num_processes)
        count = prod(mesh[name].size() for name in _BATCH_DIMS if name in mesh.mesh_dim_names)
        return cls(accelerator.process_index // (accelerator.num_processes // count), count)

    def loader(self, loader: DataLoader[Any], batches: Any, seed: int) -> ResumableDataLoader[Any]:
        """Create the loader of this share. It draws what no other share draws; the first draws what one process does.

        Args:
            loader: Provides everything but the batches.
            batches: The batch sampler of this share.
            seed: The same on all ranks.
        """
        own_seed = seed if self.index == 0 else seeds_for("rank", seed, self.index).torch
        return ResumableDataLoader(
            loader.dataset,
            batch_sampler=batches if self.count == 1 else RankBatches(batches, seed),
            collate_fn=loader.collate_fn,
            in_order=loader.in_order,
            seed=own_seed,
            **worker_options(loader),
        )


class RankBatches:
    """The batch sampler of one rank, whose order is drawn under seeds that all ranks have in common.

    So the loader around it may have its own seed, under which this rank's batches are augmented.

    Args:
        batches: Provides the batches of this rank, in an order that it computes for all ranks.
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
