"""A checkpoint of a run as it is found: where it is, its step, and its manifest or what is wrong with that."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Final

from hfshard.errors import DamagedCheckpointError, HfshardError, MissingShardError
from hfshard.format.stored_save import SaveId
from hfshard.training.run.manifest import CheckpointManifest

CHECKPOINT: Final = re.compile(r"checkpoint-(\d{1,18})")
"""What the folder of a checkpoint may be called."""


class RunCheckpoint:
    """What looks like a checkpoint. Its manifest is read when it is asked for, once.

    Args:
        path: Of its directory, or its address in a store.
        step: In its name.
        read: Reads the manifest.
        save_id: In a store, the number and id in the names of its objects; None: the manifest tells the number.
    """

    def __init__(
        self,
        path: str,
        step: int,
        read: Callable[[], CheckpointManifest],
        *,
        save_id: SaveId | None = None,
    ) -> None:
        self.path = path
        self.step = step
        self.save_id = save_id
        self._read = read

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r}, step={self.step})"

    @classmethod
    def of(cls, path: str, manifest: CheckpointManifest) -> RunCheckpoint:
        """Return a checkpoint whose manifest is known."""
        return cls(path, manifest.step, lambda: manifest)

    @property
    def manifest(self) -> CheckpointManifest | None:
        """The manifest; None where it can't be read."""
        return self._outcome[0]

    @property
    def problem(self) -> HfshardError | None:
        """Why the manifest can't be read; None where it can."""
        return self._outcome[1]

    @property
    def save_number(self) -> int:
        """Which save of the run it is; 0 where that can't be read."""
        if self.save_id is not None:
            return self.save_id.number
        return 0 if self.manifest is None else self.manifest.save_number

    @property
    def age(self) -> tuple[bool, int, str, int]:
        """Sorts checkpoints by when they were saved; those that do not tell come last."""
        return not self.is_finished, self.save_number, "" if self.save_id is None else self.save_id.id, self.step

    @property
    def is_unfinished(self) -> bool:
        """Whether it has no manifest, which comes last: a save or a copy has not got that far, or has been killed."""
        return isinstance(self.problem, MissingShardError)

    @property
    def is_finished(self) -> bool:
        """Whether its save was finished, as far as the place tells without reading more than it must."""
        return self.save_id is not None or self.manifest is not None

    @property
    def is_own(self) -> bool:
        """Whether a save has made it under this name; a copy that a user has made is never removed."""
        return self.is_finished and is_own_name(os.path.basename(self.path), self.step)

    @cached_property
    def _outcome(self) -> tuple[CheckpointManifest | None, HfshardError | None]:
        try:
            manifest = self._read()
            if manifest.step != self.step:
                raise DamagedCheckpointError(
                    f"'{self.path}' is the checkpoint of step {manifest.step}. Rename it to "
                    f"'{os.path.basename(checkpoint_path('', manifest.step))}', or move it elsewhere.",
                    path=self.path,
                    expected=self.step,
                    actual=manifest.step,
                )
        except HfshardError as error:
            return None, error
        return manifest, None


def checkpoint_path(root: str, step: int) -> str:
    """The path or address of the checkpoint of a step."""
    return os.path.join(root, f"checkpoint-{step:08d}")


def is_own_name(name: str, step: int) -> bool:
    """Whether a save gives the checkpoint of a step this name."""
    return name == os.path.basename(checkpoint_path("", step))


def read_run_checkpoint(path: str, step: int, read: Callable[[], CheckpointManifest]) -> RunCheckpoint:
    """Return a checkpoint whose manifest was read, or found to be unreadable."""
    found = RunCheckpoint(path, step, read)
    _ = found.manifest
    return found


def newest_first(found: Sequence[RunCheckpoint]) -> list[RunCheckpoint]:
    """Sort checkpoints: the one that was saved last comes first.

    Checkpoints whose manifest can't be read come before all others: nothing says when they were saved, and they must
    not be skipped silently.
    """
    return sorted(found, key=lambda one: one.age, reverse=True)
