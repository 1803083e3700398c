"""Carry out a save in a store: copy and send its shards, put its index last, and list again.

Each object of a save has a unique name, so that a late, lost or repeated request changes nothing for another save. An
index is put only when its shards exist, and shards are deleted only when a higher index exists. So the highest index is
always complete, on every service that lists what was put.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from hfshard._util.progress import ProgressCallback
from hfshard._util.threads import run_in_threads
from hfshard.commit import store_plan
from hfshard.commit.store_plan import KnownShard, highest_index
from hfshard.commit.transaction import KnownFile, ShardWriter
from hfshard.constants import FILES_AT_ONCE
from hfshard.errors import (
    CheckpointChangedError,
    CommitUnfinishedError,
    RemoteChangedError,
    StoreAccessError,
    StoreError,
)
from hfshard.format.digests import md5_of
from hfshard.format.file_names import INDEX_FILE
from hfshard.format.index import CheckpointIndex, FileDigest
from hfshard.format.stored_save import (
    INLINED_BYTES,
    SaveId,
    StoredObjectRecord,
    StoredSave,
    plain_copy,
    plain_index,
)
from hfshard.shards.write_shards import WriteJob, synchronize_devices
from hfshard.stores.store import Store, StoredObject
from hfshard.tensors.stored_tensor import RawTensor

logger = logging.getLogger(__name__)

CopiesOf = Callable[[Mapping[str, bytes], SaveId], dict[str, bytes]]
"""Builds a save's plain copies: its small files by their usual names, and its number and id -> name -> contents."""

_MOST_SETTLED: Final = 100
"""Maximum number of times that plain copies are put again because another save was faster."""


@dataclass
class StoreTransaction:
    """One save in one folder of a store, from its first shard to its index."""

    store: Store
    """Opened at the folder."""
    entry: str
    """Usual name of the index: "model.safetensors.index.json", or "checkpoint.json" in a run."""
    save_id: SaveId
    known: Mapping[str, KnownShard]
    """Fingerprint -> a shard that may have the same bytes."""
    root: Store
    """Opened at the folder of the known shards, or above it."""
    folder: str = ""
    """Folder of the save, below the root."""
    digests: dict[str, FileDigest] = field(default_factory=dict)
    """Usual name -> digest of each shard, once it is in the store."""
    small_files: dict[str, bytes] = field(default_factory=dict)
    """Usual name -> contents of each small file."""
    _objects: dict[str, StoredObjectRecord] = field(default_factory=dict)
    """Usual name -> record of each small file that is not inlined."""

    def copy_unchanged(self, jobs: Mapping[str, WriteJob], writer: ShardWriter, checksum: str | None) -> None:
        """Copy on the server the shards whose bytes did not change.

        Args:
            jobs: Usual name -> contents, of all shards.
            writer: Compares them.
            checksum: A key of `HASHERS`; None: nothing can be compared.

        Raises:
            StoreError: The store refused the request, or failed.
        """
        same = self.find_unchanged(jobs, writer, checksum)
        below = f"{self.folder}/" if self.folder else ""

        def copy(name: str) -> FileDigest | None:
            digest = same[name]
            source = self.known[digest.fingerprint or ""].found
            try:
                copied = self.root.copy(source, f"{below}{self.save_id.object_name(name)}")
            except CheckpointChangedError:  # another process has replaced or deleted it, so it is sent
                return None
            return replace(digest, etag=copied.etag)

        copied = run_in_threads(lambda name, _: copy(name), same, FILES_AT_ONCE)
        self.digests |= {name: digest for name, digest in zip(same, copied, strict=True) if digest is not None}

    def find_unchanged(
        self, jobs: Mapping[str, WriteJob], writer: ShardWriter, checksum: str | None
    ) -> dict[str, FileDigest]:
        """Find the shards whose bytes did not change: usual name -> digest."""
        if checksum is None or not self.known:
            return {}
        recorded = {one.digest.tensor_digests for one in self.known.values()}
        chosen = {name: job for name, job in jobs.items() if _may_be_known(job, recorded)}
        files = {
            fingerprint: KnownFile(None, replace(one.digest, tensor_digests=None))
            for fingerprint, one in self.known.items()
        }
        digests = writer.link(list(chosen.values()), files, checksum)
        return {name: digest for name, digest in zip(chosen, digests, strict=True) if digest is not None}

    def send(
        self,
        jobs: Mapping[str, WriteJob],
        writer: ShardWriter,
        checksum: str | None,
        progress_callback: ProgressCallback | None,
    ) -> None:
        """Send the shards that were not copied.

        Raises:
            StoreError: The store refused, or failed. The next save deletes what was sent.
        """
        synchronize_devices(list(jobs.values()))
        left = {name: job for name, job in jobs.items() if name not in self.digests}
        sent = writer.write(list(left.values()), checksum, progress_callback, self.store)
        self.digests |= zip(left, sent, strict=True)

    def add_small_files(self, files: Mapping[str, bytes]) -> None:
        """Add small files. Indexes, and other files of up to 1 MiB, are inlined; the rest are put as objects.

        Raises:
            StoreError: The store refused, or failed.
        """
        self.small_files |= files
        large = [name for name, raw in files.items() if len(raw) > INLINED_BYTES and not INDEX_FILE.fullmatch(name)]
        put = run_in_threads(
            lambda name, _: self.store.put(self.save_id.object_name(name), files[name]), large, FILES_AT_ONCE
        )
        self._objects |= {name: StoredObjectRecord(one.size, one.etag) for name, one in zip(large, put, strict=True)}

    def contents(self, replaced: Mapping[str, str]) -> StoredSave:
        """Return the contents of the index, once all shards and small files are in the store.

        Args:
            replaced: Name -> sha256 of the plain objects that are replaced; see `StoredSave`.
        """
        shards = {name: StoredObjectRecord(one.size or 0, one.etag or "") for name, one in self.digests.items()}
        return StoredSave(
            save_id=self.save_id,
            objects={**shards, **self._objects},
            small_files={name: raw for name, raw in self.small_files.items() if name not in self._objects},
            replaced=replaced,
        )

    def put_index(self, save: StoredSave, list_names: Callable[[], Collection[str]]) -> bool:
        """Put the index. From then on this save is the checkpoint, unless there is a higher one.

        Args:
            save: Its contents.
            list_names: Lists the objects among which the highest index counts, by their names in the folder.

        Returns:
            Whether the store answered; without an answer, a listing has shown the index.

        Raises:
            RemoteChangedError: The put was not answered, and a higher index exists.
            CommitUnfinishedError: It is unknown whether the index was put, or will be.
            StoreError: The store has refused the index.
        """
        name = self.save_id.object_name(self.entry)
        raw = save.to_json()
        try:
            store_plan.remember_put(self.store, self.store.put(name, raw), raw)
        except StoreError as error:
            if not error.may_be_done:
                raise
            self._look_for_index(list_names, error)
            return False
        return True

    def _look_for_index(self, list_names: Callable[[], Collection[str]], error: StoreError) -> None:
        """List the objects to find out whether an unanswered put of the index succeeded."""
        path = str(self.store.address.joined(self.save_id.object_name(self.entry)))
        try:
            highest = highest_index(list_names(), self.entry)
        except StoreError as second:
            raise _untold(path, second) from error
        if highest is None or highest < self.save_id:
            raise _untold(path, error) from error
        if highest > self.save_id:
            raise overtaken(self.store) from error


def overtaken(store: Store) -> RemoteChangedError:
    """Return the error for a save that a higher one has overtaken."""
    address = str(store.address)
    return RemoteChangedError(
        f"Another process saved to '{address}' at the same time, and its checkpoint is the newer one. "
        "To replace it, save again.",
        path=address,
    )


def put_copies(store: Store, copies: Mapping[str, bytes], found: Mapping[str, StoredObject]) -> None:
    """Put the plain copies of a save's small files, for other tools; copies that are right already are left alone.

    Args:
        store: Opened at the folder.
        copies: Name -> contents; the last one names the save's objects, and is put last.
        found: The listed objects.
    """
    changed = [name for name, raw in copies.items() if not _is_put(store, found.get(name), raw)]
    entries = changed[-1:] if changed[-1:] == list(copies)[-1:] else []

    def put(name: str) -> None:
        store_plan.remember_put(store, store.put(name, copies[name]), copies[name])

    run_in_threads(lambda name, _: put(name), [name for name in changed if name not in entries], FILES_AT_ONCE)
    for name in entries:
        put(name)


def settle_copies(
    store: Store, entry: str, save_id: SaveId, copies_of: CopiesOf
) -> tuple[dict[str, StoredObject], SaveId]:
    """List again, and put the plain copies of the highest save as long as others were put last.

    Args:
        store: Opened at the folder.
        entry: Usual name of the index.
        save_id: The save whose copies were put last.
        copies_of: Builds the copies of a save.

    Returns:
        The last listing, and the highest save in it.
    """
    for _ in range(_MOST_SETTLED):
        found = store.list_objects()
        highest = highest_index(found, entry)
        if highest is None or highest <= save_id:
            return found, save_id
        index = found[highest.object_name(entry)]
        try:
            save = StoredSave.from_json(store.read(index), str(store.address.joined(index.name)), highest)
            objects = {name: store.read(found[highest.object_name(name)]) for name in sorted(save.large_files)}
        except (CheckpointChangedError, KeyError):  # a still higher one has replaced it
            continue
        put_copies(store, copies_of({**save.small_files, **objects}, highest), found)
        save_id = highest
    return found, save_id


def plain_copies(small_files: Mapping[str, bytes], save_id: SaveId, entry: str) -> dict[str, bytes]:
    """Return the plain copies of a save's small files: the index comes last, and names the save's objects."""
    index = CheckpointIndex.from_json(small_files[entry], entry)
    others = {name: plain_copy(name, raw, save_id) for name, raw in small_files.items() if name != entry}
    return {**others, entry: plain_index(index, save_id)}


def delete_or_warn(store: Store, names: Sequence[str], sweep: Callable[[str], bool] | None) -> bool:
    """Delete what a newer save has replaced; if the store refuses or fails, log a warning.

    Args:
        store: Opened at the folder.
        names: Names of objects.
        sweep: Selects by name the unfinished uploads to delete, too; None: none are looked for.

    Returns:
        Whether everything was deleted.
    """
    try:
        if names:
            store.delete(names)
        if sweep is not None:
            store.sweep_uploads(sweep)
    except StoreAccessError as error:
        logger.warning(
            "Saved into '%s', but earlier saves cannot be deleted: %s They take space, but do no harm.",
            store.address,
            error,
        )
    except StoreError as error:
        logger.warning(
            "Saved into '%s', but earlier saves could not be deleted: %s The next save will.", store.address, error
        )
    else:
        return True
    return False


def has_bytes(store: Store, found: StoredObject | None, raw: bytes) -> bool:
    """Return whether an object has these bytes; read it only if its size, its ETag and the cache do not decide."""
    if found is None or found.size != len(raw):
        return False
    return found.etag == md5_of(raw) or (store_plan.known(store, found) or store.read(found)) == raw


def _is_put(store: Store, found: StoredObject | None, raw: bytes) -> bool:
    """Return whether a plain copy has its contents already; False for one that was replaced since it was listed."""
    try:
        return has_bytes(store, found, raw)
    except CheckpointChangedError:
        return False


def _may_be_known(job: WriteJob, recorded: Collection[str | None]) -> bool:
    """Return whether an earlier shard may have the tensors of a job, judging by their digests without reading any."""
    digests = [value.digest if isinstance(value, RawTensor) else None for value in job.tensors.values()]
    return None in digests or not digests or "".join(filter(None, digests)) in recorded


def _untold(path: str, error: StoreError) -> CommitUnfinishedError:
    return CommitUnfinishedError(
        f"It is unknown whether '{path}' was written: {error.message} Either the old checkpoint stays or the new "
        "one appears; both load. Nothing was deleted. Save again.",
        path=path,
    )
