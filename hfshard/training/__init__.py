"""Training checkpoints with exact resume: model, optimizer, scheduler, RNG and data position; all imported lazily."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfshard._util.lazy_imports import lazy_exports

# Public name -> the module that defines it, imported when it is first used.
_HOMES = {
    "CheckpointCallback": "integrations.trainer",
    "CheckpointManager": "manager",
    "Gradients": "state.rng",
    "RestoredStep": "state.step",
    "ResumableDataLoader": "data.dataloader",
    "RunReader": "run.find_checkpoint",
    "TrainingState": "state.training_state",
    "enable_gradient_checkpointing": "gradient_checkpointing",
    "lightning_callback": "integrations.lightning",
    "plain_loader": "data.dataloader",
    "prepare_loader": "integrations.accelerate",
    "prepared_state": "integrations.accelerate",
}

__all__ = sorted(_HOMES)

if TYPE_CHECKING:
    from hfshard.training.data.dataloader import ResumableDataLoader as ResumableDataLoader
    from hfshard.training.data.dataloader import plain_loader as plain_loader
    from hfshard.training.gradient_checkpointing import enable_gradient_checkpointing as enable_gradient_checkpointing
    from hfshard.training.integrations.accelerate import prepare_loader as prepare_loader
    from hfshard.training.integrations.accelerate import prepared_state as prepared_state
    from hfshard.training.integrations.lightning import lightning_callback as lightning_callback
    from hfshard.training.integrations.trainer import CheckpointCallback as CheckpointCallback
    from hfshard.training.manager import CheckpointManager as CheckpointManager
    from hfshard.training.run.find_checkpoint import RunReader as RunReader
    from hfshard.training.state.rng import Gradients as Gradients
    from hfshard.training.state.step import RestoredStep as RestoredStep
    from hfshard.training.state.training_state import TrainingState as TrainingState
else:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
