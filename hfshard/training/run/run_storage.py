"""Interface of the directory or store of a run, and of the writing of one checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from hfshard._util.progress import ProgressCallback
from hfshard.commit.transaction import NewCheckpoint, ShardWriter, Transaction
from hfshard.training.run.manifest import RunCheckpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSave:
    """One checkpoint to write into a run."""

    step: int
    metrics: dict[str, float] | None
    """Its metrics; None: those of the checkpoint that it replaces, if its weights are the same."""
    new: NewCheckpoint
    """Everything that is saved except for the tensors and the manifest."""
    writer: ShardWriter
    """Writes the shards."""
    progress_callback: ProgressCallback
    """Called from any thread with the number of bytes that were written."""


class RunTransaction(Transaction, Protocol):
    """The writing of one checkpoint."""

    saved: RunCheckpoint | None
    """The checkpoint, once it is committed."""


class RunStorage(Protocol):
    """The directory or store of a run.

    `RunWriter` has one of its own, and acquires it before it changes anything. Readers have another one.
    """

    root: str
    """The run's directory, or its address."""

    def checkpoints(self) -> list[RunCheckpoint]:
        """List the checkpoints, damaged ones included, as `newest_first` sorts them."""

    def acquire(self) -> bool:
        """Become the only writer, and create what is missing.

        Returns:
            Whether that is new, so that other writers may have left something there.
        """

    @property
    def is_acquired(self) -> bool:
        """True while this process may remove checkpoints, as the only writer or the last one."""

    def release(self) -> None:
        """Let others write; a second call does nothing."""

    def clean_up(self) -> None:
        """Remove what killed saves left, and restore what they had moved aside."""

    @property
    def keeps_names(self) -> bool:
        """True if files keep their usual names, so that PEFT can read an adapter there; a store adds a save's id."""

    def transaction(self, save: RunSave) -> AbstractContextManager[RunTransaction]:
        """Begin a checkpoint; its commit replaces the previous one of its step."""

    def remove(self, checkpoints: Sequence[RunCheckpoint]) -> None:
        """Remove checkpoints, in a store by one request: each at once, then its files.

        What another save has put in its place stays. What cannot be removed is logged as a warning.
        """
