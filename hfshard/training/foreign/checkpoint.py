"""`ForeignCheckpoint`: what a reader makes of another program's checkpoint, and what it was asked for."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from hfshard.disk.safe_open import Identity, identity_of
from hfshard.errors import CheckpointChangedError
from hfshard.training.run.finding import Level
from hfshard.training.state import PartKind

_TAIL_BYTES: Final = 1 << 16
"""The end of a file that tells it from another one: there a zip lists the checksums of its records."""


NO_RNG: Final = "the random number generators (dropout and shuffling go on from those of this process)"
NO_STEP: Final = "the number of steps (0 is taken)"


@dataclass(frozen=True, slots=True)
class ForeignRequest:
    """What is wanted of a foreign checkpoint."""

    kinds: Mapping[str, PartKind] = field(default_factory=dict)
    """The parts of the state that is restored: name -> kind. Empty where there is no state: a conversion."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Name of a part -> where its state lies in the file, with dots for what is nested: "ema.state_dict"."""
    strict: bool = True
    """Refuse a file if something in it can't be read without running code; else that is left out and reported."""
    verify: Level = "full"
    """"full": compare every byte with the checksums that the files have."""
    rank: int = 0
    world_size: int = 1


@dataclass(frozen=True, slots=True)
class ForeignCheckpoint:
    """Another program's checkpoint, read and not yet compared with a training state.

    What in its values was not read, such as a scheduler's bound method, is `nested_types.NOT_STORED`.
    """

    path: str
    """The file or directory."""
    files: Mapping[str, Identity]
    """Path of each file that was read -> which one it was."""
    step: int | None
    """None where it has none."""
    components: Mapping[str, Any]
    """Name of a part -> what its own `state_dict()` returned; parameters of an optimizer are by position, still. Names
    are those of the request where they were found, those of the file otherwise. Tensors of modules may be mapped files,
    all others are in memory."""
    files_of_rank: Mapping[str, Identity] = field(default_factory=dict)
    """As `files`: those that this rank alone has read."""
    has_order: bool = True
    """Whether the tensors of modules stand in the order of their `state_dict()`: safetensors sorts them."""
    epochs: float | None = None
    """How many epochs were trained, whole ones and a part of one; None where it does not say."""
    extra: Any = None
    """What else it holds: epoch, loss, arguments."""
    rng: dict[str, Any] | None = None
    """This rank's random number generators, in the form of `parts.rng.rng_state`; None where it has none."""
    companions: Mapping[str, bytes] = field(default_factory=dict)
    """Small files that belong to the model, such as config.json: a conversion takes them along."""
    lacking: tuple[str, ...] = ()
    """What it does not hold, in words that follow on "lacks": "the position in the data"."""
    differences: tuple[str, ...] = ()
    """What was left out as it can't be read without running code, in sentences. Always empty with strict."""

    def confirm(self) -> None:
        """Check that no file was replaced or changed since it was read.

        Raises:
            CheckpointChangedError: One was.
        """
        for path, identity in {**self.files, **self.files_of_rank}.items():
            try:
                now = identity_of(os.stat(path))
            except OSError:
                now = None
            if now != identity:
                raise CheckpointChangedError(
                    f"'{path}' was replaced while it was being read, and nothing was restored. Try again.", path=path
                )

    def fingerprint(self) -> str:
        """Digest the names, the sizes and the ends of its files: the same on every rank that sees the same ones."""
        digest = hashlib.sha256()
        for path in sorted(self.files):
            with open(path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _TAIL_BYTES))
                digest.update(f"{os.path.basename(path)} {size} ".encode() + file.read(_TAIL_BYTES))
        return digest.hexdigest()
