"""Lightning's Trainer saves and resumes through a CheckpointManager, by a callback that is exact to the last bit."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any, Final

from hfshard.errors import InvalidArgumentError
from hfshard.training.data.dataloader import after_epoch
from hfshard.training.manager import CheckpointManager
from hfshard.training.state.rng import rng_state, set_rng_state
from hfshard.training.state.step import RestoredStep
from hfshard.training.state.training_state import TrainingState

_NAMES: Final = ("lightning.pytorch", "pytorch_lightning")
"""Lightning has two package names; the classes of one are not those of the other."""
_STRATEGIES: Final = ("SingleDeviceStrategy", "DDPStrategy")
"""Strategies under which each process has the full model, with no part of it or of the optimizer elsewhere."""
_HOOKS: Final = ("on_save_checkpoint", "on_load_checkpoint")
"""Hooks that change Lightning's own checkpoint file, which hfshard does not write."""


def lightning_callback(
    manager: CheckpointManager,
    *,
    every_n_train_steps: int | None = None,
    resume: bool | int | str | os.PathLike[str] = False,
    blocking: bool = True,
) -> Any:
    """Create a callback that saves and resumes a Lightning training, in place of `ModelCheckpoint`.

        manager = CheckpointManager("run", max_to_keep=3)
        checkpoints = lightning_callback(manager, every_n_train_steps=100, resume=True)
        trainer = lightning.Trainer(callbacks=[checkpoints])
        trainer.fit(model, ResumableDataLoader(dataset, batch_size=8, shuffle=True))

    With a `ResumableDataLoader`, or another loader that has a position, a resumed training equals the straight one, bit
    for bit: weights, optimizers, schedulers, RNG, batches, and the state of other callbacks. Without one, Lightning
    starts the epoch's data again. No pickle is written. The weights are a checkpoint like any other: `load_model`
    accepts them.

    Callbacks and data modules keep their state by `state_dict` and `load_state_dict`, modules theirs in buffers. `fit`
    rejects what would not resume exactly: `on_save_checkpoint` and `on_load_checkpoint` of a module or a callback (such
    as EMAWeightAveraging), StochasticWeightAveraging, and ReduceLROnPlateau under automatic optimization: Lightning
    steps it after the save, by metrics that no checkpoint has.

    A save that is due at an epoch's last batch waits until the end of the epoch.

    Args:
        manager: Decides which checkpoints to keep; as metrics it gets the numbers in `trainer.callback_metrics`.
        every_n_train_steps: Save after every N optimizer steps. None: after each epoch.
        resume: True: from the newest complete checkpoint, if the run has one. Or from a step, or another place, as in
            `CheckpointManager.restore`.
        blocking: Like that of `CheckpointManager.save`.

    Returns:
        A Checkpoint of `lightning.pytorch`, or of `pytorch_lightning` if only that is imported or installed. Its
        `restored` is the step from which `fit` has resumed.

    Raises:
        InvalidArgumentError: `every_n_train_steps` is not a number of steps. Later, by `fit`: the Trainer's strategy is
            neither for one process nor DistributedDataParallel, or a part of the training cannot be resumed exactly;
            the message names it.
        ModuleNotFoundError: Lightning is not installed.
    """
    if every_n_train_steps is not None and every_n_train_steps < 1:
        raise InvalidArgumentError(f"every_n_train_steps must be at least 1, got {every_n_train_steps}.")
    callback = _callback_class(_lightning())()
    callback.manager = manager
    callback.every_n_train_steps = every_n_train_steps
    callback.resume = resume
    callback.blocking = blocking
    return callback


def _lightning() -> str:
    """Return the name of the package whose Trainer is in use."""
    for name in _NAMES:
        if name in sys.modules:
            return name
    try:
        return import_module(_NAMES[0]).__name__
    except ModuleNotFoundError:
        return import_module(_NAMES[1]).__name__


@cache
def _callback_class(package: str) -> Any:
    base = import_module(f"{package}.callbacks").Checkpoint
    return type("LightningCheckpoint", (_Saving, base), {"package": package})


class _Saving:
    """The hooks of the callback."""

    package: str
    manager: CheckpointManager
    every_n_train_steps: int | None
    resume: bool | int | str | os.PathLike[str]
    blocking: bool
    restored: RestoredStep | None = None
    _rng: dict[str, Any] | None = None
    """The RNG states of the checkpoint that is being resumed, until the first batch."""
    _saved: int | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore; the optimizers exist by now."""
        self.restored = self._rng = self._saved = None
        _check_trainer(trainer, self.package)
        if self.resume is False:
            return
        state = _training_state(trainer, self)
        if self.resume is True:
            self.restored = self.manager.restore_latest(state)
        else:
            self.restored = self.manager.restore(state, self.resume)
        self._saved = self.restored
        if self.restored is not None:
            self._rng = rng_state()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore the random states again: Lightning has drawn from them to start the data."""
        if self._rng is not None:
            _load_positions(trainer.fit_loop)
            scheduler = import_module(f"{self.package}.callbacks").GradientAccumulationScheduler
            for one in trainer.callbacks:
                if isinstance(one, scheduler):
                    one.on_train_epoch_start(trainer)  # Lightning does not start an epoch again that it resumes
            set_rng_state(self._rng)
            self._rng = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save if the number of steps has been reached, but not at an epoch's last batch: the epoch has yet to end."""
        if not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch and self._is_due(trainer.global_step):
            self._save(trainer, trainer.global_step)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Save, if each epoch is to be saved or the number of steps has been reached."""
        if self.every_n_train_steps is None or self._is_due(trainer.global_step):
            self._save(trainer, trainer.global_step)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Wait for the last save."""
        self.manager.wait_until_finished()

    def _is_due(self, step: int) -> bool:
        every = self.every_n_train_steps
        return every is not None and step // every > (self._saved or 0) // every  # a batch can skip a multiple

    def _save(self, trainer: Any, step: int) -> None:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.manager.save(step, _training_state(trainer, self), metric=metrics or None, blocking=self.blocking)
        self._saved = step


def _check_trainer(trainer: Any, package: str) -> None:
    """Reject what would not be resumed exactly."""
    strategy = type(trainer.strategy).__name__
    if strategy not in _STRATEGIES:
        raise InvalidArgumentError(
            f"This Trainer uses {strategy}, but lightning_callback supports only single-process training and "
            "DistributedDataParallel. Use strategy='ddp', or train without the callback."
        )
    lightning = import_module(package)
    empty = [getattr(base, hook) for base in (lightning.LightningModule, lightning.Callback) for hook in _HOOKS]
    for part in (trainer.lightning_module, *trainer.callbacks):
        if own := [hook for hook in _HOOKS if getattr(getattr(part, hook), "__func__", None) not in empty]:
            raise InvalidArgumentError(
                f"{type(part).__name__} has {' and '.join(own)}, which lightning_callback does not call, so its state "
                "would be lost. Keep the state in buffers of the module, or in state_dict and load_state_dict of a "
                "callback."
            )
        if isinstance(part, lightning.callbacks.StochasticWeightAveraging):
            raise InvalidArgumentError(
                f"{type(part).__name__} replaces the scheduler in the course of the training, which lightning_callback "
                "cannot resume. Keep a torch.optim.swa_utils.AveragedModel in the module instead."
            )
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau:
            raise InvalidArgumentError(
                f"Lightning steps {type(config.scheduler).__name__} after an epoch or batch is saved, by metrics that "
                "are not in a checkpoint, so a resume would change the learning rate. Use a scheduler without a "
                "metric, or step it yourself with automatic_optimization=False."
            )


def _training_state(trainer: Any, own: _Saving) -> TrainingState:
    named: dict[str, Any] = {}
    for kind, parts in (
        ("optimizer", trainer.optimizers),
        ("scheduler", [config.scheduler for config in trainer.lr_scheduler_configs]),
    ):
        named |= {kind if number == 0 else f"{kind}_{number}": part for number, part in enumerate(parts)}
    return TrainingState(model=trainer.lightning_module, loader=_Progress(trainer, own), **named)


class _Progress:
    """Lightning's own record of a training. Each rank saves its own, because it contains positions of loaders."""

    def __init__(self, trainer: Any, own: _Saving) -> None:
        self._trainer = trainer
        self._parts = {one.state_key: one for one in trainer.callbacks if one is not own}
        self._parts["precision"] = trainer.precision_plugin
        if trainer.datamodule is not None:
            self._parts["datamodule"] = trainer.datamodule

    def state_dict(self) -> dict[str, Any]:
        """Return the loops' progress, and the states of their parts."""
        parts = {name: part.state_dict() for name, part in self._parts.items()}
        return {"loops": self._trainer.fit_loop.state_dict(), "parts": parts}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from that state."""
        for name, part in self._parts.items():
            if state_dict["parts"].get(name):
                part.load_state_dict(state_dict["parts"][name])
        self._trainer.fit_loop.load_state_dict(_at_next_batch(state_dict["loops"]))


def _load_positions(loop: Any) -> None:
    """Load the positions that Lightning ignores after a finished epoch; it has already started the data."""
    if loop._combined_loader_states_to_load:
        loop._combined_loader._load_state_dicts(loop._combined_loader_states_to_load)
        loop._combined_loader_states_to_load = []
        iter(loop._data_fetcher)


def _at_next_batch(loops: dict[str, Any]) -> dict[str, Any]:
    """Move to the next epoch after the last batch, as Lightning does; hfshard's loader would give the empty rest."""
    own = loops["state_dict"]
    if not loops["epoch_loop.batch_progress"]["is_last_batch"] or "combined_loader" not in own:
        return loops
    return {**loops, "state_dict": {**own, "combined_loader": [after_epoch(one) for one in own["combined_loader"]]}}
