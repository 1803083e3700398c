"""Translates a Trainer's arguments for its checkpoints, and refuses those that are not fully supported."""

from __future__ import annotations

import sys
from typing import Any, Final

from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import HubStrategy
from transformers.training_args import ParallelMode

from hfshard.errors import InvalidArgumentError
from hfshard.training.manager import CheckpointManager

REPLACED: Final = (
    "_save_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_rng_state",
    "_load_from_checkpoint",
    "_load_best_model",
    "get_train_dataloader",
    "get_eval_dataloader",
    "train",
)
"""Methods of a Trainer that are replaced. The first five are private: on another version of transformers,
`check_trainer` finds that one is gone, and the tests fail where one is no longer called."""

_PROCESSES: Final = (ParallelMode.NOT_PARALLEL, ParallelMode.NOT_DISTRIBUTED, ParallelMode.DISTRIBUTED)


def manager_from_arguments(args: TrainingArguments, arguments: dict[str, Any]) -> CheckpointManager:
    """Make the manager that the Trainer's arguments describe; those of the callback have precedence."""
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
    """Refuse a Trainer with settings that are not fully supported."""
    args = trainer.args
    if missing := [name for name in (*REPLACED, "store_flos") if not hasattr(trainer, name)]:
        raise InvalidArgumentError(
            f"{type(trainer).__name__} has no {', '.join(missing)}: CheckpointCallback does not know this version of "
            "transformers. Install one that is named in hfshard's requirements."
        )
    _check_processes(trainer)
    # Trainer itself demands save_only_model of a model that a distributed_config has spread.
    if args.save_only_model and not getattr(trainer, "is_distributed_loading_by_transformers", False):
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


def _check_processes(trainer: Trainer) -> None:
    """Refuse what spreads a training over processes in a way that is not supported."""
    args = trainer.args
    if trainer.is_deepspeed_enabled or args.parallel_mode not in _PROCESSES:
        name = "DeepSpeed" if trainer.is_deepspeed_enabled else args.parallel_mode.value
        raise InvalidArgumentError(
            "CheckpointCallback saves trainings of one process, DistributedDataParallel, FSDP2 and tensor parallelism. "
            f"This Trainer uses {name}, which keeps parts of the state to itself: train without the callback."
        )
    if trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2:
        raise InvalidArgumentError(
            "This Trainer uses FSDP1, whose flat parameters have no names and shapes of their own. Use FSDP2: "
            'TrainingArguments(fsdp=True, fsdp_config={"version": 2}).'
        )
    dispatches = trainer.accelerator.dispatch_batches and not isinstance(trainer.train_dataset, IterableDataset)
    if args.world_size > 1 and dispatches:
        raise InvalidArgumentError(
            "With accelerator_config={'dispatch_batches': True} the first process loads the batches of all, which "
            "CheckpointCallback can't seed one by one. Leave it out: each process then loads its own."
        )


def check_rotation(args: TrainingArguments, manager: CheckpointManager) -> None:
    """Refuse settings by which Trainer and the manager would keep different checkpoints."""
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
