"""The place of a run's checkpoints, as a run needs it: a directory, or a store."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Final, Protocol

from hfshard._util.progress import ProgressCallback
from hfshard.commit.transaction import NewCheckpoint, ShardWriter, Transaction
from hfshard.constants import (
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    INDEX_SUFFIX,
    MAX_INDEX_BYTES,
    SAFETENSORS_SUFFIX,
)
from hfshard.errors import InvalidArgumentError
from hfshard.training.run.manifest import MANIFEST, RunCheckpoint
from hfshard.training.state.collect_state import SavePayload


class RunTransaction(Transaction, Protocol):
    """The writing of one checkpoint."""

    saved: RunCheckpoint | None
    """The checkpoint, once it is committed."""


class RunStorage(Protocol):
    """The place of a run's checkpoints; `take` comes before anything that changes it."""

    @property
    def root(self) -> str:
        """The run's directory, or its address."""

    def checkpoints(self) -> list[RunCheckpoint]:
        """List every checkpoint, damaged ones too, as `newest_first` sorts them."""

    def saving(self) -> AbstractContextManager[None]:
        """Change the place while the block runs; each refusal raises one error, which names it."""

    def take(self) -> bool:
        """Become the only writer, if this process is not the only one yet.

        Returns:
            Whether it has just become that, so that other writers may have left something there.
        """

    @property
    def is_taken(self) -> bool:
        """True if this process is its only writer."""

    def release(self) -> None:
        """Let others become its writer; a second call does nothing."""

    def clean_up(self) -> None:
        """Remove what killed saves left, and restore what they had moved aside."""

    def known_checkpoints(self) -> list[RunCheckpoint]:
        """List the checkpoints like `checkpoints`; what only this writer changes need not be requested again."""

    @property
    def keeps_names(self) -> bool:
        """True if files keep their usual names, so that PEFT can read an adapter there."""

    def transaction(
        self,
        step: int,
        metrics: dict[str, float] | None,
        new: NewCheckpoint,
        writer: ShardWriter,
        progress_callback: ProgressCallback,
    ) -> AbstractContextManager[RunTransaction]:
        """Begin a checkpoint; its commit replaces the previous one of its step.

        Args:
            step: The step.
            metrics: Its metrics; None: those of the checkpoint that it replaces.
            new: Everything that is saved except for the tensors and the manifest.
            writer: Writes the shards.
            progress_callback: Called from any thread with the number of bytes that were written.
        """

    def remove(self, checkpoints: Sequence[RunCheckpoint]) -> None:
        """Remove checkpoints: each at once, then its files; not what another save has put in its place.

        What cannot be removed is logged as a warning.
        """


# Names of a checkpoint's files.


TRAINING_STATE: Final = "training_state.json"

_OWN_SUFFIXES: Final = (SAFETENSORS_SUFFIX, INDEX_SUFFIX)


def check_names(files: Mapping[str, bytes], payload: SavePayload) -> None:
    """Reject small files whose names lead elsewhere or are used by a checkpoint, and plain values that are too long.

    Raises:
        InvalidArgumentError: A name is rejected, or the plain values are longer than a restore reads.
    """
    if len(payload.training_state) > MAX_INDEX_BYTES:
        raise InvalidArgumentError(
            f"The state's plain values take {len(payload.training_state):,} bytes, but a restore reads at most "
            f"{MAX_INDEX_BYTES:,}. Store long lists of numbers as tensors."
        )
    own = {MANIFEST, TRAINING_STATE, CONFIG_NAME, GENERATION_CONFIG_NAME}
    for request in payload.requests.values():
        own |= request.model_files.keys()
    for name in files:
        if (
            not isinstance(name, str)
            or name in own
            or os.path.basename(name) != name
            or name.startswith(".")
            or name.endswith(_OWN_SUFFIXES)
        ):
            raise InvalidArgumentError(
                f"A checkpoint file cannot be named {name!r}. Pass a plain name that the checkpoint does not use "
                "itself."
            )
