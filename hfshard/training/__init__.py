"""Training checkpoints with exact resume: model, optimizer, scheduler, RNG and data position; imported when used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hfshard.training.data.dataloader import ResumableDataLoader
    from hfshard.training.data.plain_loader import plain_loader
    from hfshard.training.integrations.accelerate import prepare_loader, prepared_state
    from hfshard.training.integrations.trainer_callback import CheckpointCallback
    from hfshard.training.manager import CheckpointManager
    from hfshard.training.parts.gradients import Gradients
    from hfshard.training.recompute.gradient_checkpointing import enable_gradient_checkpointing
    from hfshard.training.state import TrainingState
    from hfshard.training.step import RestoredStep

__all__ = [
    "CheckpointCallback",
    "CheckpointManager",
    "Gradients",
    "RestoredStep",
    "ResumableDataLoader",
    "TrainingState",
    "enable_gradient_checkpointing",
    "plain_loader",
    "prepare_loader",
    "prepared_state",
]

# Lazy (PEP 562), as in the package itself.
_HOMES = {
    "CheckpointCallback": "integrations.trainer_callback",
    "CheckpointManager": "manager",
    "ResumableDataLoader": "data.dataloader",
    "Gradients": "parts.gradients",
    "RestoredStep": "step",
    "TrainingState": "state",
    "enable_gradient_checkpointing": "recompute.gradient_checkpointing",
    "plain_loader": "data.plain_loader",
    "prepare_loader": "integrations.accelerate",
    "prepared_state": "integrations.accelerate",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hfshard.training' has no attribute '{name}'")
    value = getattr(import_module(f"hfshard.training.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
