"""The small files that a Trainer's checkpoint has beside the state: its own progress and the tokenizer."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path
from typing import Final

from transformers import Trainer

logger = logging.getLogger(__name__)

STATE_FILE: Final = "trainer_state.json"
"""The file that Trainer reads its own progress from."""


def trainer_files(trainer: Trainer) -> dict[str, bytes]:
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
