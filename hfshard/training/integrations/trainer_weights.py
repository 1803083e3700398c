"""The weights of a Trainer's checkpoints: who has saved them, and how each rank loads its part of them."""

from __future__ import annotations

import os
from typing import Any, Final

from hfshard.checkpoint.load_options import LoadOptions
from hfshard.distributed.load_on_ranks import has_spread_state, load_into_spread_module
from hfshard.hub.resolve import CheckpointQuery
from hfshard.places.source import CheckpointSource

_STOCK_FILES: Final = ("optimizer.pt", "scheduler.pt")
"""A directory that has one of them was saved by Trainer alone. Under FSDP it writes the second only."""


def is_stock_checkpoint(checkpoint: str) -> bool:
    """Whether Trainer alone has saved a checkpoint."""
    return any(os.path.isfile(os.path.join(checkpoint, name)) for name in _STOCK_FILES)


def load_parts(model: Any, checkpoint: str | None) -> bool:
    """Load a checkpoint of ours into a model that is spread over ranks. Every rank must call.

    Returns:
        False for other models and checkpoints, into which nothing was loaded.
    """
    if checkpoint is None or is_stock_checkpoint(checkpoint) or not has_spread_state(model):
        return False
    load_into_spread_module(model, CheckpointSource(checkpoint, CheckpointQuery()), LoadOptions(strict=True))
    return True
