"""The sets of tensors in a training checkpoint, read for the state that is restored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from hfshard.checkpoint.load_options import read_tensors
from hfshard.format.file_names import WeightNames
from hfshard.training.run.manifest import CheckpointManifest
from hfshard.training.run.places.protocols import CheckpointFiles
from hfshard.training.spread.layouts import StateLayouts
from hfshard.training.spread.part_reading import read_part_of_rank
from hfshard.training.spread.states import is_spread_state
from hfshard.training.state import TrainingState


class ReadPart(Protocol):
    """Reads one set of tensors of a checkpoint."""

    def __call__(
        self, base: str, is_wanted: Callable[[str], bool] | None = None, *, is_copied: bool = False
    ) -> dict[str, torch.Tensor]:
        """Return name -> tensor, of the names that are wanted or of all.

        Those that are only copied from (`is_copied`) may be mapped files.
        """


def part_reader(state: TrainingState, files: CheckpointFiles, manifest: CheckpointManifest, own_rank: int) -> ReadPart:
    """What reads the tensors of one set of files.

    Those that the training goes on with are read into memory: a mapped file would keep its space on the disk after it
    was rotated away. Of a state that is spread over ranks, this rank's parts are read.

    Args:
        state: That is restored.
        files: The checkpoint's.
        manifest: The checkpoint's.
        own_rank: Whose own random numbers and positions are wanted.
    """
    layouts = StateLayouts(state) if is_spread_state(state) else None

    def read(
        base: str, is_wanted: Callable[[str], bool] | None = None, *, is_copied: bool = False
    ) -> dict[str, torch.Tensor]:
        names = WeightNames(base=base)
        entry = next((name for name in (names.single, names.index) if name in manifest.files), None)
        if entry is None:
            return {}
        with files.open_part(base, entry) as checkpoint:
            if layouts is not None:
                return read_part_of_rank(checkpoint, base, layouts, own_rank, is_wanted)
            return read_tensors(checkpoint, is_wanted, "cpu", "auto" if is_copied else "pread")

    return read
