"""`CheckpointCallback`: transformers' Trainer saves and resumes through a CheckpointManager, exact to the bit."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import HubStrategy

from hfshard.errors import HfshardError, InvalidArgumentError
from hfshard.training.dataloader import ResumableDataLoader
from hfshard.training.manager import CheckpointManager
from hfshard.training.plain_loader import plain_loader
from hfshard.training.rng import rng_state, set_rng_state
from hfshard.training.state import TrainingState

logger = logging.getLogger(__name__)

STATE_FILE: Final = "trainer_state.json"
"""What Trainer reads its own progress from."""
_STOCK_OPTIMIZER: Final = "optimizer.pt"
"""A directory that has it was saved by Trainer alone."""
_REPLACED: Final = ("_save_checkpoint", "_load_optimizer_and_scheduler", "_load_rng_state", "get_train_dataloader")
"""Methods of a Trainer that ours stand in for. The first three are its own affair: on another version of transformers,
`attach` refuses where one is gone, and the tests fail where one is no longer called."""
_LOSS: Final = "_tr_loss"
"""Since it was last logged."""
_LOGGED: Final = "_globalstep_last_logged"


class CheckpointCallback(TrainerCallback):
    """Lets a `transformers.Trainer` save and resume through a `CheckpointManager`.

        trainer = Trainer(model=model, args=args, train_dataset=dataset)
        checkpoints = CheckpointCallback(max_to_keep=3).attach(trainer)
        trainer.train(resume_from_checkpoint=checkpoints.latest())

    Trainer decides when to save, as ever (`save_strategy`, `save_steps`, "best"), and `optimizer.pt`, `scheduler.pt`,
    `rng_state.pth` and `training_args.bin` are not written. A resumed training is the straight one, bit for bit:
    weights, optimizer, scheduler, scaler, RNG, log. Without random augmentation it is also that of Trainer alone.

    Each batch is loaded under seeds of (`data_seed` or `seed`, epoch, batch), so that what a dataset or a collator
    draws from python's, numpy's and torch's RNG is the same after a resume, for any number of workers. It is other
    randomness than Trainer's own, which is not the same after a resume. An IterableDataset is left as it is.

    A save that is due at an epoch's last step waits for what is evaluated and logged at the epoch's end.

    `resume_from_checkpoint=True` works too, where `output_dir` is the run's directory, but refuses a damaged newest
    checkpoint rather than going on from the one before. A directory that Trainer alone has saved is resumed as ever.
    """

    def __init__(
        self,
        manager: CheckpointManager | None = None,
        *,
        blocking: bool = True,
        seed_batches: bool = True,
        **manager_arguments: Any,
    ) -> None:
        """Say where checkpoints go; nothing is made yet.

        Args:
            manager: None: one of the Trainer's `output_dir`, which keeps `save_total_limit` checkpoints and, with
                `metric_for_best_model`, the best one too.
            blocking: As in `CheckpointManager.save`.
            seed_batches: False: data are loaded as Trainer does it; a resume is exact only where loading draws from
                no RNG.
            manager_arguments: Of the CheckpointManager to make: `max_to_keep`, `max_shard_size`, `checksum` ...

        Raises:
            InvalidArgumentError: A manager and arguments for another.
        """
        if manager is not None and manager_arguments:
            raise InvalidArgumentError(
                f"CheckpointCallback was given a manager, and {', '.join(sorted(manager_arguments))} for another: "
                "give them to that manager."
            )
        self.manager: CheckpointManager | None = manager
        self.blocking, self.seed_batches = blocking, seed_batches
        self._arguments = manager_arguments
        self._is_own = manager is None
        self._trainer: Trainer | None = None
        self._originals: dict[str, Callable[..., Any]] = {}
        self._metrics: tuple[int, dict[str, float]] = (-1, {})
        """The step of the last evaluation, and all that came of it."""
        self._verified: str | None = None
        """The checkpoint that `latest` has verified."""
        self._rng: dict[str, Any] | None = None
        """That of the checkpoint that is being resumed, until Trainer has fetched the batches in between."""
        self._progress: dict[str, Any] = {}
        self._is_put_off = False

    def attach(self, trainer: Trainer) -> CheckpointCallback:
        """Take the place of the Trainer's own saving and resuming; it becomes one of its callbacks.

        Returns:
            Itself.

        Raises:
            InvalidArgumentError: The Trainer is set to something that would be done by half; it says which.
        """
        if self._trainer is not None and self._trainer is not trainer:
            raise InvalidArgumentError("This CheckpointCallback is another Trainer's: make one for each.")
        _refuse(trainer)
        manager = self.manager if self.manager is not None else _manager_for(trainer.args, self._arguments)
        _refuse_rotation(trainer.args, manager)
        if self._trainer is None:
            replacements = (self._save, self._load, self._load_rng, self._train_dataloader)
            for name, replacement in zip(_REPLACED, replacements):
                self._originals[name] = getattr(trainer, name)
                setattr(trainer, name, replacement)
        self.manager, self._trainer = manager, trainer
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        return self

    def latest(self) -> str | None:
        """The newest whole checkpoint, for `train(resume_from_checkpoint=)`; None where the run has none yet.

        Every byte is compared with its checksum. Damaged checkpoints are passed over, each with a warning.

        Raises:
            DamagedCheckpointError: All checkpoints are damaged.
        """
        manager, _ = self._attached()
        step = manager.latest_step(verify="full")
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
            if state.best_global_step == step or os.path.isdir(best):
                state.best_model_checkpoint = best
        exportable = [*trainer.callback_handler.callbacks, trainer.control]
        exportable = [callback for callback in exportable if isinstance(callback, ExportableState)]
        state.stateful_callbacks = TrainerState(stateful_callbacks=exportable).stateful_callbacks
        manager.save(
            step,
            self._training_state(),
            metric=self._metrics[1] if self._metrics[0] == step else None,
            extra={"loss": getattr(trainer, _LOSS).item(), "logged": getattr(trainer, _LOGGED)},
            blocking=self.blocking or trainer.control.should_training_stop,
            files=_small_files(trainer),
        )

    def _load(self, checkpoint: str | None) -> None:
        if checkpoint is None or os.path.isfile(os.path.join(checkpoint, _STOCK_OPTIMIZER)):
            self._originals["_load_optimizer_and_scheduler"](checkpoint)
            return
        manager, _ = self._attached()
        path = os.path.realpath(checkpoint)
        is_verified = self._verified is not None and path == os.path.realpath(self._verified)
        restored = manager.restore(self._training_state(), path, verify="structure" if is_verified else "full")
        self._progress, self._rng = restored.extra, rng_state()

    def _load_rng(self, checkpoint: str | None) -> None:
        """Trainer calls it when the loader has drawn what it draws anew: at a new epoch, or after skipping batches."""
        if self._rng is None:
            self._originals["_load_rng_state"](checkpoint)
        else:
            set_rng_state(self._rng)
            self._rng = None

    def _train_dataloader(self) -> Any:
        loader = self._originals["get_train_dataloader"]()
        _, trainer = self._attached()
        seed = trainer.args.seed if trainer.args.data_seed is None else trainer.args.data_seed
        if not self.seed_batches or isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
            return loader
        return trainer.accelerator.prepare_data_loader(_seeded(loader, seed))

    # Events

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take up the log where it was."""
        manager, trainer = self._attached()
        if state.is_hyper_param_search:
            raise InvalidArgumentError("A hyperparameter search has no one run to resume: search without the callback.")
        self._is_put_off = False
        if self._progress:
            getattr(trainer, _LOSS).add_(self._progress["loss"])
            setattr(trainer, _LOGGED, self._progress["logged"])
            self._progress = {}
        if state.best_global_step is not None and os.path.isdir(best := manager.path_of(state.best_global_step)):
            state.best_model_checkpoint = best  # the run's directory may have been moved

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """See that the RNG was restored."""
        if self._rng is not None:
            raise HfshardError(
                "This version of transformers no longer restores the random state when hfshard expects it: the "
                "training would go on inexactly. Install one that is named in hfshard's requirements."
            )

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keep the metrics for the checkpoint; of several evaluation datasets, of all."""
        before = self._metrics[1] if self._metrics[0] == state.global_step else {}
        found = {name: value for name, value in kwargs.get("metrics", {}).items() if isinstance(value, int | float)}
        self._metrics = state.global_step, {**before, **found}

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Put a save at an epoch's last step off until the epoch's end."""
        if control.should_save and state.epoch == int(state.epoch):
            control.should_save, self._is_put_off = False, True

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save what was put off; before the best model is loaded, have all saves finished."""
        if self._is_put_off:
            control.should_save, self._is_put_off = True, False
        if control.should_training_stop:
            self._attached()[0].wait_until_finished()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Wait for the last save."""
        manager, _ = self._attached()
        if self._is_own:
            manager.close()
        else:
            manager.wait_until_finished()

    def _training_state(self) -> TrainingState:
        _, trainer = self._attached()
        return TrainingState(
            model=trainer.model,
            optimizer=trainer.optimizer,
            scheduler=trainer.lr_scheduler,
            scaler=getattr(trainer.accelerator, "scaler", None),
        )

    def _attached(self) -> tuple[CheckpointManager, Trainer]:
        if self.manager is None or self._trainer is None:
            raise InvalidArgumentError(
                "A CheckpointCallback must know its Trainer: checkpoints.attach(trainer) before trainer.train()."
            )
        return self.manager, self._trainer


def _manager_for(args: TrainingArguments, arguments: dict[str, Any]) -> CheckpointManager:
    """One of what the Trainer's arguments say; those of the callback come before."""
    known: dict[str, Any] = {}
    if args.save_total_limit is not None and args.save_total_limit > 0:
        known["max_to_keep"] = args.save_total_limit
    if args.metric_for_best_model is not None:
        known |= {"keep_best": _metric_name(args), "metric_mode": "max" if args.greater_is_better else "min"}
    return CheckpointManager(str(args.output_dir), **{**known, **arguments})


def _metric_name(args: TrainingArguments) -> str:
    name = str(args.metric_for_best_model)
    return name if name.startswith("eval_") else f"eval_{name}"


def _refuse(trainer: Trainer) -> None:
    """Refuse what would be served by half."""
    args = trainer.args
    if missing := [name for name in (*_REPLACED, "store_flos") if not hasattr(trainer, name)]:
        raise InvalidArgumentError(
            f"{type(trainer).__name__} has no {', '.join(missing)}: CheckpointCallback does not know this version of "
            "transformers. Install one that is named in hfshard's requirements."
        )
    if args.world_size > 1 or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise InvalidArgumentError(
            "CheckpointCallback saves the state of one process, and this Trainer runs in several (or with DeepSpeed or "
            "FSDP). Train without it."
        )
    if args.save_only_model:
        raise InvalidArgumentError(
            "save_only_model=True leaves nothing to resume from: remove it, or train without the CheckpointCallback."
        )
    strategy = HubStrategy(args.hub_strategy)
    if args.push_to_hub and strategy != HubStrategy.END:
        raise InvalidArgumentError(
            f"hub_strategy='{strategy.value}' would push what Trainer saves, which is nothing: set it to 'end', and "
            "give CheckpointCallback push_to_hub='org/name' for a push of each checkpoint."
        )
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(trainer.model, peft.PeftModel):
        raise InvalidArgumentError(
            "CheckpointCallback saves whole models, and this one is a PeftModel, of which only the adapter is to be "
            "saved. Train without it."
        )


def _refuse_rotation(args: TrainingArguments, manager: CheckpointManager) -> None:
    """Refuse where Trainer's idea of what is kept is not the manager's."""
    limit = args.save_total_limit
    if limit is not None and limit > 0 and limit != manager.max_to_keep:
        raise InvalidArgumentError(
            f"save_total_limit={limit}, and the CheckpointManager has max_to_keep={manager.max_to_keep}: remove one, "
            "or make them equal."
        )
    if not args.load_best_model_at_end:
        return
    if limit == 1:
        raise InvalidArgumentError(
            "With save_total_limit=1 and load_best_model_at_end=True, Trainer itself removes the last checkpoint in "
            "the end. Give max_to_keep=1 to CheckpointCallback instead, which keeps the last and the best."
        )
    mode = "max" if args.greater_is_better else "min"
    if manager.max_to_keep is not None and (manager.keep_best, manager.metric_mode) != (_metric_name(args), mode):
        raise InvalidArgumentError(
            "load_best_model_at_end=True needs a CheckpointManager that keeps the best checkpoint: "
            f"CheckpointManager(..., keep_best='{_metric_name(args)}', metric_mode='{mode}')."
        )


def _seeded(loader: DataLoader[Any], seed: int) -> DataLoader[Any]:
    """The same batches in the same order, each loaded under seeds of its own; else RNGs are drawn from as before."""
    resumable = ResumableDataLoader(
        loader.dataset,
        batch_sampler=loader.batch_sampler,
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
        seed=seed,
    )
    plain = plain_loader(resumable)
    plain.generator = loader.generator
    return plain


def _small_files(trainer: Trainer) -> dict[str, bytes]:
    """Trainer's own progress, and the tokenizer's files, as Trainer would write them."""
    tokenizer = trainer.processing_class
    if tokenizer is None:
        tokenizer = getattr(trainer.data_collator, "tokenizer", None)
    with tempfile.TemporaryDirectory(prefix="hfshard-") as directory:
        trainer.state.save_to_json(os.path.join(directory, STATE_FILE))
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)
        files = {path.name: path.read_bytes() for path in sorted(Path(directory).iterdir()) if path.is_file()}
        if folders := sorted(path.name for path in Path(directory).iterdir() if path.is_dir()):
            logger.warning("Not saved with the checkpoint: the tokenizer's %s.", ", ".join(folders))
    return files
