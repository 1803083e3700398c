"""Makes one training state of what Accelerate prepared, and a loader for an Accelerator that keeps its position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, DataLoaderStateMixin
from accelerate.utils import DistributedType, send_to_device
from torch import nn

from hfshard.errors import InvalidArgumentError
from hfshard.training.data.dataloader import ResumableDataLoader
from hfshard.training.parts.gradients import Gradients
from hfshard.training.state import TrainingState


class PreparedLoader(DataLoaderStateMixin):  # type: ignore[misc]
    """A ResumableDataLoader whose batches are moved to an Accelerator's device; made by `prepare_loader`.

    The Accelerator learns where an epoch ends, so a gradient accumulation ends there. Only the workers of the loader
    fetch batches ahead of the loop.
    """

    _drop_last = True  # `begin` reads it: no batch repeats samples

    def __init__(self, loader: ResumableDataLoader[Any], accelerator: Accelerator) -> None:
        self.loader = loader
        self.device = accelerator.device
        self.gradient_state = accelerator.gradient_state

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
        """How many batches of the epoch the loop has received."""
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
    """Prepare a loader; takes the place of `accelerator.prepare(loader)`, which builds one without a position.

        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        loader = prepare_loader(accelerator, ResumableDataLoader(dataset, batch_size=8, shuffle=True))

    Args:
        accelerator: The Accelerator of a single process.
        loader: The loader, which was not prepared. It is used, not copied.

    Returns:
        The loader to iterate.

    Raises:
        InvalidArgumentError: There are several processes, or it is not a ResumableDataLoader.
    """
    _refuse_several_processes(accelerator)
    if not isinstance(loader, ResumableDataLoader):
        raise InvalidArgumentError(
            f"prepare_loader takes a ResumableDataLoader that was not prepared, got a {type(loader).__name__}. "
            "Make one: hfshard.training.ResumableDataLoader takes a DataLoader's arguments."
        )
    return PreparedLoader(loader, accelerator)


def prepared_state(
    accelerator: Accelerator,
    model: nn.Module | None = None,
    optimizer: Any = None,
    scheduler: Any = None,
    loader: Any = None,
    **stateful: Any,
) -> TrainingState:
    """Make the training state of prepared objects, with the Accelerator's scaler and its count of batches.

        state = prepared_state(accelerator, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
        step = manager.restore_latest(state) or 0

    Save where a gradient accumulation has ended (`accelerator.sync_gradients`), or pass `gradients=Gradients(model)`:
    without it, gradients are not saved, and a save in the middle is refused.

    Args:
        accelerator: The Accelerator of a single process.
        model, optimizer, scheduler: What `accelerator.prepare` returned.
        loader: What `prepare_loader` returned, or any loader with a position, as in TrainingState.
        stateful: More parts, as in TrainingState.

    Returns:
        The state, for a CheckpointManager.

    Raises:
        InvalidArgumentError: There are several processes, or the loader has no position.
    """
    _refuse_several_processes(accelerator)
    if isinstance(loader, DataLoaderShard | DataLoaderDispatcher) and not loader.use_stateful_dataloader:
        raise InvalidArgumentError(
            "accelerator.prepare built a loader without a position of its own. Do not prepare it: "
            "loader = prepare_loader(accelerator, ResumableDataLoader(...))."
        )
    return TrainingState(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=loader.loader if isinstance(loader, PreparedLoader) else loader,
        scaler=accelerator.scaler,
        accelerator=_Accumulation(accelerator, any(isinstance(part, Gradients) for part in stateful.values())),
        **stateful,
    )


class _Accumulation:
    """The number of batches that the Accelerator has counted since it last started over."""

    def __init__(self, accelerator: Accelerator, has_gradients: bool) -> None:
        self._accelerator = accelerator
        self._has_gradients = has_gradients

    def state_dict(self) -> dict[str, Any]:
        if not (self._accelerator.sync_gradients or self._has_gradients):
            raise InvalidArgumentError(
                "A checkpoint in the middle of a gradient accumulation would lose the gradients so far. Save where it "
                "has ended (if accelerator.sync_gradients: manager.save(step, state)), or save them too: "
                "prepared_state(..., gradients=Gradients(model))."
            )
        return {"step": self._accelerator.step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._accelerator.step = state_dict["step"]


def _refuse_several_processes(accelerator: Accelerator) -> None:
    if accelerator.num_processes > 1 or accelerator.distributed_type != DistributedType.NO:
        raise InvalidArgumentError(
            f"A CheckpointManager saves the state of one process, and this Accelerator has {accelerator.num_processes} "
            f"({accelerator.distributed_type}): the random state and data position of the others would be lost."
        )
