"""A run in memory: all that runs take in a new kind of place. It derives from no other storage of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from weakref import WeakValueDictionary

from hfshard.errors import DirectoryLockedError
from hfshard.format.index import CheckpointIndex, FileDigest
from hfshard.shards.write_shards import WriteJob
from hfshard.training.run.manifest import (
    CHECKPOINT,
    MANIFEST,
    CheckpointManifest,
    RunCheckpoint,
    checkpoint_path,
    newest_first,
)
from hfshard.training.run.run_storage import RunSave
from tests.places.memory_place import FILES, MemoryTransaction, Reader


class MemoryRunTransaction(MemoryTransaction):
    """A checkpoint that appears at once, when all its files are put into the dictionary."""

    def __init__(self, path: str, manifest: CheckpointManifest, save: RunSave) -> None:
        super().__init__(path, save.new)
        self._manifest = manifest
        self._progress_callback = save.progress_callback
        self._records: dict[str, FileDigest] = {}
        self.saved: RunCheckpoint | None = None

    def write(self, jobs: Mapping[str, WriteJob]) -> dict[str, FileDigest]:
        self._records = super().write(jobs)
        self._progress_callback(sum(job.nbytes for job in jobs.values()))
        return self._records

    def commit(
        self,
        indexes: Mapping[str, CheckpointIndex],
        index_files: Mapping[str, bytes],
        confirm: Callable[[], None],
    ) -> bool:
        small = {**self._new.small_files, **index_files}
        manifest = self._manifest.with_files(self._records, small)
        files = {**self._staged, **small, MANIFEST: manifest.to_json()}
        confirm()
        replaced = files_below(self._address)
        FILES.update({f"{self._address}/{name}": raw for name, raw in files.items()})
        for path in replaced:
            if path.removeprefix(f"{self._address}/") not in files:
                del FILES[path]
        self.saved = RunCheckpoint.of(self._address, manifest)
        return True


class MemoryRun:
    """A run in the memory of this process."""

    keeps_names = True

    def __init__(self, root: str) -> None:
        self.root = root

    def checkpoints(self) -> list[RunCheckpoint]:
        paths = {name: f"{self.root}/{name}" for name in Reader(self.root).folders()}
        found = [
            RunCheckpoint(path, int(match[1]))
            for name, path in paths.items()
            if (match := CHECKPOINT.fullmatch(name)) and f"{path}/{MANIFEST}" in FILES
        ]
        of_steps = {one.step: one for one in sorted(found, key=lambda one: one.is_own)}  # the last one of a step counts
        return newest_first(list(of_steps.values()))

    def acquire(self) -> bool:
        is_new = not self.is_acquired
        if WRITERS.setdefault(self.root, self) is not self:
            raise DirectoryLockedError(f"Another manager saves into '{self.root}'. Close it.", path=self.root)
        return is_new

    @property
    def is_acquired(self) -> bool:
        return WRITERS.get(self.root) is self

    def release(self) -> None:
        if self.is_acquired:
            del WRITERS[self.root]

    def clean_up(self) -> None:
        """Nothing is left of a save without its commit."""

    @contextmanager
    def transaction(self, save: RunSave) -> Iterator[MemoryRunTransaction]:
        found = self.checkpoints()
        save_number = max((one.save_number for one in found), default=0) + 1
        manifest = CheckpointManifest.begun(save.step, save_number, save.metrics, lambda: found)
        yield MemoryRunTransaction(checkpoint_path(self.root, save.step), manifest, save)

    def remove(self, checkpoints: Sequence[RunCheckpoint]) -> None:
        for one in checkpoints:
            if one.is_current():
                for path in files_below(one.path):
                    del FILES[path]


WRITERS: WeakValueDictionary[str, MemoryRun] = WeakValueDictionary()
"""Address of a run -> its writer, as long as that exists."""


def files_below(address: str) -> list[str]:
    """List the addresses of the files of a checkpoint."""
    return [path for path in FILES if path.startswith(f"{address}/")]
