"""Translates a Trainer's arguments for its checkpoints, and refuses those that are not fully supported."""

from __future__ import annotations

import sys
from typing import Any, Final

from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import HubStrategy

from hfshard.errors import InvalidArgumentError
from hfshard.training.manager import CheckpointManager

REPLACED: Final = (
    "_save_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_rng_state",
    "get_train_dataloader",
    "get_eval_dataloader",
)
"""Methods of a Trainer that are replaced. The first three are private: on another version of transformers,
`check_trainer` finds that one is gone, and the tests fail where one is no longer called."""


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
