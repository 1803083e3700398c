"""The files of a checkpoint in a store: listed once, and read by ranges of what was listed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import datetime
from functools import cached_property, partial
from threading import Event
from typing import Final

from hfshard._util.threads import cancellable, in_threads
from hfshard.constants import FILES_AT_ONCE, MAX_INDEX_BYTES, SAFETENSORS_SUFFIX
from hfshard.errors import DamagedCheckpointError, IntegrityError, MissingShardError, remedy
from hfshard.storage.checkpoint.checkpoint import OpenCheckpoint, open_checkpoint
from hfshard.storage.checkpoint.folder import RangedFolder
from hfshard.storage.disk.byte_source import ByteSource
from hfshard.storage.format.index import FileDigest
from hfshard.storage.format.integrity import sha256_of
from hfshard.storage.weights.safetensors_shard import SafetensorsShard
from hfshard.stores.memory import store_memory_bytes
from hfshard.stores.opening import open_store
from hfshard.stores.protocols import Store, StoredObject
from hfshard.stores.stored_source import StoredSource
from hfshard.training.run.manifest import MANIFEST, CheckpointManifest

_JSON: Final = ".json"


class StoreCheckpoint:
    """The files of a checkpoint in a store."""

    is_compared_when_read = True

    def __init__(self, path: str) -> None:
        self.path = path

    @cached_property
    def _store(self) -> Store:
        return open_store(self.path)

    @cached_property
    def _folder(self) -> RangedFolder:
        folder = RangedFolder(self._store, self.path, store_memory_bytes())
        folder.look()
        return folder

    def is_there(self) -> bool:
        """Whether anything lies there, or did when this was first asked for something."""
        return bool(self._folder.names())

    def has(self, name: str) -> bool:
        """Whether there is such an object."""
        return self._folder.has(name)

    def names(self) -> list[str]:
        """As they were listed."""
        return self._folder.names()

    def size(self, name: str) -> int:
        """As it was listed."""
        return self._folder.size(name)

    def saved_at(self) -> datetime | None:
        """As the store's listing says."""
        found: StoredObject | None = self._folder.listed(MANIFEST)
        return None if found is None else found.put_at

    def manifest(self) -> CheckpointManifest:
        """Read its manifest."""
        return CheckpointManifest.from_json(self.read_small(MANIFEST), f"{self.path}/{MANIFEST}")

    def check(
        self,
        manifest: CheckpointManifest,
        *,
        is_full: bool,
        progress_callback: Callable[[int], object] | None = None,
        on_problem: Callable[[DamagedCheckpointError], object] | None = None,
    ) -> None:
        """Compare all files with the manifest, several at once: weights by their listed sizes, or in full."""
        check = partial(self._check_one, is_full=is_full, progress_callback=progress_callback, on_problem=on_problem)
        in_threads(check, sorted(manifest.files.items(), key=lambda item: -(item[1].size or 0)), FILES_AT_ONCE)

    def read_small(self, name: str) -> bytes:
        """Read a small object."""
        return self._folder.read_small(name, MAX_INDEX_BYTES)

    def open_shard(self, name: str) -> SafetensorsShard:
        """Read its header."""
        return self._folder.open_shards([name])[name]

    def source(self, name: str, sha256: str | None) -> ByteSource:
        """Read it by ranges when it is asked for."""
        return StoredSource(self._store, self._found(name), sha256)

    def open_part(self, base: str, entry: str) -> AbstractContextManager[OpenCheckpoint]:
        """Read the headers; every tensor is compared with its checksum while it is read."""
        return open_checkpoint(self._folder, use_safetensors=True, base=base, weights_name=entry, verify="full")

    def _check_one(
        self,
        item: tuple[str, FileDigest],
        cancelled: Event,
        *,
        is_full: bool,
        progress_callback: Callable[[int], object] | None,
        on_problem: Callable[[DamagedCheckpointError], object] | None,
    ) -> None:
        name, record = item
        try:
            self._compare(name, record, cancellable(progress_callback, cancelled), is_full=is_full)
        except DamagedCheckpointError as error:
            if on_problem is None:
                raise
            on_problem(error)

    def _bytes_of(self, name: str) -> bytes:
        """All bytes of a file that is no weights: not always text, such as a tokenizer's model."""
        if name.endswith(_JSON):
            return self.read_small(name)
        return self._store.read(self._found(name))

    def _found(self, name: str) -> StoredObject:
        found = self._store.find(name)
        if found is None:
            raise MissingShardError(f"'{self.path}/{name}' was removed while it was read.", path=f"{self.path}/{name}")
        return found

    def _compare(self, name: str, record: FileDigest, tell: Callable[[int], object], *, is_full: bool) -> None:
        path = f"{self.path}/{name}"
        size = self._folder.size(name) if self._folder.has(name) else None
        if size != record.size:
            found = "missing" if size is None else f"of {size} bytes"
            raise IntegrityError(
                f"'{path}' is {found}, and {record.size} bytes were saved. {remedy(path)}",
                path=path,
                expected=record.size,
                actual=size,
            )
        if name.endswith(SAFETENSORS_SUFFIX):
            if is_full:
                self.open_shard(name).check_contents(record, tell)
            return
        if (sha256 := sha256_of(self._bytes_of(name))) != record.sha256:
            raise IntegrityError(
                f"'{path}' is not the file that was saved: its sha256 is {sha256}, but was {record.sha256}. "
                f"{remedy(path)}",
                path=path,
                expected=record.sha256,
                actual=sha256,
            )
