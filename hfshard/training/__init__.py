"""Training checkpoints with exact resume: model, optimizer, scheduler, RNG and data position; all imported lazily."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfshard._util.lazy_imports import lazy_exports

# Public name -> the module that defines it, imported when it is first used.
_HOMES = {
    "CheckpointCallback": "integrations.trainer_callback",
    "CheckpointManager": "manager",
    "Gradients": "parts.gradients",
    "RestoredStep": "step",
    "ResumableDataLoader": "data.dataloader",
    "RunReader": "run_reader",
    "TrainingState": "state",
    "enable_gradient_checkpointing": "recompute.gradient_checkpointing",
    "lightning_callback": "integrations.lightning",
    "plain_loader": "data.plain_loader",
    "prepare_loader": "integrations.accelerate",
    "prepared_state": "integrations.accelerate",
}

__all__ = sorted(_HOMES)

if TYPE_CHECKING:
    from hfshard.training.data.dataloader import ResumableDataLoader as ResumableDataLoader
    from hfshard.training.data.plain_loader import plain_loader as plain_loader
    from hfshard.training.integrations.accelerate import prepare_loader as prepare_loader
    from hfshard.training.integrations.accelerate import prepared_state as prepared_state
    from hfshard.training.integrations.lightning import lightning_callback as lightning_callback
    from hfshard.training.integrations.trainer_callback import CheckpointCallback as CheckpointCallback
    from hfshard.training.manager import CheckpointManager as CheckpointManager
    from hfshard.training.parts.gradients import Gradients as Gradients
    from hfshard.training.recompute.gradient_checkpointing import (
        enable_gradient_checkpointing as enable_gradient_checkpointing,
    )
    from hfshard.training.run_reader import RunReader as RunReader
    from hfshard.training.state import TrainingState as TrainingState
    from hfshard.training.step import RestoredStep as RestoredStep
else:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
