"""Saves into a store: list, copy and send the shards under names of this save's own, put the index last, list again."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from hfshard._util.progress import bytes_bar
from hfshard._util.text import list_some
from hfshard._util.threads import deferred_interrupt, in_threads
from hfshard.commit.store_commit import (
    StoreTransaction,
    delete_or_warn,
    has_bytes,
    overtaken,
    plain_copies,
    put_copies,
    settle_copies,
)
from hfshard.commit.store_plan import StoreState, lower_objects, next_id, read_state
from hfshard.commit.transaction import OwnShardWriter, ShardWriter
from hfshard.constants import (
    CONFIG_NAME,
    COPY_BYTES,
    FILES_AT_ONCE,
    MARKS,
    MAX_INDEX_BYTES,
    README,
    SIGNATURE_NAME,
    WEIGHTS_SUFFIXES,
)
from hfshard.disk.byte_source import ByteSource, has_same_bytes
from hfshard.errors import (
    CheckpointChangedError,
    CommitUnfinishedError,
    HfshardError,
    RemoteChangedError,
    SaveDirectoryError,
    StoreError,
)
from hfshard.format.index import CheckpointIndex
from hfshard.format.stored_save import SaveId, is_save_index, save_of, split_object_name
from hfshard.saving.prepare import index_of, plan_request, shard_jobs
from hfshard.saving.request import SaveRequest
from hfshard.shards.shard_plan import ShardPlan
from hfshard.shards.write_shards import WriteJob, writer_threads
from hfshard.stores.open_store import open_store
from hfshard.stores.store import Store, StoredObject, StoredSource

logger = logging.getLogger(__name__)

_STEP: Final = re.compile(r"checkpoint-\d{1,18}")
"""What a run calls the folder of a checkpoint."""

_SHOWN: Final = 3
"""Names of objects in a message."""

_TRIES: Final = 5
"""Times that a place is looked at because another process replaced what was listed before it was read."""


def save_to_store(
    request: SaveRequest,
    address: str,
    check: Callable[[], None] = lambda: None,
    writer: ShardWriter | None = None,
) -> CheckpointIndex:
    """Save what a request has into a store, all or nothing; nothing is written to the disk.

    A save that changes nothing puts nothing. Shards that did not change are copied on the server.

    Args:
        request: What to save, and how. `hides_single` does not matter: a checkpoint in a store has an index.
        address: "s3://bucket/prefix" or another one.
        check: Called when the place was looked at, and just before the commit.
        writer: Sends the shards; None: this process does.

    Returns:
        The index.

    Raises:
        RemoteChangedError: Another process saved there at the same time: its checkpoint is the newer one.
        CommitUnfinishedError: Nobody can tell whether the new checkpoint is there; or it is, and the plain copies for
            other tools are not.
        SaveDirectoryError: It is a checkpoint of a run.
        StoreError: The store refused, or failed: the old checkpoint stays. What was sent stays, too, until the next
            save deletes it.
    """
    store = open_store(address)
    _refuse_folder_of_run(store)
    return save_into(store, request, check, writer or OwnShardWriter())


def _refuse_folder_of_run(store: Store) -> None:
    """Refuse a folder whose objects a run deletes when it finds no manifest.

    Raises:
        SaveDirectoryError: It is one.
    """
    parent, _, name = store.address.prefix.rpartition("/")
    if _STEP.fullmatch(name) and open_store(replace(store.address, prefix=parent)).list_objects(MARKS):
        raise SaveDirectoryError(
            f"'{store.address}' is a folder of the training run '{replace(store.address, prefix=parent)}'. Save to "
            "another address; or save into the run with CheckpointManager.",
            path=str(store.address),
        )


def save_into(store: Store, request: SaveRequest, check: Callable[[], None], writer: ShardWriter) -> CheckpointIndex:
    """Save into a store that is open; see `save_to_store`."""
    writer_threads()  # raises where the environment asks for more than there is
    plan = plan_request(request)
    save = _begin(store, request, plan)
    check()
    index = save.if_unchanged(writer)
    if index is not None:
        logger.info("Nothing has changed in '%s': nothing was sent.", store.address)
        return index
    try:
        index = save.run(writer, check)
    except (StoreError, RemoteChangedError) as error:
        index = _saved_by_others(save, plan, writer, error)
    logger.info("Saved %d tensors, %d bytes, into '%s'.", len(index.weight_map), plan.total_size, store.address)
    return index


def _saved_by_others(save: _Save, plan: ShardPlan, writer: ShardWriter, error: HfshardError) -> CheckpointIndex:
    """Find out whether another process has saved the very same meanwhile, so that this save has nothing left to do.

    Args:
        save: What was overtaken, or failed: a higher save may have deleted what it was about to send.
        plan: Of the request.
        writer: Compares the shards, if it has all of them.
        error: Why the save has ended.

    Raises:
        RemoteChangedError: Another process has saved something else.
        The error: None has, or the store can't be asked.
    """
    other = error
    try:
        current = _begin(save.store, save.request, plan)
        is_newer = current.state.save is not None and current.state.save != save.state.save
        if is_newer and isinstance(writer, OwnShardWriter):
            index = current.if_unchanged(writer, is_settled=False)
            if index is not None:
                logger.info("Another process has saved the very same into '%s'.", save.store.address)
                return index
        if is_newer:
            other = overtaken(save.store)
    except StoreError:
        pass  # the first error says more
    raise other from (None if other is error else error)


def _begin(store: Store, request: SaveRequest, plan: ShardPlan) -> _Save:
    """Look at what is there, again where it changes meanwhile.

    Raises:
        RemoteChangedError: It changed each time.
    """
    for attempt in range(_TRIES):
        try:
            return _Save.begin(store, request, plan)
        except CheckpointChangedError as error:
            if attempt == _TRIES - 1:
                address = str(store.address)
                raise RemoteChangedError(
                    f"Other processes save into '{address}': it was replaced each time it was inspected. Nothing was "
                    "sent. Save again.",
                    path=address,
                ) from error
    raise AssertionError("the last attempt returns or raises")


@dataclass(frozen=True, slots=True)
class _Save:
    """One save into a store, when it is known what is there."""

    store: Store
    request: SaveRequest
    state: StoreState
    plan: ShardPlan
    small_files: Mapping[str, bytes]
    """Of the new checkpoint, its own and those that stay, without the index."""
    replaced: Mapping[str, str]
    """As in `StoredSave`."""
    companion_files: Mapping[str, ByteSource]
    """Those that are not there, or have other bytes."""

    @classmethod
    def begin(cls, store: Store, request: SaveRequest, plan: ShardPlan) -> _Save:
        """List the place, and read what a save has to know of it.

        Raises:
            CheckpointChangedError: It changed meanwhile.
        """
        own = request.small_files
        nested = {name.rpartition("/")[0] for name in (*own, *request.companion_files) if "/" in name}
        state = read_state(store, request.options.names, nested)
        dropped = {CONFIG_NAME} if request.drops_config else set()
        small_files = {**state.kept_files(own.keys() | dropped), **own}
        names = request.options.names.shards(len(plan.shards))
        return cls(
            store,
            request,
            state,
            replace(plan, shards=tuple(replace(one, file=file) for one, file in zip(plan.shards, names, strict=True))),
            small_files,
            state.replaced_files([*small_files, *dropped]),
            _changed_companions(store, request, state),
        )

    def if_unchanged(self, writer: ShardWriter, *, is_settled: bool = True) -> CheckpointIndex | None:
        """Return the index, if all that is to be saved is there.

        Args:
            writer: Compares the shards.
            is_settled: Whether nothing else may be there, and plain copies must be right: else another process has just
                saved it, and is about to do the rest.
        """
        state, save = self.state, self.state.save
        if save is None or (is_settled and not self._is_settled()):
            return None
        own = save.small_files.keys() | save.large_files
        if own != {*self.small_files, state.names.index}:
            return None
        if any(state.folder.read_small(name, MAX_INDEX_BYTES) != raw for name, raw in self.small_files.items()):
            return None
        transaction = self._transaction(save.save_id)
        same = transaction.find_unchanged(self._jobs(save.save_id), writer, self.request.options.checksum)
        if len(same) < len(self.plan.shards):
            return None
        index = index_of(self.plan, self.request, [same[shard.file] for shard in self.plan.shards])
        raw = index.to_json()
        if raw != state.folder.read_small(state.names.index, MAX_INDEX_BYTES):
            return None
        if not is_settled:
            return index
        copies = plain_copies({**self.small_files, state.names.index: raw}, save.save_id, state.names.index)
        is_copied = all(has_bytes(self.store, state.found.get(name), one) for name, one in copies.items())
        return index if is_copied else None

    def _is_settled(self) -> bool:
        """Whether there is nothing to delete, and no companion file to put."""
        is_alone = self.state.is_untouched and not self._replaced_below()
        return is_alone and not self.companion_files and not self._drops_plain_config()

    def run(self, writer: ShardWriter, check: Callable[[], None]) -> CheckpointIndex:
        """Copy and send the shards, and commit.

        Raises:
            As `save_to_store`.
        """
        save_id = next_id(self.state.found)
        transaction = self._transaction(save_id)
        jobs = self._jobs(save_id)
        options = self.request.options
        transaction.copy_unchanged(jobs, writer, options.checksum)
        new_bytes = sum(shard.nbytes for shard in self.plan.shards if shard.file not in transaction.digests)
        with bytes_bar("Saving", new_bytes, options.progress) as progress_callback:
            transaction.send(jobs, writer, options.checksum, progress_callback)
        index = index_of(self.plan, self.request, [transaction.digests[shard.file] for shard in self.plan.shards])
        transaction.add_small_files({**self.small_files, self.state.names.index: index.to_json()})
        save = transaction.contents(self.replaced)
        check()
        writer.confirm()
        with deferred_interrupt():
            transaction.put_index(save, self.store.list_objects)
            found, highest = self._put_copies(transaction)
            if highest > save_id:
                raise overtaken(self.store)
            self._delete_lower(found, save_id)
        self._note_signature()
        return index

    def _transaction(self, save_id: SaveId) -> StoreTransaction:
        return StoreTransaction(self.store, self.state.names.index, save_id, self.state.known_shards(), self.store)

    def _jobs(self, save_id: SaveId) -> dict[str, WriteJob]:
        """Describe the shards: usual name -> contents."""
        files = [shard.file for shard in self.plan.shards]
        paths = [str(self.store.address.joined(save_id.object_name(file))) for file in files]
        return dict(zip(files, shard_jobs(self.plan, self.request, paths, has_index=True), strict=True))

    def _put_copies(self, transaction: StoreTransaction) -> tuple[Mapping[str, StoredObject], SaveId]:
        """Put what other tools read: companion files, and plain copies of the small files.

        Returns:
            The last listing, and the highest save in it.

        Raises:
            CommitUnfinishedError: The store refused, or failed.
        """
        entry, save_id = transaction.entry, transaction.save_id
        copies_of = partial(plain_copies, entry=entry)
        try:
            in_threads(lambda item, _: self._put_companion(*item), self.companion_files.items(), FILES_AT_ONCE)
            others = {name: found for name, found in self.state.found.items() if name != entry}  # it is another save's
            put_copies(self.store, copies_of(transaction.small_files, save_id), others)
            return settle_copies(self.store, entry, save_id, copies_of)
        except StoreError as error:
            address = str(self.store.address)
            raise CommitUnfinishedError(
                f"The new checkpoint in '{address}' is saved, and hfshard loads it; but the plain copies that other "
                f"tools read could not be put: {error} Save again to finish.",
                path=address,
            ) from error

    def _put_companion(self, name: str, source: ByteSource) -> None:
        with source.open() as reader:
            writer = self.store.open_writer(name, source.size)
            try:
                while block := reader.read(COPY_BYTES):
                    writer.write(memoryview(block))
                writer.finish()
            except BaseException:
                writer.abort()
                raise

    def _delete_lower(self, found: Mapping[str, StoredObject], save_id: SaveId) -> None:
        """Delete what this save has replaced: earlier saves, whole or not, and what another tool had uploaded."""
        names = self.state.names
        uploaded = [name for name in sorted(self.state.uploaded) if found.get(name) == self.state.found[name]]
        config = [CONFIG_NAME] if self._drops_plain_config() else []

        def is_lower(name: str) -> bool:
            one = save_of(name, names)
            return one is not None and one < save_id

        sweep = is_lower if save_id.number > 1 else None
        lower = lower_objects(found, names, save_id)
        is_done = delete_or_warn(self.store, [*lower, *uploaded, *config, *self._replaced_below()], sweep)
        if not is_done and (uploaded or config):
            logger.warning(
                "hfshard loads the new checkpoint from '%s'; but other tools take what is still there of the old one, "
                "until it is deleted: %s.",
                self.store.address,
                list_some([*uploaded, *config], _SHOWN),
            )

    def _replaced_below(self) -> list[str]:
        """Name the objects of saves in folders for which the request has other weights, under the names of files."""
        own = self.request.companion_files
        folders = {name.rpartition("/")[0] for name in own if "/" in name and name.endswith(WEIGHTS_SUFFIXES)}
        below: dict[tuple[str, SaveId], dict[str, str]] = defaultdict(dict)
        for name in self.state.found.keys() - own.keys():
            if name.rpartition("/")[0] in folders and (split := split_object_name(name)) is not None:
                below[name.rpartition("/")[0], split[1]][name] = split[0]
        indexes, others = [], []
        for names in below.values():
            own_indexes = list(filter(is_save_index, names))
            if own_indexes:  # else it may be under way
                indexes += [*own_indexes, *(self.state.found.keys() & {names[one] for one in own_indexes} - own.keys())]
                others += sorted(names.keys() - own_indexes)
        return list(dict.fromkeys([*indexes, *others]))

    def _drops_plain_config(self) -> bool:
        return self.request.drops_config and CONFIG_NAME in self.state.found

    def _note_signature(self) -> None:
        """Say that a signature which was there, and which this save does not include, is one of other files."""
        if SIGNATURE_NAME in self.state.found and SIGNATURE_NAME not in self.request.companion_files:
            logger.warning(
                "The signature '%s' is stale: this save replaced the files it covers, so verification will fail. Sign "
                "a directory (hfshard sign DIR --private-key KEY) and push it there, or delete the object.",
                self.store.address.joined(SIGNATURE_NAME),
            )


def _changed_companions(store: Store, request: SaveRequest, state: StoreState) -> dict[str, ByteSource]:
    """The files to be copied along that are not there; a README that is there is the user's own, but for a copy."""
    keeps_readme = not request.kept_files
    changed = {}
    for name, source in request.companion_files.items():
        there = state.found.get(name)
        is_kept = there is not None and name == README and keeps_readme
        if not is_kept and (there is None or not has_same_bytes(source, StoredSource(store, there))):
            changed[name] = source
    return changed
