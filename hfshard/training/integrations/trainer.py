"""`CheckpointCallback`: transformers' Trainer saves and resumes through a CheckpointManager, exact to the last bit."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import HubStrategy, get_last_checkpoint
from transformers.training_args import ParallelMode

from hfshard.checkpoint.load_options import LoadOptions
from hfshard.checkpoint.locate import CheckpointQuery
from hfshard.constants import MAX_INDEX_BYTES
from hfshard.distributed.load_on_ranks import has_spread_state, load_into_spread_module
from hfshard.errors import CheckpointNotFoundError, HfshardError, InvalidArgumentError, StateDictMismatchError
from hfshard.hub.directory.directory_hub import split_address
from hfshard.hub.repo import RepoTree
from hfshard.load import load_model
from hfshard.places.place import place_to_check, place_to_load, place_to_push, place_to_save
from hfshard.places.source import CheckpointSource
from hfshard.training.data.dataloader import length_of, plain_loader
from hfshard.training.integrations.accelerate import BatchShare
from hfshard.training.manager import CheckpointManager
from hfshard.training.run.find_checkpoint import checked_at
from hfshard.training.run.manifest import folder_at
from hfshard.training.run_ranks import meet_for
from hfshard.training.state.rng import rng_state, set_rng_state
from hfshard.training.state.training_state import TrainingState

logger = logging.getLogger(__name__)

_LOSS: Final = "_tr_loss"
"""The sum of losses since one was last logged."""
_LOGGED: Final = "_globalstep_last_logged"


class CheckpointCallback(TrainerCallback):
    """A callback by which a `transformers.Trainer` saves and resumes through a `CheckpointManager`.

        trainer = Trainer(model=model, args=args, train_dataset=dataset)
        checkpoints = CheckpointCallback(max_to_keep=3).attach(trainer)
        trainer.train(resume_from_checkpoint=checkpoints.latest())

    Trainer decides when to save, as always (`save_strategy`, `save_steps`, "best"), and `optimizer.pt`, `scheduler.pt`,
    `rng_state.pth` and `training_args.bin` are not written. A resumed training equals the straight one, bit for bit:
    weights, optimizer, scheduler, scaler, RNG, log, callbacks with a state (`attach` sets
    `restore_callback_states_from_checkpoint`). Without random augmentation it also equals that of Trainer alone.

    Each batch is loaded under seeds of (`data_seed` or `seed`, epoch, batch), so what a dataset or a collator
    draws from Python's, numpy's and torch's RNG is the same after a resume, for any number of workers. (Trainer alone
    draws other numbers, which are not the same after a resume.) An IterableDataset is resumed as Trainer does it; what
    persistent workers draw for an evaluation is not the same after a resume.

    A save that is due at an epoch's last step waits until the end of the epoch has been evaluated and logged.

    `resume_from_checkpoint` also accepts "org/name" on the Hub or a directory hub, either with "@revision": what the
    run has pushed is downloaded, checked and resumed. True works if `output_dir` is the run's directory, and falls back
    to the repo named by `push_to_hub` if that directory has no checkpoint. It rejects a damaged newest checkpoint
    rather than continuing from the one before. A directory that Trainer alone has saved is resumed as usual.
    """

    def __init__(
        self,
        manager: CheckpointManager | None = None,
        *,
        blocking: bool = True,
        seed_batches: bool = True,
        **manager_arguments: Any,
    ) -> None:
        """Set where checkpoints go; nothing is created yet.

        Args:
            manager: None: one for the Trainer's `output_dir`, which keeps `save_total_limit` checkpoints and, with
                `metric_for_best_model`, the best one too.
            blocking: Like that of `CheckpointManager.save`.
            seed_batches: Whether each batch gets its own seeds. If not, a resume is exact only if loading draws from no
                RNG.
            manager_arguments: Arguments for the CheckpointManager: `max_to_keep`, `max_shard_size`, `checksum` ...

        Raises:
            InvalidArgumentError: Both a manager and arguments for another were passed.
        """
        if manager is not None and manager_arguments:
            raise InvalidArgumentError(
                f"Cannot combine a manager with {', '.join(sorted(manager_arguments))}, which would create another "
                "one. Pass these arguments to that manager."
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
        """The directory that Trainer resumes from, if it was downloaded, and where the checkpoint itself is."""
        self._rng: dict[str, Any] | None = None
        """The RNG states of the checkpoint that is being resumed, until Trainer has skipped to its batch."""
        self._progress: dict[str, Any] = {}
        self._data: dict[str, int | None] = {}
        """The settings that the order of the batches depends on."""
        self._is_save_deferred = False

    def attach(self, trainer: Trainer) -> CheckpointCallback:
        """Replace the Trainer's own saving and resuming, and become one of its callbacks.

        Returns:
            Itself.

        Raises:
            InvalidArgumentError: A setting of the Trainer is not supported; the message names it.
        """
        if self._trainer is not None and self._trainer is not trainer:
            raise InvalidArgumentError("This CheckpointCallback belongs to another Trainer. Create one for each.")
        check_trainer(trainer)
        manager = self.manager if self.manager is not None else manager_from_arguments(trainer.args, self._arguments)
        check_rotation(trainer.args, manager)
        if self._trainer is None:
            for name, own in REPLACED.items():
                self._originals[name] = getattr(trainer, name)
                setattr(trainer, name, getattr(self, own))
            trainer.args.restore_callback_states_from_checkpoint = True  # that of EarlyStoppingCallback, for one
        self.manager, self._trainer = manager, trainer
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        return self

    def latest(self) -> str | None:
        """Return the newest complete checkpoint, for `train(resume_from_checkpoint=)`; None if the run has none yet.

        The first process compares every byte with its checksum. Damaged checkpoints are skipped, each with a warning.
        Every process must call.

        Raises:
            DamagedCheckpointError: All checkpoints are damaged.
            RankFailedError: The first process failed, on the others; or a process died or did not call.
        """
        manager, _ = self._attached()
        with meet_for("latest") as ranks:
            step = ranks.first(lambda: manager.latest_step(verify="full"))
        self._verified = None if step is None else manager.path_of(step)
        return self._verified

    # Replacements of the Trainer's methods

    def _save(self, model: Any, trial: Any) -> None:
        manager, trainer = self._attached()
        state, step = trainer.state, trainer.state.global_step
        if trial is not None:
            raise InvalidArgumentError(
                "A hyperparameter search has no single run to resume. Search without the callback."
            )
        trainer.store_flos()
        if state.best_global_step is not None:
            best = manager.path_of(state.best_global_step)
            if state.best_global_step == step or folder_at(best).exists():
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
        """Download first: Trainer reads its own progress from a directory before it calls anything else that could."""
        manager, trainer = self._attached()
        place = resume_from_checkpoint
        if place and (here := download_checkpoint(place, manager, trainer.args)) is not None:
            self._verified = here
            self._resumed = None
            with local_copy(here) as directory:
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
        """Leave the weights to `_load`, called later, which restores them with the rest and reads each byte once."""
        if is_stock_checkpoint(checkpoint):
            self._originals["_load_from_checkpoint"](checkpoint, *args)

    def _load_best(self) -> None:
        """Load the best weights, on all ranks; Trainer's own method needs the weights of a full model."""
        _, trainer = self._attached()
        best = trainer.state.best_model_checkpoint
        if load_parts(trainer.model, best):
            return
        if best is None or is_stock_checkpoint(best):
            self._originals["_load_best_model"]()
        else:  # the method of a subclass may call `_load_from_checkpoint`, which loads nothing here
            load_model(trainer.model, best)

    def _load_rng(self, checkpoint: str | None) -> None:
        """Restore the RNG. Trainer calls this after the loader has drawn from it: at a new epoch, or after skipping."""
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
        """Give persistent workers a generator: iter() draws from the RNG when they start, again after a resume."""
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
            raise InvalidArgumentError(
                "A hyperparameter search has no single run to resume. Search without the callback."
            )
        self._is_save_deferred = False
        if self._progress:
            getattr(trainer, _LOSS).add_(self._progress["loss"])
            setattr(trainer, _LOGGED, self._progress["logged"])
            self._progress = {}
        if state.best_global_step is not None and folder_at(best := manager.path_of(state.best_global_step)).exists():
            state.best_model_checkpoint = best  # the directory of the run may have been moved
        elif self._resumed is not None and self._resumed[0] == state.best_global_step:
            state.best_model_checkpoint = self._resumed[1]  # it was downloaded

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check that the RNG was restored."""
        if self._rng is not None:
            raise HfshardError(
                "This version of transformers did not restore the random state when hfshard expected it, so the "
                "training would not resume exactly. Install a version that hfshard's requirements allow."
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
        """Do a deferred save; finish all saves before the best model is loaded."""
        if self._is_save_deferred:
            control.should_save = True
            self._is_save_deferred = False
        if control.should_training_stop:
            with meet_for("training stops") as ranks:
                ranks.each(self._attached()[0].wait_until_finished)

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
                "This CheckpointCallback has no Trainer. Call checkpoints.attach(trainer) before trainer.train()."
            )
        return self.manager, self._trainer


# The batches of a Trainer: seeded one by one, and compared between a checkpoint and the training that resumes.


_DATA: Final = {
    "seed": "seed (or data_seed)",
    "shuffled_by": "seed that torch had when the loader was made",
    "samples": "number of samples",
    "batches": "number of batches in an epoch",
    "accumulated": "gradient_accumulation_steps",
}
"""Settings that must be the same again for the same batches -> their names in messages."""


def prepared_seeded_loader(accelerator: Accelerator, loader: DataLoader[Any], seed: int) -> DataLoader[Any]:
    """Return a prepared loader with the batches of another prepared one, each loaded under its own seeds.

    The other one gives this process its share of the batches already, so Accelerate must not share them out again.
    The new one draws from the global RNGs as before, but not with persistent workers, which would draw again after a
    resume.
    """
    share = BatchShare.of(accelerator)
    seeded = plain_loader(share.loader(loader, loader.batch_sampler, seed))
    if not loader.persistent_workers:
        seeded.generator = loader.generator
    if share.count == 1:
        return accelerator.prepare_data_loader(seeded)  # type: ignore[no-any-return]
    return prepare_data_loader(  # type: ignore[no-any-return]
        seeded,
        accelerator.device,
        num_processes=1,
        process_index=0,
        put_on_device=accelerator.device_placement,
        rng_types=list(accelerator.rng_types),
        dispatch_batches=False,
        non_blocking=accelerator.non_blocking,
    )


def data_settings(args: TrainingArguments, loader: Any) -> dict[str, int | None]:
    """Return the settings that the batches of a training and their order depend on."""
    sampler = getattr(loader.batch_sampler, "sampler", None)
    return {
        "seed": batch_seed(args),
        "shuffled_by": getattr(sampler, "initial_seed", None),  # of Accelerate's sampler
        "samples": length_of(loader.dataset),
        "batches": length_of(loader),
        "accumulated": args.gradient_accumulation_steps,
    }


def batch_seed(args: TrainingArguments) -> int:
    """Return the seed for what is drawn while data are loaded."""
    return args.seed if args.data_seed is None else args.data_seed


def check_same_data(was: dict[str, int | None], now: dict[str, int | None], checkpoint: str) -> None:
    """Reject a resume that would skip batches other than those of the saved training.

    Raises:
        StateDictMismatchError: A setting differs; the message names it.
    """
    for name, title in _DATA.items():
        if was.get(name) != now.get(name):
            raise StateDictMismatchError(
                f"The checkpoint '{checkpoint}' was saved with other batches than this training has: its {title} was "
                f"{was.get(name)}, and is {now.get(name)}. Set it as in the saved run; or set ignore_data_skip=True, "
                "which restarts the epoch.",
                path=checkpoint,
                expected=was.get(name),
                actual=now.get(name),
            )


class UnloggedLoss:
    """The sum of losses since one was last logged, which each rank has for its own batches.

    It replaces the loader in the training state, because each rank saves its own loader.
    """

    def __init__(self, loss: float = 0.0) -> None:
        self.loss = loss

    def state_dict(self) -> dict[str, float]:
        """Return the sum."""
        return {"loss": self.loss}

    def load_state_dict(self, state_dict: Mapping[str, float]) -> None:
        """Set the sum to the saved one."""
        self.loss = state_dict["loss"]


# Checkpoints in stores for Trainer, which reads its own progress from a directory before it requests anything else.


_BEST: Final = "best_model_checkpoint"
"""The key that Trainer drops if it is not a directory; `CheckpointCallback` knows it anyway."""


@contextmanager
def local_copy(path: str) -> Iterator[str]:
    """Provide a directory for Trainer: the checkpoint's; for one in a store, one with only Trainer's own progress.

    Args:
        path: A directory, or an address.

    Raises:
        MissingShardError: Trainer did not save the checkpoint.
    """
    folder = folder_at(path)
    if folder.traits.is_directory:
        yield path
        return
    progress = json.loads(folder.read_small(STATE_FILE, MAX_INDEX_BYTES))
    with tempfile.TemporaryDirectory(prefix="hfshard-") as directory:
        with open(os.path.join(directory, STATE_FILE), "w", encoding="utf-8") as file:
            json.dump({**progress, _BEST: None}, file)
        yield os.path.realpath(directory)


# The small files that a Trainer's checkpoint has along with the state: its own progress and the tokenizer.


STATE_FILE: Final = "trainer_state.json"
"""The file that Trainer reads its own progress from."""


def trainer_files(trainer: Trainer) -> dict[str, bytes]:
    """Return Trainer's own progress, and the tokenizer's files, as Trainer would write them."""
    tokenizer = trainer.processing_class
    if tokenizer is None:
        tokenizer = getattr(trainer.data_collator, "tokenizer", None)
    with tempfile.TemporaryDirectory(prefix="hfshard-") as directory:
        trainer.state.save_to_json(os.path.join(directory, STATE_FILE))
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)
        files = {path.name: path.read_bytes() for path in sorted(Path(directory).iterdir()) if path.is_file()}
        if folders := sorted(path.name for path in Path(directory).iterdir() if path.is_dir()):
            logger.warning("Did not save the tokenizer's %s with the checkpoint.", ", ".join(folders))
    return files


# The place that a Trainer resumes from: a checkpoint on a hub is downloaded before Trainer looks for its files.


_STOCK_FOLDER: Final = re.compile(r"|last-checkpoint|checkpoint-\d+")
"""The folders to which Trainer pushes checkpoints, by `hub_strategy`; or the top, if a user uploaded one there."""

Place = str | os.PathLike[str] | bool
"""The type of `resume_from_checkpoint` in `Trainer.train`; True: the newest checkpoint."""


def download_checkpoint(place: Place, manager: CheckpointManager, args: TrainingArguments) -> str | None:
    """Download a checkpoint, and compare every byte with its checksum; every rank must call.

    The first rank does both; so does every other rank that does not see the directory which the first one used. What
    Trainer alone has pushed has only the Hub's checksums.

    Args:
        place: A directory, an address of a store, "org/name" on the Hub, or a directory hub, the last two with
            "@revision" for one other than main. True: the run's newest checkpoint; if it has none, that of the hub that
            the manager pushes to.
        manager: The run's manager.
        args: The Trainer's arguments, for its directory and token.

    Returns:
        The checkpoint's directory, or its address, from which nothing is downloaded yet; None if Trainer finds the
        place itself: a directory, or its own meaning of True.

    Raises:
        CheckpointNotFoundError: There is no training checkpoint.
        HubError: The checkpoint could not be downloaded.
        DamagedCheckpointError: The checkpoint is damaged.
        RankFailedError: Another rank has one of these errors.
    """
    with meet_for("resume_from_checkpoint") as ranks:
        path = ranks.first(lambda: _fetched(place, manager, args))
        if path is None:
            return None
        return ranks.each(lambda: path if os.path.isdir(path) else _fetched(place, manager, args))


def _fetched(place: Place, manager: CheckpointManager, args: TrainingArguments) -> str | None:
    address = _newest(manager, args) if isinstance(place, bool) else place
    if address is None:
        return None
    found_at = place_to_load(address)
    if os.path.isdir(address) and not found_at.has_revisions:
        return None
    is_on_disk = found_at.is_read_from_disk
    try:
        token = args.hub_token if is_on_disk else None  # a store needs none: the token is for pushes
        checkpoint, _ = checked_at(address, "full", token=token, progress=manager.progress)
    except CheckpointNotFoundError:
        if not is_on_disk:
            raise
        stock = _fetched_from_trainer(address, args.hub_token, manager.progress)
        if stock is None:
            raise
        return stock
    return checkpoint.path


def _fetched_from_trainer(address: str | os.PathLike[str], token: str | None, progress: bool | None) -> str | None:
    """Download what Trainer alone has pushed, which it then resumes as it always does; None if there is nothing."""
    repo_id, revision = split_address(address)
    tree = _tree(repo_id, revision, token)
    if tree is None:
        return None
    folders = [path.rpartition("/")[0] for path in tree.files if os.path.basename(path) == STATE_FILE]
    found = [folder for folder in folders if _STOCK_FOLDER.fullmatch(folder)]
    if not found:
        return None
    from hfshard.places.fetch import fetch_or_export

    newest = max(found, key=_order)
    query = CheckpointQuery(
        revision=tree.commit, subfolder=newest, token=token, allow_patterns=["*"], needs_companions=True
    )
    return fetch_or_export(repo_id, None, query, progress=progress)


def _tree(repo_id: str, revision: str | None, token: str | None) -> RepoTree | None:
    """Request a hub's list of files; None if no hub can be asked."""
    from hfshard.hub.download import fetch_tree_for_reading, is_offline  # huggingface_hub's import takes time

    if place_to_check(repo_id).has_revisions:  # a hub in a directory; another directory may have the name of a repo
        from hfshard.hub.directory.directory_hub import DirectoryHub

        return DirectoryHub.open(repo_id).tree(revision)
    if place_to_push(repo_id).is_for_hfshard_only or is_offline(local_files_only=False):
        return None
    return fetch_tree_for_reading(repo_id, revision, token)


def _order(folder: str) -> tuple[bool, bool, int]:
    """Rank a folder: the top is preferred to `last-checkpoint`, and that to folders with numbers."""
    number = folder.rpartition("-")[2]
    return not folder, folder == "last-checkpoint", int(number) if number.isdecimal() else 0


def _newest(manager: CheckpointManager, args: TrainingArguments) -> str | None:
    """Find what True means if Trainer does not find it by itself."""
    if not place_to_save(manager.root).is_read_from_disk and (step := manager.latest_step()) is not None:
        return manager.path_of(step)
    root = str(args.output_dir)
    if os.path.isdir(root) and get_last_checkpoint(root) is not None:
        return None
    return manager.push_to_hub if manager.latest_step() is None else None


# Checks of a Trainer: its arguments are translated for a manager, or rejected if not fully supported.


REPLACED: Final = {
    "_save_checkpoint": "_save",
    "_load_optimizer_and_scheduler": "_load",
    "_load_rng_state": "_load_rng",
    "_load_from_checkpoint": "_load_weights",
    "_load_best_model": "_load_best",
    "get_train_dataloader": "_train_dataloader",
    "get_eval_dataloader": "_eval_dataloader",
    "train": "_train",
}
"""Methods of a Trainer -> those of the callback that replace them. The first five are private: on another version of
transformers, `check_trainer` finds that one is gone, and the tests fail if one is no longer called."""

_NOT_CALLED: Final = ("_save_checkpoint", "_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_rng_state")
"""The replaced methods that a Trainer's class may override, but that are not called for hfshard's checkpoints."""
_WITHOUT_STATE: Final[tuple[set[str], ...]] = (set(), {"_save_checkpoint"}, {"_load_from_checkpoint"})
"""Overrides that leave a resume exact: TRL writes a model card in the first method, and nothing reads it again;
sentence-transformers loads the weights in the second, which hfshard loads anyway."""

_PROCESSES: Final = (ParallelMode.NOT_PARALLEL, ParallelMode.NOT_DISTRIBUTED, ParallelMode.DISTRIBUTED)


def manager_from_arguments(args: TrainingArguments, arguments: dict[str, Any]) -> CheckpointManager:
    """Create the manager that the Trainer's arguments describe; those of the callback have precedence."""
    known: dict[str, Any] = {}
    if args.save_total_limit is not None and args.save_total_limit > 0:
        known["max_to_keep"] = args.save_total_limit
    if args.metric_for_best_model is not None:
        known |= {"keep_best": _metric_name(args), "metric_mode": "max" if args.greater_is_better else "min"}
    return CheckpointManager(str(args.output_dir), **{**known, **arguments})


def _metric_name(args: TrainingArguments) -> str:
    name = str(args.metric_for_best_model)
    return name if name.startswith("eval_") else f"eval_{name}"


def check_trainer(trainer: Trainer) -> None:
    """Reject a Trainer with settings that are not fully supported."""
    args = trainer.args
    if missing := [name for name in (*REPLACED, "store_flos") if not hasattr(trainer, name)]:
        raise InvalidArgumentError(
            f"{type(trainer).__name__} has no {', '.join(missing)}: CheckpointCallback does not support this version "
            "of transformers. Install a version that hfshard's requirements allow."
        )
    own = [name for name in _NOT_CALLED if getattr(type(trainer), name) is not getattr(Trainer, name)]
    if set(own) not in _WITHOUT_STATE:
        raise InvalidArgumentError(
            f"{type(trainer).__name__} overrides {', '.join(own)}, which CheckpointCallback replaces, so a state that "
            "they save and load would be lost. Keep it in a callback that is an ExportableState, or train without the "
            "CheckpointCallback."
        )
    _check_processes(trainer)
    # Trainer itself requires save_only_model for a model that a distributed_config has spread.
    if args.save_only_model and not getattr(trainer, "is_distributed_loading_by_transformers", False):
        raise InvalidArgumentError(
            "save_only_model=True leaves nothing to resume from. Remove it, or train without the CheckpointCallback."
        )
    strategy = HubStrategy(args.hub_strategy)
    if args.push_to_hub and strategy != HubStrategy.END:
        raise InvalidArgumentError(
            f"hub_strategy='{strategy.value}' would push what Trainer saves, which is nothing. Set it to 'end', and "
            "pass CheckpointCallback push_to_hub='org/name' to push each checkpoint."
        )
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(trainer.model, peft.PeftModel):
        raise InvalidArgumentError(
            "CheckpointCallback saves whole models, but this one is a PeftModel, which should save only its adapter. "
            "Train without the callback."
        )


def _check_processes(trainer: Trainer) -> None:
    """Reject methods of spreading a training over processes that are not supported."""
    args = trainer.args
    if trainer.is_deepspeed_enabled or args.parallel_mode not in _PROCESSES:
        name = "DeepSpeed" if trainer.is_deepspeed_enabled else args.parallel_mode.value
        raise InvalidArgumentError(
            f"This Trainer uses {name}, which keeps parts of the state to itself. CheckpointCallback supports only "
            "single-process training, DistributedDataParallel, FSDP2 and tensor parallelism. Train without the "
            "callback."
        )
    if trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2:
        raise InvalidArgumentError(
            "This Trainer uses FSDP1, whose gradients between micro-batches have no names and shapes. Use FSDP2: "
            'TrainingArguments(fsdp=True, fsdp_config={"version": 2}).'
        )
    dispatches = trainer.accelerator.dispatch_batches and not isinstance(trainer.train_dataset, IterableDataset)
    if args.world_size > 1 and dispatches:
        raise InvalidArgumentError(
            "With accelerator_config={'dispatch_batches': True}, the first process loads all batches, and "
            "CheckpointCallback cannot seed them one by one. Leave it out, so that each process loads its own."
        )


def check_rotation(args: TrainingArguments, manager: CheckpointManager) -> None:
    """Reject settings with which Trainer and the manager would keep different checkpoints."""
    limit = args.save_total_limit
    if limit is not None and limit > 0 and limit != manager.max_to_keep:
        raise InvalidArgumentError(
            f"save_total_limit={limit} differs from the CheckpointManager's max_to_keep={manager.max_to_keep}. Remove "
            "one, or make them equal."
        )
    if not args.load_best_model_at_end:
        return
    if limit == 1:
        raise InvalidArgumentError(
            "With save_total_limit=1 and load_best_model_at_end=True, Trainer itself removes the last checkpoint at "
            "the end. Pass max_to_keep=1 to CheckpointCallback instead, which keeps the last and the best."
        )
    mode = "max" if args.greater_is_better else "min"
    if manager.max_to_keep is not None and (manager.keep_best, manager.metric_mode) != (_metric_name(args), mode):
        raise InvalidArgumentError(
            "load_best_model_at_end=True needs a CheckpointManager that keeps the best checkpoint: "
            f"CheckpointManager(..., keep_best='{_metric_name(args)}', metric_mode='{mode}')."
        )


# The weights of a Trainer's checkpoints: which program saved them, and how each rank loads its part.


_STOCK_FILES: Final = ("optimizer.pt", "scheduler.pt")
"""A directory that has one of them was saved by Trainer alone. Under FSDP it writes only the second."""


def is_stock_checkpoint(checkpoint: str) -> bool:
    """Return whether Trainer alone has saved a checkpoint."""
    return any(os.path.isfile(os.path.join(checkpoint, name)) for name in _STOCK_FILES)


def load_parts(model: Any, checkpoint: str | None) -> bool:
    """Load a checkpoint of hfshard into a model that is spread over ranks. Every rank must call.

    Returns:
        False for other models and checkpoints, into which nothing was loaded.
    """
    if checkpoint is None or is_stock_checkpoint(checkpoint) or not has_spread_state(model):
        return False
    options = LoadOptions(strict=True, read="pread")  # a mapped file would keep its disk space after its rotation
    load_into_spread_module(model, CheckpointSource(checkpoint, CheckpointQuery()), options)
    return True
