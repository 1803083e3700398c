"""Checkpoints in stores for Trainer, which reads its own progress from a directory before it asks for anything else."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from hfshard._util.addresses import is_address
from hfshard.training.integrations.trainer_files import STATE_FILE
from hfshard.training.run.places.opening import files_at

_BEST: Final = "best_model_checkpoint"
"""What Trainer gives up where it is no directory; `CheckpointCallback` knows it anyway."""


@contextmanager
def near_checkpoint(path: str) -> Iterator[str]:
    """Give Trainer a directory: that of the checkpoint; or, of one in a store, one with Trainer's own progress alone.

    Args:
        path: A directory, or an address.

    Raises:
        MissingShardError: Trainer has not saved it.
    """
    if not is_address(path):
        yield path
        return
    progress = json.loads(files_at(path).read_small(STATE_FILE))
    with tempfile.TemporaryDirectory(prefix="hfshard-") as directory:
        with open(os.path.join(directory, STATE_FILE), "w", encoding="utf-8") as file:
            json.dump({**progress, _BEST: None}, file)
        yield os.path.realpath(directory)
