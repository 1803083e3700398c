"""What a run asks of the place where its checkpoints lie, and a restore of the files of one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Protocol

from hfshard.checkpoint.open_checkpoint import OpenCheckpoint
from hfshard.commit.transaction import ShardWriter
from hfshard.disk.byte_source import ByteSource
from hfshard.errors import DamagedCheckpointError
from hfshard.shards.shard import SafetensorsShard
from hfshard.training.collecting import SavePayload
from hfshard.training.run.manifest import CheckpointManifest
from hfshard.training.run.run_checkpoint import RunCheckpoint


class CheckpointFiles(Protocol):
    """The files of one checkpoint."""

    @property
    def path(self) -> str:
        """Of its directory, or its address."""

    @property
    def is_compared_when_read(self) -> bool:
        """Whether tensors are compared with their checksums while they are read: then nothing is read only for that."""

    def is_there(self) -> bool:
        """Whether there is such a folder."""

    def has(self, name: str) -> bool:
        """Whether it has a file of this name, whatever is in it."""

    def names(self) -> list[str]:
        """Name the files that lie directly in it."""

    def size(self, name: str) -> int:
        """Bytes of a file."""

    def saved_at(self) -> datetime | None:
        """When the manifest was written; None where the place does not say."""

    def manifest(self) -> CheckpointManifest:
        """Read its manifest; the other files are not checked.

        Raises:
            MissingShardError: There is none: the checkpoint was never finished, or is another tool's.
            DamagedCheckpointError, UnsafePathError: It is damaged.
        """

    def check(
        self,
        manifest: CheckpointManifest,
        *,
        is_full: bool,
        progress_callback: Callable[[int], object] | None = None,
        on_problem: Callable[[DamagedCheckpointError], object] | None = None,
    ) -> None:
        """Compare every file with the manifest, as `manifest.check_files` does."""

    def read_small(self, name: str) -> bytes:
        """Read a small file.

        Raises:
            MissingShardError, DamagedCheckpointError, UnsafePathError: It is missing, or can't be one of a checkpoint.
        """

    def open_shard(self, name: str) -> SafetensorsShard:
        """Open one file of weights; the caller closes it."""

    def source(self, name: str, sha256: str | None) -> ByteSource:
        """The contents of a file, whose sha256 is this one."""

    def open_part(self, base: str, entry: str) -> AbstractContextManager[OpenCheckpoint]:
        """Open one set of tensors for reading.

        Args:
            base: How the names of its files begin.
            entry: Its index or single file.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOrder:
    """What is asked of a save."""

    payload: SavePayload
    manifest: CheckpointManifest
    """Without files, and without the number of the save, which the place gives."""
    files: Mapping[str, bytes]
    """More small files."""
    progress_callback: Callable[[int], object] | None
    """Gets the bytes that were written, from any thread."""
    writer: ShardWriter | None
    """Writes the shards, where other ranks take part; None: this process does."""
    before_commit: Callable[[], None]
    """Called when all is written and nothing is visible yet: the last moment to raise."""
    keeps_metrics: bool = False
    """Whether it has the metrics of the checkpoint of its step that it replaces."""

    def over(self, replaced: RunCheckpoint | None) -> CheckpointOrder:
        """Return what is asked for where it replaces this checkpoint, which is read only where it has to be."""
        if not self.keeps_metrics or replaced is None or replaced.manifest is None:
            return self
        return replace(self, manifest=replace(self.manifest, metrics=replaced.manifest.metrics))


class RunPlace(Protocol):
    """Where the checkpoints of a run lie; `take` comes before all that changes it."""

    @property
    def root(self) -> str:
        """The run's directory, or its address."""

    def checkpoints(self) -> list[RunCheckpoint]:
        """List every checkpoint, damaged ones too, as `newest_first` sorts them."""

    def saving(self) -> AbstractContextManager[None]:
        """Change it while the block runs: what it refuses is one error each, which names it."""

    def take(self) -> bool:
        """Become the only writer, where this process is not that yet.

        Returns:
            Whether it has just become that, so that others may have left something there.
        """

    @property
    def is_taken(self) -> bool:
        """Whether this process is its only writer."""

    def release(self) -> None:
        """Let others become its writer; a second call does nothing."""

    def clean_up(self) -> None:
        """Remove what killed saves left, and put back what they had moved aside."""

    def known_checkpoints(self) -> list[RunCheckpoint]:
        """List the checkpoints as `checkpoints` does; what only this writer changes need not be asked for again."""

    def write(self, order: CheckpointOrder) -> RunCheckpoint:
        """Write a checkpoint, durably and all or nothing; one of its step that was there before is replaced."""

    def remove(self, checkpoints: Sequence[RunCheckpoint]) -> None:
        """Remove checkpoints, each at once, and then its files; not what another save has put in its place meanwhile.

        What can't be removed is logged as a warning.
        """
