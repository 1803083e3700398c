"""Carry out a save in a store: copy and send its shards, put its index last, and list again.

Each object of a save has a unique name, so that a late, lost or repeated request changes nothing for another save. An
index is put only when its shards exist, and shards are deleted only when a higher index exists. So the highest index is
always complete, on every service that lists what was put.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from hfshard._util.arguments import StoreAddress
from hfshard._util.progress import ProgressCallback, byte_progress
from hfshard._util.text import shorten_list
from hfshard._util.threads import delay_interrupt, run_in_threads
from hfshard.checkpoint.check_files import retry_if_replaced
from hfshard.checkpoint.ranged_folder import RangedFolder
from hfshard.commit import store_plan
from hfshard.commit.store_plan import KnownShard, StoreState, highest_index, lower_objects, next_id, read_store_state
from hfshard.commit.transaction import JobsOf, KnownFile, NewCheckpoint, OwnShardWriter, ShardWriter
from hfshard.constants import (
    CONFIG_NAME,
    COPY_BYTES,
    FILES_AT_ONCE,
    MARKS,
    MAX_INDEX_BYTES,
    README,
    SIGNATURE_NAME,
)
from hfshard.disk.byte_source import ByteSource, contents_equal
from hfshard.errors import (
    CheckpointChangedError,
    CommitUnfinishedError,
    DamagedCheckpointError,
    HfshardError,
    RemoteChangedError,
    SaveDirectoryError,
    StoreAccessError,
    StoreError,
    UnsafePathError,
)
from hfshard.format.file_names import INDEX_FILE, WeightNames, replaced_weights
from hfshard.format.index import CheckpointIndex, FileDigest, md5_of
from hfshard.format.stored_save import (
    BEFORE_ALL,
    INLINED_BYTES,
    SaveId,
    StoredObjectRecord,
    StoredSave,
    is_save_index,
    plain_copy,
    plain_index,
    save_in_name,
    save_of,
)
from hfshard.shards.shard_plan import ShardPlan
from hfshard.shards.write_shards import WriteJob, synchronize_devices
from hfshard.stores.open_store import open_store
from hfshard.stores.store import Store, StoredObject, StoredSource
from hfshard.tensors.stored_tensor import RawTensor

logger = logging.getLogger(__name__)

CopiesOf = Callable[[Mapping[str, bytes], SaveId], dict[str, bytes]]
"""Builds a save's plain copies: its small files by their usual names, and its number and id -> name -> contents."""

_MOST_SETTLED: Final = 100
"""Maximum number of times that plain copies are put again because another save was faster."""


@dataclass
class SaveObjects:
    """The objects of one save in one folder of a store, from its first shard to its index."""

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

    def with_paths(self, jobs: Mapping[str, WriteJob]) -> dict[str, WriteJob]:
        """Set the paths of jobs to the addresses of their objects."""
        address, name = self.store.address, self.save_id.object_name
        return {file: replace(job, path=str(address.joined(name(file)))) for file, job in jobs.items()}

    def copy_unchanged(self, same: Mapping[str, FileDigest]) -> None:
        """Copy on the server what `find_unchanged` has found; those that cannot be copied are left to `send`."""
        below = f"{self.folder}/" if self.folder else ""

        def copy(name: str) -> FileDigest | None:
            digest = same[name]
            source = self.known[digest.fingerprint or ""].found
            try:
                copied = self.root.copy(source, f"{below}{self.save_id.object_name(name)}")
            except (CheckpointChangedError, StoreError) as error:  # replaced, archived, under another key
                logger.info("Sending '%s', which could not be copied: %s", name, error)
                return None
            return replace(digest, etag=copied.etag)

        copied = run_in_threads(lambda name, _: copy(name), same, FILES_AT_ONCE)
        self.digests |= {name: digest for name, digest in zip(same, copied, strict=True) if digest is not None}

    def find_unchanged(
        self, jobs: Mapping[str, WriteJob], writer: ShardWriter, checksum: str | None
    ) -> dict[str, FileDigest]:
        """Find the shards whose bytes did not change: usual name -> digest. Without checksums, none can be compared."""
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
        """Return the contents of the index, once all shards and small files are in the store."""
        shards = {name: StoredObjectRecord(one.size or 0, one.etag or "") for name, one in self.digests.items()}
        return StoredSave(
            save_id=self.save_id,
            objects={**shards, **self._objects},
            small_files={name: raw for name, raw in self.small_files.items() if name not in self._objects},
            replaced=replaced,
        )

    def put_index(self, save: StoredSave, list_names: Callable[[], Collection[str]]) -> None:
        """Put the index. From then on this save is the checkpoint, unless there is a higher one.

        Args:
            save: Its contents.
            list_names: Lists the objects among which the highest index counts, by their names in the folder.

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

    def lost_among(self, found: Collection[str]) -> list[str]:
        """List the objects of this save that a listing from after its index lacks, the index first."""
        own = map(self.save_id.object_name, [self.entry, *self.digests, *self._objects])
        return [name for name in own if name not in found]


def with_index(plan: ShardPlan, names: WeightNames) -> ShardPlan:
    """Return a plan whose files an index names, even if there is only one."""
    files = names.shards(len(plan.shards))
    shards = tuple(replace(one, file=file) for one, file in zip(plan.shards, files, strict=True))
    return replace(plan, shards=shards, needs_index=True)


def overtaken(store: Store) -> RemoteChangedError:
    """Return the error for a save that a higher one has overtaken."""
    address = str(store.address)
    return RemoteChangedError(
        f"Another process saved to '{address}' at the same time, and its checkpoint is the newer one. "
        "To replace it, save again.",
        path=address,
    )


def lost(store: Store, names: Sequence[str]) -> RemoteChangedError:
    """Return the error for a save of which something else has deleted objects before it was finished."""
    address = str(store.address)
    return RemoteChangedError(
        f"Objects of this save in '{address}' were deleted while it ran, as by a lifecycle rule or 'hfshard remove': "
        f"{shorten_list(names, _SHOWN, quote=True)}. The earlier checkpoint stays. Save again.",
        path=address,
    )


def put_copies(store: Store, copies: Mapping[str, bytes], found: Mapping[str, StoredObject]) -> None:
    """Put the plain copies of a save's small files, for other tools; copies that are right already are left alone.

    The last one names the save's objects, and is put last.
    """
    changed = [name for name, raw in copies.items() if not has_bytes(store, found.get(name), raw)]
    entries = changed[-1:] if changed[-1:] == list(copies)[-1:] else []

    def put(name: str) -> None:
        store_plan.remember_put(store, store.put(name, copies[name]), copies[name])

    run_in_threads(lambda name, _: put(name), [name for name in changed if name not in entries], FILES_AT_ONCE)
    for name in entries:
        put(name)


def settle_copies(
    store: Store, entry: str, save_id: SaveId, copies_of: CopiesOf
) -> tuple[dict[str, StoredObject], SaveId]:
    """List again, and put the plain copies of the highest save as long as others than those of `save_id` were put last.

    Returns:
        The last listing, and the highest save in it.
    """
    for _ in range(_MOST_SETTLED):
        found = store.list_objects()
        highest = highest_index(found, entry)
        if highest is None or highest <= save_id:
            return found, save_id
        try:
            save = store_plan.read_save(store, found[highest.object_name(entry)], highest)
            large = {name: found[highest.object_name(name)] for name in sorted(save.large_files)}
            objects = {name: store_plan.read_object(store, one, MAX_INDEX_BYTES) for name, one in large.items()}
        except (CheckpointChangedError, KeyError):  # a still higher one has replaced it
            continue
        except (DamagedCheckpointError, UnsafePathError):  # it counts all the same, and has put no copies to replace
            return found, highest
        put_copies(store, copies_of({**save.small_files, **objects}, highest), found)
        save_id = highest
    return found, save_id


def plain_copies(small_files: Mapping[str, bytes], save_id: SaveId, entry: str) -> dict[str, bytes]:
    """Return the plain copies of a save's small files: the index comes last, and names the save's objects."""
    index = CheckpointIndex.from_json(small_files[entry], entry)
    others = {name: plain_copy(name, raw, save_id) for name, raw in small_files.items() if name != entry}
    return {**others, entry: plain_index(index, save_id)}


def delete_or_warn(store: Store, names: Sequence[str], sweep: Callable[[str], bool] | None) -> bool:
    """Delete objects that a newer save has replaced, and the unfinished uploads that `sweep`, if any, selects by name.

    Returns:
        Whether everything was deleted: if the store refuses or fails, this logs a warning.
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
    """Return whether an object has these bytes; False for one that was replaced since it was listed.

    It is read only if its size, its ETag and the cache do not decide.
    """
    if found is None or found.size != len(raw):
        return False
    try:
        return found.etag == md5_of(raw) or (store_plan.known(store, found) or store.read(found)) == raw
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


# A place in a store as the sink of the one save: list, copy and send the shards, put the index last, list again.


_STEP: Final = re.compile(r"checkpoint-\d{1,18}")
"""Name of a checkpoint's folder in a run."""

_SHOWN: Final = 3
"""Maximum number of object names in a message."""

_TRIES: Final = 5
"""Number of tries to inspect a place, as other processes may replace a listed object before it is read."""


@contextmanager
def store_transaction(store: Store, new: NewCheckpoint, writer: ShardWriter) -> Iterator[StoreTransaction]:
    """Inspect a place in a store for a save. Nothing is written to disk; the next save deletes what a failed one sent.

    `hides_single` does not matter: a checkpoint in a store has an index.

    Raises:
        SaveDirectoryError: It is a checkpoint of a run.
        RemoteChangedError: Other processes replaced it on every attempt.
        StoreError: The store refused, or failed.
    """
    _reject_folder_of_run(store)
    yield StoreTransaction(store, new, writer, _inspect(store, new))


def run_of_folder(store: Store) -> StoreAddress | None:
    """Return the address of the run that a place is a folder of, with or without a manifest; None if it is in none."""
    parent, _, name = store.address.prefix.rpartition("/")
    root = replace(store.address, prefix=parent)
    return root if _STEP.fullmatch(name) and open_store(root).list_objects(MARKS) else None


def _reject_folder_of_run(store: Store) -> None:
    """Reject a folder of a run, which deletes the folder's objects when it finds no manifest.

    Raises:
        SaveDirectoryError: It is such a folder.
    """
    if (root := run_of_folder(store)) is not None:
        raise SaveDirectoryError(
            f"'{store.address}' is a folder of the training run '{root}'. Save to another address, or save into the "
            "run with CheckpointManager.",
            path=str(store.address),
        )


def _inspect(store: Store, new: NewCheckpoint) -> _StoreBefore:
    """Inspect the place, and retry if it changes meanwhile.

    Raises:
        RemoteChangedError: It changed each time.
    """
    address = str(store.address)
    traits = replace(RangedFolder.traits, retries=_TRIES)
    try:
        return retry_if_replaced(lambda: _StoreBefore.read(store, new), traits, address)
    except CheckpointChangedError as error:
        raise RemoteChangedError(
            f"Other processes replaced the checkpoint in '{address}' on every attempt. Nothing was sent. "
            "Retry when no other save is running.",
            path=address,
        ) from error


@dataclass(frozen=True, slots=True)
class _StoreBefore:
    """A place in a store before a save, compared with what the save has besides tensors."""

    store: Store
    new: NewCheckpoint
    state: StoreState
    small_files: Mapping[str, bytes]
    """Small files of the new checkpoint, its own and the ones it keeps, without the index."""
    replaced: Mapping[str, str]
    """Name -> sha256 of the plain objects that are replaced; see `StoredSave`."""
    companion_files: Mapping[str, ByteSource]
    """Companion files that are missing in the store, or have other bytes there."""

    @classmethod
    def read(cls, store: Store, new: NewCheckpoint) -> _StoreBefore:
        """List the place, and read what a save must know about it.

        Raises:
            CheckpointChangedError: It changed meanwhile.
        """
        nested = {name.rpartition("/")[0] for name in (*new.small_files, *new.companion_files) if "/" in name}
        state = read_store_state(store, new.names, nested)
        dropped = {CONFIG_NAME} if new.drops_config else set()
        small_files = {**state.kept_files(new.small_files.keys() | dropped), **new.small_files}
        replaced = state.replaced_files([*small_files, *dropped])
        return cls(store, new, state, small_files, replaced, _changed_companions(store, new, state))

    def has_same_small_files(self) -> bool:
        """Return whether the newest save has exactly these small files, and an index, all of them intact."""
        state, save = self.state, self.state.save
        if save is None or save.small_files.keys() | save.large_files != {*self.small_files, state.names.index}:
            return False
        try:
            return all(state.folder.read_small(name, MAX_INDEX_BYTES) == raw for name, raw in self.small_files.items())
        except (CheckpointChangedError, DamagedCheckpointError):  # by another save, or by a user's edit
            return False

    def has_index(self, raw: bytes) -> bool:
        """Return whether the newest save has this index."""
        return raw == self.state.folder.read_small(self.state.names.index, MAX_INDEX_BYTES)

    def is_settled(self) -> bool:
        """Return whether there is nothing to delete, and no companion file to put."""
        is_alone = self.state.is_untouched and not self.replaced_below()
        return is_alone and not self.companion_files and not self.drops_plain_config()

    def has_copies(self, index: bytes) -> bool:
        """Return whether the plain copies for other tools are those of the newest save."""
        assert self.state.save is not None
        entry = self.state.names.index
        copies = plain_copies({**self.small_files, entry: index}, self.state.save.save_id, entry)
        return all(has_bytes(self.store, self.state.found.get(name), one) for name, one in copies.items())

    def drops_plain_config(self) -> bool:
        """Return whether the save removes a config.json that is there."""
        return self.new.drops_config and CONFIG_NAME in self.state.found and not self.state.shares_config

    def replaced_below(self) -> list[str]:
        """List the objects of checkpoints in folders for which this save has other weights, under plain file names."""
        found = self.state.found
        replaced = replaced_weights(found, self.new.companion_files)
        saves = {_save_below(name) for name in replaced if is_save_index(name)}  # without one, it may still be running
        plain = {name for name in replaced if save_in_name(name) is None}
        gone = plain | {name for name in found if save_in_name(name) is not None and _save_below(name) in saves}
        return sorted(gone, key=lambda name: (not is_save_index(name), not name.endswith(".json"), name))


def _save_below(name: str) -> tuple[str, SaveId | None]:
    return name.rpartition("/")[0], save_in_name(name)


def _changed_companions(store: Store, new: NewCheckpoint, state: StoreState) -> dict[str, ByteSource]:
    """Find the companion files to put; an existing README is the user's own and stays, unless this is a copy."""
    changed = {}
    for name, source in new.companion_files.items():
        there = state.found.get(name)
        is_kept = there is not None and name == README and not new.is_copy
        if not is_kept and (there is None or not contents_equal(source, StoredSource(store, there))):
            changed[name] = source
    return changed


class StoreTransaction:
    """`Transaction` of a place in a store.

    A save that changes nothing puts nothing. Shards that did not change are copied on the server. If another process
    has overtaken this save with exactly the same, nothing is left to do.
    """

    def __init__(self, store: Store, new: NewCheckpoint, writer: ShardWriter, before: _StoreBefore) -> None:
        self._store, self._new, self._writer = store, new, writer
        self._before = before
        self._objects = self._objects_of(before, next_id(before.state.found))
        self._jobs: dict[str, WriteJob] = {}
        self._unchanged: dict[str, FileDigest] = {}
        """The digests of all shards, if the newest save seems to be exactly this one: they are not copied."""
        self._error: HfshardError | None = None
        """The error that ended this save, if another process has saved the same shards."""

    def prepare(self, plan: ShardPlan, names: WeightNames, jobs_of: JobsOf) -> ShardPlan:
        """Name the files as shards, even a single one: it has an index."""
        return with_index(plan, names)

    def write(self, jobs: Mapping[str, WriteJob]) -> dict[str, FileDigest]:
        """Copy unchanged shards on the server, and send the others; nothing yet if all of it seems to be there.

        Raises:
            RemoteChangedError, StoreError: As in `commit`.
        """
        self._jobs = self._objects.with_paths(jobs)
        may_be_same = self._before.is_settled() and self._before.has_same_small_files()  # before tensors are read
        same = self._objects.find_unchanged(self._jobs, self._writer, self._new.checksum)
        if may_be_same and len(same) == len(jobs):
            self._unchanged = same
            return same
        try:
            self._send(same)
        except StoreError as error:
            return self._same_of_others(error)
        return self._digests

    def commit(
        self,
        indexes: Mapping[str, CheckpointIndex],
        index_files: Mapping[str, bytes],
        confirm: Callable[[], None],
    ) -> bool:
        """Put the small files and the index, list again, and delete what this save has replaced.

        Raises:
            RemoteChangedError: Another process saved there at the same time, and its checkpoint is the newer one.
            CommitUnfinishedError: It is unknown whether the new checkpoint was saved; or it was, without the plain
                copies for other tools.
            StoreError: The store refused, or failed: the old checkpoint stays.
        """
        [index] = index_files.values()
        if self._error is not None:
            return self._accept_index(index, self._error)
        if self._unchanged and self._before.has_index(index) and self._before.has_copies(index):
            logger.info("Nothing has changed in '%s': nothing was sent.", self._store.address)
            return False
        try:
            if self._unchanged:
                self._send(self._unchanged)
            self._objects.add_small_files({**self._before.small_files, self._new.names.index: index})
        except StoreError as error:
            return self._accept_same(index, error)
        save = self._objects.contents(self._before.replaced)
        confirm()
        try:
            with delay_interrupt():
                self._objects.put_index(save, self._store.list_objects)
                found, highest = self._put_copies()
                if highest > self._objects.save_id:
                    raise overtaken(self._store)
                if gone := self._objects.lost_among(found):
                    self._withdraw()
                    raise lost(self._store, gone)
                self._delete_lower(found)
        except (StoreError, RemoteChangedError) as error:
            return self._accept_same(index, error)
        self._note_signature()
        return True

    @property
    def _digests(self) -> dict[str, FileDigest]:
        return {file: self._objects.digests[file] for file in self._jobs}

    def _objects_of(self, before: _StoreBefore, save_id: SaveId) -> SaveObjects:
        return SaveObjects(self._store, self._new.names.index, save_id, before.state.known_shards(), self._store)

    def _send(self, same: Mapping[str, FileDigest]) -> None:
        self._objects.copy_unchanged(same)
        new_bytes = sum(job.nbytes for file, job in self._jobs.items() if file not in self._objects.digests)
        with byte_progress("Saving", new_bytes, self._new.progress) as progress_callback:
            self._objects.send(self._jobs, self._writer, self._new.checksum, progress_callback)

    def _same_of_others(self, error: StoreError | RemoteChangedError) -> dict[str, FileDigest]:
        """Return the digests of all shards if another process has saved the same ones, and inspect its save.

        Args:
            error: The error that ended this save: a higher one may have deleted what it was about to send.

        Raises:
            RemoteChangedError: Another process has saved something else.
            The error: No other process has saved, or the store can't be asked.
        """
        other: HfshardError = error
        try:
            current = _inspect(self._store, self._new)
            is_newer = current.state.save is not None and current.state.save != self._before.state.save
            if is_newer and isinstance(self._writer, OwnShardWriter) and current.has_same_small_files():
                objects = self._objects_of(current, self._objects.save_id)
                same = objects.find_unchanged(self._jobs, self._writer, self._new.checksum)
                if len(same) == len(self._jobs):
                    self._before, self._error = current, error
                    return same
            if is_newer:
                other = overtaken(self._store)
        except StoreError:
            pass  # the first error is more informative
        raise other from (None if other is error else error)

    def _accept_same(self, index: bytes, error: StoreError | RemoteChangedError) -> bool:
        """Accept the save of another process, if it is the same; raises as `_same_of_others` and `_accept_index` do."""
        self._same_of_others(error)
        return self._accept_index(index, error)

    def _accept_index(self, index: bytes, error: HfshardError) -> bool:
        """Accept the save of another process with the same shards, if its index is the same, too.

        Raises:
            RemoteChangedError: It is not.
            The error: The store can't be asked.
        """
        try:
            is_same = self._before.has_index(index)
        except StoreError:
            raise error from None
        if not is_same:
            raise overtaken(self._store) from error
        logger.info("Another process saved the same checkpoint into '%s'.", self._store.address)
        return True

    def _put_copies(self) -> tuple[Mapping[str, StoredObject], SaveId]:
        """Put the files that other tools read: companion files, and plain copies of the small files.

        Returns:
            The last listing, and the highest save in it.

        Raises:
            CommitUnfinishedError: The store refused, or failed.
        """
        entry, save_id, store = self._objects.entry, self._objects.save_id, self._store
        copies_of = partial(plain_copies, entry=entry)
        try:
            companions = self._before.companion_files.items()
            run_in_threads(lambda item, _: self._put_companion(*item), companions, FILES_AT_ONCE)
            others = {name: found for name, found in self._before.state.found.items() if name != entry}
            put_copies(store, copies_of(self._objects.small_files, save_id), others)  # the entry is another save's
            return settle_copies(store, entry, save_id, copies_of)
        except StoreError as error:
            raise CommitUnfinishedError(
                f"The new checkpoint in '{store.address}' was saved and hfshard loads it, but the plain copies that "
                f"other tools read could not be written: {error} Save again to finish.",
                path=str(store.address),
            ) from error

    def _put_companion(self, name: str, source: ByteSource) -> None:
        with source.open() as reader:
            writer = self._store.open_writer(name, source.size, self._before.state.found.get(name))
            try:
                while block := reader.read(COPY_BYTES):
                    writer.write(memoryview(block))
                writer.finish()
            except BaseException:
                writer.abort()
                raise

    def _withdraw(self) -> None:
        """Delete the index of this save, of which objects are missing, and put the copies of the earlier one again."""
        entry = self._objects.entry
        self._store.delete([self._objects.save_id.object_name(entry)])
        _, earlier = settle_copies(self._store, entry, BEFORE_ALL, partial(plain_copies, entry=entry))
        if earlier == BEFORE_ALL:
            self._store.delete([entry])

    def _delete_lower(self, found: Mapping[str, StoredObject]) -> None:
        """Delete what this save has replaced: earlier saves, complete or not, and uploads of another tool."""
        state, save_id = self._before.state, self._objects.save_id
        uploaded = [name for name in sorted(state.uploaded) if found.get(name) == state.found[name]]
        config = [CONFIG_NAME] if self._before.drops_plain_config() else []

        def is_lower(name: str) -> bool:
            one = save_of(name, state.names)
            return one is not None and one < save_id

        sweep = is_lower if save_id.number > 1 else None
        lower = lower_objects(found, state.names, save_id)
        replaced = [*lower, *uploaded, *config, *self._before.replaced_below()]
        if not delete_or_warn(self._store, replaced, sweep) and (uploaded or config):
            logger.warning(
                "hfshard loads the new checkpoint from '%s', but other tools load the remains of the old one until "
                "they are deleted: %s.",
                self._store.address,
                shorten_list([*uploaded, *config], _SHOWN),
            )

    def _note_signature(self) -> None:
        """Warn if an existing signature that this save does not include is now stale."""
        if SIGNATURE_NAME in self._before.state.found and SIGNATURE_NAME not in self._new.companion_files:
            logger.warning(
                "The signature '%s' is stale: this save replaced the files it covers, so verification will fail. Sign "
                "a directory (hfshard sign DIR --private-key KEY) and push it there, or delete the object.",
                self._store.address.joined(SIGNATURE_NAME),
            )
