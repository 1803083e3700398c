"""`CheckpointCallback`: transformers' Trainer saves and resumes through a CheckpointManager, exact to the last bit."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from hfshard._util.addresses import is_address
from hfshard.errors import HfshardError, InvalidArgumentError
from hfshard.load import load_model
from hfshard.training.integrations.trainer_data import (
    UnloggedLoss,
    batch_seed,
    check_same_data,
    data_settings,
    prepared_seeded_loader,
)
from hfshard.training.integrations.trainer_far import near_checkpoint
from hfshard.training.integrations.trainer_files import trainer_files
from hfshard.training.integrations.trainer_places import Place, bring_here
from hfshard.training.integrations.trainer_settings import (
    REPLACED,
    check_rotation,
    check_trainer,
    manager_from_arguments,
)
from hfshard.training.integrations.trainer_weights import is_stock_checkpoint, load_parts
from hfshard.training.manager import CheckpointManager
from hfshard.training.parts.rng import rng_state, set_rng_state
from hfshard.training.ranks import Ranks
from hfshard.training.run.places.opening import files_at
from hfshard.training.state import TrainingState

logger = logging.getLogger(__name__)

_LOSS: Final = "_tr_loss"
"""Since it was last logged."""
_LOGGED: Final = "_globalstep_last_logged"


class CheckpointCallback(TrainerCallback):
    """Lets a `transformers.Trainer` save and resume through a `CheckpointManager`.

        trainer = Trainer(model=model, args=args, train_dataset=dataset)
        checkpoints = CheckpointCallback(max_to_keep=3).attach(trainer)
        trainer.train(resume_from_checkpoint=checkpoints.latest())

    Trainer decides when to save, as always (`save_strategy`, `save_steps`, "best"), and `optimizer.pt`, `scheduler.pt`,
    `rng_state.pth` and `training_args.bin` are not written. A resumed training equals the straight one, bit for bit:
    weights, optimizer, scheduler, scaler, RNG, log. Without random augmentation it also equals that of Trainer alone.

    Each batch is loaded under seeds of (`data_seed` or `seed`, epoch, batch), so what a dataset or a collator
    draws from Python's, numpy's and torch's RNG is the same after a resume, for any number of workers. (Trainer alone
    draws other numbers, which are not the same after a resume.) An IterableDataset is resumed as Trainer does it; what
    persistent workers draw for an evaluation is not the same after a resume.

    A save that is due at an epoch's last step waits until the end of the epoch was evaluated and logged.

    `resume_from_checkpoint` also takes "org/name" on the Hub or a directory hub, either with "@revision": what the run
    has pushed is downloaded, checked and resumed. True works where `output_dir` is the run's directory, and takes what
    `push_to_hub` names where that has no checkpoint; it refuses a damaged newest checkpoint rather than going on from
    the one before. A directory that Trainer alone has saved is resumed as usual.
    """

    def __init__(
        self,
        manager: CheckpointManager | None = None,
        *,
        blocking: bool = True,
        seed_batches: bool = True,
        **manager_arguments: Any,
    ) -> None:
        """Say where checkpoints go; nothing is created yet.

        Args:
            manager: None: one for the Trainer's `output_dir`, which keeps `save_total_limit` checkpoints and, with
                `metric_for_best_model`, the best one too.
            blocking: As in `CheckpointManager.save`.
            seed_batches: Whether each batch gets seeds of its own. If not, a resume is exact only where loading draws
                from no RNG.
            manager_arguments: Arguments for the CheckpointManager: `max_to_keep`, `max_shard_size`, `checksum` ...

        Raises:
            InvalidArgumentError: There are both a manager and arguments for another.
        """
        if manager is not None and manager_arguments:
            raise InvalidArgumentError(
                f"CheckpointCallback was given a manager, and {', '.join(sorted(manager_arguments))} for another: "
                "give them to that manager."
            )
        self.manager: CheckpointManager | None = manager
        self.blocking = blocking
        self.seed_batches = seed_batches
        self._arguments = manager_arguments
        self._is_own = manager is None
        self._trainer: Trainer | None = None
        self._originals: dict[str, Callable[..., Any]] = {}
        self._metrics: tuple[int, dict[str, float]] = (-1, {})
        """The step of the last evaluation, and its metrics."""
        self._verified: str | None = None
        """The checkpoint that `latest` has verified, or a download."""
        self._resumed: tuple[int, str] | None = None
        """The step that was restored, and the directory of its checkpoint."""
        self._brought: tuple[str, str] = ("", "")
        """The directory that Trainer resumes from, if it was brought here, and where the checkpoint itself is."""
        self._rng: dict[str, Any] | None = None
        """The RNG states of the checkpoint that is being resumed, until Trainer has skipped to its batch."""
        self._progress: dict[str, Any] = {}
        self._data: dict[str, int | None] = {}
        """What the order of the batches depends on."""
        self._is_save_deferred = False

    def attach(self, trainer: Trainer) -> CheckpointCallback:
        """Replace the Trainer's own saving and resuming, and become one of its callbacks.

        Returns:
            Itself.

        Raises:
            InvalidArgumentError: A setting of the Trainer is not supported; the message says which.
        """
        if self._trainer is not None and self._trainer is not trainer:
            raise InvalidArgumentError("This CheckpointCallback is another Trainer's: make one for each.")
        check_trainer(trainer)
        manager = self.manager if self.manager is not None else manager_from_arguments(trainer.args, self._arguments)
        check_rotation(trainer.args, manager)
        if self._trainer is None:
            replacements = (
                self._save,
                self._load,
                self._load_rng,
                self._load_weights,
                self._load_best,
                self._train_dataloader,
                self._eval_dataloader,
                self._train,
            )
            for name, replacement in zip(REPLACED, replacements, strict=True):
                self._originals[name] = getattr(trainer, name)
                setattr(trainer, name, replacement)
        self.manager, self._trainer = manager, trainer
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        return self

    def latest(self) -> str | None:
        """The newest whole checkpoint, for `train(resume_from_checkpoint=)`; None where the run has none yet.

        Every byte is compared with its checksum, by the first of several processes. Damaged checkpoints are passed
        over, each with a warning. Every process must call.

        Raises:
            DamagedCheckpointError: All checkpoints are damaged.
            RankFailedError: Of another process than the first one: so it says; or one died, or did not come.
        """
        manager, _ = self._attached()
        with Ranks.meeting("latest") as ranks:
            step = ranks.first(lambda: manager.latest_step(verify="full"))
        self._verified = None if step is None else manager.path_of(step)
        return self._verified

    # What stands in for the Trainer's own

    def _save(self, model: Any, trial: Any) -> None:
        manager, trainer = self._attached()
        state, step = trainer.state, trainer.state.global_step
        if trial is not None:
            raise InvalidArgumentError("A hyperparameter search has no one run to resume: search without the callback.")
        trainer.store_flos()
        if state.best_global_step is not None:
            best = manager.path_of(state.best_global_step)
            if state.best_global_step == step or files_at(best).is_there():
                state.best_model_checkpoint = best
        exportable = [*trainer.callback_handler.callbacks, trainer.control]
        exportable = [callback for callback in exportable if isinstance(callback, ExportableState)]
        state.stateful_callbacks = TrainerState(stateful_callbacks=exportable).stateful_callbacks
        manager.save(
            step,
            self._training_state(UnloggedLoss(getattr(trainer, _LOSS).item())),
            metric=self._metrics[1] if self._metrics[0] == step else None,
            extra={"logged": getattr(trainer, _LOGGED), "data": self._data},
            blocking=self.blocking or trainer.control.should_training_stop,
            files=trainer_files(trainer) if trainer.is_world_process_zero() else None,
        )

    def _train(self, resume_from_checkpoint: Place | None = None, *args: Any, **kwargs: Any) -> Any:
        """Trainer reads its own progress from a directory before it calls anything else that could download one."""
        manager, trainer = self._attached()
        place = resume_from_checkpoint
        if place and (here := bring_here(place, manager, trainer.args)) is not None:
            self._verified = here
            self._resumed = None
            with near_checkpoint(here) as directory:
                self._brought = (directory, here)
                return self._originals["train"](directory, *args, **kwargs)
        self._resumed = None
        return self._originals["train"](place, *args, **kwargs)

    def _load(self, checkpoint: str | None) -> None:
        if checkpoint is None or is_stock_checkpoint(checkpoint):
            self._originals["_load_optimizer_and_scheduler"](checkpoint)
            return
        manager, trainer = self._attached()
        path = os.path.realpath(checkpoint)
        if path == self._brought[0]:
            path = self._brought[1]
        is_verified = self._verified is not None and path in (self._verified, os.path.realpath(self._verified))
        unlogged = UnloggedLoss()
        restored = manager.restore(self._training_state(unlogged), path, verify="structure" if is_verified else "full")
        if not trainer.args.ignore_data_skip:
            check_same_data(restored.extra["data"], self._data, checkpoint)
        self._resumed = (restored, path)
        self._progress = {**restored.extra, "loss": unlogged.loss}
        self._rng = rng_state()

    def _load_weights(self, checkpoint: str, *args: Any) -> None:
        """Trainer calls it before `_load`, which restores the weights with the rest, and reads each byte once."""
        if is_stock_checkpoint(checkpoint):
            self._originals["_load_from_checkpoint"](checkpoint, *args)

    def _load_best(self) -> None:
        """Trainer calls it on all ranks; its own way takes the weights of a whole model."""
        _, trainer = self._attached()
        best = trainer.state.best_model_checkpoint
        if load_parts(trainer.model, best):
            return
        if best is not None and is_address(best):
            load_model(trainer.model, best)
        else:
            self._originals["_load_best_model"]()

    def _load_rng(self, checkpoint: str | None) -> None:
        """Trainer calls it after the loader has drawn its random numbers: at a new epoch, or after skipping."""
        if self._rng is None:
            self._originals["_load_rng_state"](checkpoint)
        else:
            set_rng_state(self._rng)
            self._rng = None

    def _train_dataloader(self) -> Any:
        loader = self._originals["get_train_dataloader"]()
        _, trainer = self._attached()
        self._data = data_settings(trainer.args, loader)
        if not self.seed_batches or isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
            return loader
        return prepared_seeded_loader(trainer.accelerator, loader, batch_seed(trainer.args))

    def _eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """With persistent workers, iter() draws from the RNG when they start, which happens again after a resume."""
        loader = self._originals["get_eval_dataloader"](*args, **kwargs)
        if loader.persistent_workers:
            getattr(loader, "base_dataloader", loader).generator = torch.Generator()
        return loader

    # Events

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Continue the log where it was."""
        manager, trainer = self._attached()
        if state.is_hyper_param_search:
            raise InvalidArgumentError("A hyperparameter search has no one run to resume: search without the callback.")
        self._is_save_deferred = False
        if self._progress:
            getattr(trainer, _LOSS).add_(self._progress["loss"])
            setattr(trainer, _LOGGED, self._progress["logged"])
            self._progress = {}
        if state.best_global_step is not None and files_at(best := manager.path_of(state.best_global_step)).is_there():
            state.best_model_checkpoint = best  # the directory of the run may have been moved
        elif self._resumed is not None and self._resumed[0] == state.best_global_step:
            state.best_model_checkpoint = self._resumed[1]  # it was downloaded

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check that the RNG was restored."""
        if self._rng is not None:
            raise HfshardError(
                "This version of transformers no longer restores the random state when hfshard expects it: the "
                "training would go on inexactly. Install one that is named in hfshard's requirements."
            )

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keep the metrics of all evaluation datasets for the checkpoint."""
        before = self._metrics[1] if self._metrics[0] == state.global_step else {}
        found = {name: value for name, value in kwargs.get("metrics", {}).items() if isinstance(value, int | float)}
        self._metrics = (state.global_step, {**before, **found})

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Defer a save at an epoch's last step to the end of the epoch."""
        if control.should_save and state.epoch == int(state.epoch):
            control.should_save = False
            self._is_save_deferred = True

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Make a deferred save; finish all saves before the best model is loaded."""
        if self._is_save_deferred:
            control.should_save = True
            self._is_save_deferred = False
        if control.should_training_stop:
            with Ranks.meeting("training stops") as ranks:
                ranks.on_each(self._attached()[0].wait_until_finished)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Wait for the last save."""
        manager, _ = self._attached()
        if self._is_own:
            manager.close()
        else:
            manager.wait_until_finished()

    def _training_state(self, unlogged: UnloggedLoss) -> TrainingState:
        _, trainer = self._attached()
        return TrainingState(
            model=trainer.model,
            optimizer=trainer.optimizer,
            scheduler=trainer.lr_scheduler,
            loader=unlogged,
            scaler=getattr(trainer.accelerator, "scaler", None),
        )

    def _attached(self) -> tuple[CheckpointManager, Trainer]:
        if self.manager is None or self._trainer is None:
            raise InvalidArgumentError(
                "A CheckpointCallback must know its Trainer: checkpoints.attach(trainer) before trainer.train()."
            )
        return self.manager, self._trainer
