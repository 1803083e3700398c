"""One save from its request to its commit: into a directory, a store, or memory."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from hfshard._util.addresses import is_store_address
from hfshard._util.arguments import absolute_path
from hfshard._util.progress import ProgressCallback, byte_progress
from hfshard._util.text import shorten_list
from hfshard._util.threads import delay_interrupt, run_in_threads
from hfshard.checkpoint.check_files import retry_if_replaced
from hfshard.checkpoint.companion_files import copy_companion
from hfshard.checkpoint.folder import RangedFolder
from hfshard.commit.commit_plan import NewCheckpoint, content_digest, needs_hard_links, plan_commit
from hfshard.commit.directory_commit import DirectorySession, save_session
from hfshard.commit.store_commit import (
    StoreTransaction,
    delete_or_warn,
    has_bytes,
    overtaken,
    plain_copies,
    put_copies,
    settle_copies,
)
from hfshard.commit.store_plan import StoreState, lower_objects, next_id, read_store_state
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
from hfshard.disk.byte_source import ByteSource, BytesSource, StreamSource, contents_equal, sha256_of_reader
from hfshard.disk.fsops import can_link
from hfshard.errors import (
    CheckpointChangedError,
    CommitUnfinishedError,
    HfshardError,
    RemoteChangedError,
    SaveDirectoryError,
    StoreError,
)
from hfshard.format.digests import TENSOR_DIGEST_HEX
from hfshard.format.file_names import WeightNames
from hfshard.format.index import CheckpointIndex, FileDigest, build_hfshard_metadata
from hfshard.format.stored_save import SaveId, is_save_index, save_of, split_object_name
from hfshard.saving.save_request import SaveRequest
from hfshard.shards.shard_plan import PlannedShard, ShardPlan, plan_specs, with_one_more_shard
from hfshard.shards.write_shards import (
    SafetensorsStream,
    WriteJob,
    digest_shard,
    file_order,
    shard_metadata,
    writer_threads,
)
from hfshard.stores.open_store import open_store
from hfshard.stores.store import Store, StoredObject, StoredSource
from hfshard.tensors.stored_tensor import TensorSpec, parameter_count, tensor_specs

_OWN_DIGEST_BYTES: Final = 256
"""Bytes of a single file's digests in its own header, with their names, without those of its tensors."""


def plan_request(request: SaveRequest) -> ShardPlan:
    """Plan the files of a request, with room in their headers for their metadata.

    Raises:
        UnstorableTensorError: A value can't be stored in the format.
    """
    specs = tensor_specs(request.tensors)
    room = shard_metadata_bytes_of(request)
    hfshard_metadata = build_hfshard_metadata(request.model_file_digests, request.tied_names, request.undeclared_ties)
    digests = _OWN_DIGEST_BYTES + TENSOR_DIGEST_HEX * len(specs)
    single_metadata_bytes = room + digests + _json_bytes(hfshard_metadata)
    single_metadata_bytes += _json_bytes(dict(request.options.metadata))
    if request.kept_files:
        return _plan_of_files(request, specs)
    return plan_specs(
        specs,
        request.options.max_shard_bytes,
        packing=request.options.packing,
        names=request.options.names,
        tied_names=request.tied_names,
        single_metadata_bytes=single_metadata_bytes,
        shard_metadata_bytes=room,
        separate_names=request.separate_names,
        headers_count=request.options.headers_count,
    )


def _plan_of_files(request: SaveRequest, specs: Sequence[TensorSpec]) -> ShardPlan:
    """Plan the files that a request keeps, regardless of their sizes."""
    spec_of = {spec.name: spec for spec in specs}
    names, files = request.options.names, request.kept_files
    file_names = [names.single] if len(files) == 1 else names.shards(len(files))
    shards = tuple(
        PlannedShard(file, tuple(spec_of[name] for name in held)) for file, held in zip(file_names, files, strict=True)
    )
    return ShardPlan(shards, dict(request.tied_names), request.options.max_shard_bytes)


def shard_metadata_bytes_of(request: SaveRequest) -> int:
    """Compute the maximum bytes of metadata in the header of one of several files."""
    return _json_bytes(shard_metadata(request.tensors, request.file_metadata))


def with_reusable_names(
    plan: ShardPlan, session: DirectorySession, request: SaveRequest, writer: ShardWriter
) -> ShardPlan:
    """Change a plan to unused names, unless the existing files have the fingerprints of the ones to write."""
    if not plan.is_sharded or _matches_existing(plan, session, request, writer):
        return plan
    return with_unused_names(plan, session, request.options.names)


def with_unused_names(plan: ShardPlan, session: DirectorySession, names: WeightNames) -> ShardPlan:
    """Split the smallest shard until no file in the directory has any of the plan's names."""
    taken = session.state.listing | session.state.referenced
    while plan.is_sharded and not taken.isdisjoint(shard.file for shard in plan.shards):
        plan = with_one_more_shard(plan, names)
    return plan


def _json_bytes(value: Any) -> int:
    """Compute the maximum bytes of a value as JSON inside a JSON string."""
    return len(json.dumps(json.dumps(value))) + len('"__metadata__":{},')


def _matches_existing(plan: ShardPlan, session: DirectorySession, request: SaveRequest, writer: ShardWriter) -> bool:
    """Return whether the index in the directory lists exactly these files, by their fingerprints."""
    index = session.state.index
    if index is None or index.weight_map != plan.weight_map:
        return False
    listed = [index.files.get(shard.file, FileDigest()).fingerprint for shard in plan.shards]
    if None in listed:
        return False
    found = writer.fingerprints(shard_jobs(plan, request, [""] * len(listed)), request.options.checksum)
    return all(one == other for one, other in zip(found, listed, strict=True))


def needs_new_names(plan: ShardPlan, new: NewCheckpoint, index: CheckpointIndex, session: DirectorySession) -> bool:
    """Return whether files that looked the same differ after all, or a single file needs links and can't have them."""
    old = session.state
    if plan.is_sharded:
        taken = [shard.file for shard in plan.shards if shard.file in old.listing]
        same = old.index is not None and all(old.index.files.get(file) == index.files[file] for file in taken)
        return bool(taken) and not (same and index.is_verifiable)
    return needs_hard_links(old, new) and not session.can_link(next(iter(new.shards.values())))


def write_to_staging(
    plan: ShardPlan,
    session: DirectorySession,
    request: SaveRequest,
    writer: ShardWriter,
    progress_callback: ProgressCallback | None,
) -> tuple[NewCheckpoint, CheckpointIndex]:
    """Write the weights into the staging directory, and build the index.

    Args:
        plan: Assignment of tensors to files.
        session: The session of the locked directory.
        request: The data and options.
        writer: Writes the weights.
        progress_callback: Called from any thread with the number of bytes that were written.
    """
    jobs = staged_jobs(plan, session, request)
    digests = writer.write(jobs, request.options.checksum, progress_callback)
    index = index_of(plan, request, digests)
    index_json = index.to_json() if plan.is_sharded else None
    files = {shard.file: digest for shard, digest in zip(plan.shards, digests, strict=True)}
    digest = content_digest([index_json] if index_json is not None else [repr(files).encode()])
    new = NewCheckpoint(
        shards=staged_names(plan),
        keys=list(index.weight_map),
        index=index_json,
        config=request.config,
        drops_config=request.drops_config,
        hides_single=request.hides_single and _can_link_single(session),
        model_files=dict(request.model_files),
        digest=digest,
        companion_files=_stage_companion_files(session, request, progress_callback),
    )
    return new, index


def _can_link_single(session: DirectorySession) -> bool:
    """Return whether there is an old single file, and it can have a second name."""
    single = os.path.join(session.directory, session.state.names.single)
    return session.state.has_single and can_link(session.staging, single)


def staged_names(plan: ShardPlan) -> dict[str, str]:
    """Return the staging name of each file of a plan: name -> name in the staging directory."""
    return {shard.file: f"{number:05d}.weights" for number, shard in enumerate(plan.shards)}


def staged_jobs(plan: ShardPlan, session: DirectorySession, request: SaveRequest) -> list[WriteJob]:
    """Build the jobs that write a plan's files into the staging directory."""
    paths = [os.path.join(session.staging, name) for name in staged_names(plan).values()]
    return shard_jobs(plan, request, paths, session.replaced)


def _stage_companion_files(
    session: DirectorySession, request: SaveRequest, progress_callback: Callable[[int], object] | None
) -> dict[str, str]:
    staged = {}
    for number, (name, file) in enumerate(request.companion_files.items()):
        if name == README and name in session.state.listing and not request.replaces_readme:
            continue  # the user's own
        staged[name] = f"{number:05d}.companion"
        copy_companion(file, os.path.join(session.staging, staged[name]), session.like(name), progress_callback)
    return staged


def shard_jobs(
    plan: ShardPlan,
    request: SaveRequest,
    paths: Sequence[str],
    like: os.stat_result | None = None,
    *,
    has_index: bool = False,
) -> list[WriteJob]:
    """Build the jobs that write a plan's files to these paths; with an index, a single file is a shard, too."""
    hfshard_metadata = None
    has_index = has_index or plan.is_sharded
    if not has_index:
        hfshard_metadata = build_hfshard_metadata(
            request.model_file_digests, request.tied_names, request.undeclared_ties
        )
    extra = dict(request.file_metadata)
    if not has_index:
        for key, value in request.options.metadata.items():
            extra[key] = value if isinstance(value, str) else json.dumps(value)
    jobs = []
    for shard, path in zip(plan.shards, paths, strict=True):
        tensors = file_order({name: request.tensors[name] for name in shard.names})
        jobs.append(WriteJob(path, tensors, shard_metadata(tensors, extra), hfshard_metadata, like))
    return jobs


def index_of(plan: ShardPlan, request: SaveRequest, digests: Sequence[FileDigest]) -> CheckpointIndex:
    """Build the index of a plan whose files have these digests."""
    files = {shard.file: digest for shard, digest in zip(plan.shards, digests, strict=True)}
    return CheckpointIndex(
        weight_map=plan.weight_map,
        total_size=plan.total_size,
        total_parameters=_total_parameters(request),
        metadata=dict(request.options.metadata),
        files={**files, **request.model_file_digests},
        tied_names=dict(request.tied_names),
        undeclared_ties=request.undeclared_ties,
    )


def _total_parameters(request: SaveRequest) -> int:
    if request.total_parameters is not None:
        return request.total_parameters
    return sum(map(parameter_count, request.tensors.values()))


# Saves to a directory: plan, write, index, commit.


logger = logging.getLogger(__name__)


def save_request(
    request: SaveRequest,
    save_directory: str | os.PathLike[str],
    check: Callable[[], None] = lambda: None,
    writer: ShardWriter | None = None,
) -> CheckpointIndex:
    """Save the contents of a request, durably and all or nothing.

    Args:
        request: The data and options.
        save_directory: Created if it is missing; or the address of a place in a store (see `save_to_store`).
        check: Called when the directory is locked, and just before the commit.
        writer: Writes the files; None: this process does.

    Raises:
        Everything that `hfshard.save_state_dict` raises.
    """
    directory = absolute_path(save_directory, "save_directory")
    if is_store_address(directory):
        return save_to_store(request, directory, check, writer)
    names = request.options.names
    writer = writer or OwnShardWriter()
    writer_threads()  # raises where the environment asks for more than there is
    plan = plan_request(request)
    with save_session(directory, names) as session:
        session.drops_signature = request.options.drop_signature
        check()
        plan = with_reusable_names(plan, session, request, writer)
        need_bytes = plan.total_size + sum(file.size for file in request.companion_files.values())
        session.make_folders({*request.companion_files, *request.small_files})
        session.check_space(need_bytes)
        with byte_progress("Saving", need_bytes, request.options.progress) as progress_callback:
            new, index = write_to_staging(plan, session, request, writer, progress_callback)
            if needs_new_names(plan, new, index, session):
                session.empty_staging()
                plan = with_unused_names(with_one_more_shard(plan, names), session, names)
                new, index = write_to_staging(plan, session, request, writer, None)
        check()
        writer.confirm()
        session.commit(plan_commit(session.state, new))
    logger.info("Saved %d tensors, %d bytes, into '%s'.", len(index.weight_map), plan.total_size, directory)
    return index


# Saves to a store: list, copy and send the shards under names unique to this save, put the index last, list again.


_STEP: Final = re.compile(r"checkpoint-\d{1,18}")
"""Name of a checkpoint's folder in a run."""

_SHOWN: Final = 3
"""Maximum number of object names in a message."""

_TRIES: Final = 5
"""Number of tries to inspect a place, as other processes may replace a listed object before it is read."""


def save_to_store(
    request: SaveRequest,
    address: str,
    check: Callable[[], None] = lambda: None,
    writer: ShardWriter | None = None,
) -> CheckpointIndex:
    """Save the contents of a request into a store, all or nothing; nothing is written to disk.

    A save that changes nothing puts nothing. Shards that did not change are copied on the server.

    Args:
        request: The data and options. `hides_single` does not matter: a checkpoint in a store has an index.
        address: "s3://bucket/prefix" or another one.
        check: Called after the place was inspected, and just before the commit.
        writer: Sends the shards; None: this process does.

    Returns:
        The index.

    Raises:
        RemoteChangedError: Another process saved there at the same time, and its checkpoint is the newer one.
        CommitUnfinishedError: It is unknown whether the new checkpoint was saved; or it was, without the plain copies
            for other tools.
        SaveDirectoryError: It is a checkpoint of a run.
        StoreError: The store refused, or failed: the old checkpoint stays. The next save deletes what was sent.
    """
    store = open_store(address)
    _reject_folder_of_run(store)
    return save_into(store, request, check, writer or OwnShardWriter())


def _reject_folder_of_run(store: Store) -> None:
    """Reject a folder of a run, which deletes the folder's objects when it finds no manifest.

    Raises:
        SaveDirectoryError: It is such a folder.
    """
    parent, _, name = store.address.prefix.rpartition("/")
    if _STEP.fullmatch(name) and open_store(replace(store.address, prefix=parent)).list_objects(MARKS):
        raise SaveDirectoryError(
            f"'{store.address}' is a folder of the training run '{replace(store.address, prefix=parent)}'. Save to "
            "another address, or save into the run with CheckpointManager.",
            path=str(store.address),
        )


def save_into(store: Store, request: SaveRequest, check: Callable[[], None], writer: ShardWriter) -> CheckpointIndex:
    """Save into an open store; see `save_to_store`."""
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
    """Return the index if another process has saved exactly the same, so that this save has nothing left to do.

    Args:
        save: The save that was overtaken, or failed: a higher save may have deleted what it was about to send.
        plan: The request's plan.
        writer: Compares the shards, if it has all of them.
        error: The error that ended the save.

    Raises:
        RemoteChangedError: Another process has saved something else.
        The error: No other process has saved, or the store can't be asked.
    """
    other = error
    try:
        current = _begin(save.store, save.request, plan)
        is_newer = current.state.save is not None and current.state.save != save.state.save
        if is_newer and isinstance(writer, OwnShardWriter):
            index = current.if_unchanged(writer, is_settled=False)
            if index is not None:
                logger.info("Another process saved the same checkpoint into '%s'.", save.store.address)
                return index
        if is_newer:
            other = overtaken(save.store)
    except StoreError:
        pass  # the first error is more informative
    raise other from (None if other is error else error)


def _begin(store: Store, request: SaveRequest, plan: ShardPlan) -> _Save:
    """Inspect the place, and retry if it changes meanwhile.

    Raises:
        RemoteChangedError: It changed each time.
    """
    address = str(store.address)
    traits = replace(RangedFolder.traits, retries=_TRIES)
    try:
        return retry_if_replaced(lambda: _Save.begin(store, request, plan), traits, address)
    except CheckpointChangedError as error:
        raise RemoteChangedError(
            f"Other processes replaced the checkpoint in '{address}' on every attempt. Nothing was sent. "
            "Retry when no other save is running.",
            path=address,
        ) from error


@dataclass(frozen=True, slots=True)
class _Save:
    """One save into a store whose state is known."""

    store: Store
    request: SaveRequest
    state: StoreState
    plan: ShardPlan
    small_files: Mapping[str, bytes]
    """Small files of the new checkpoint, its own and the ones it keeps, without the index."""
    replaced: Mapping[str, str]
    """Name -> sha256 of the plain objects that are replaced; see `StoredSave`."""
    companion_files: Mapping[str, ByteSource]
    """Companion files that are missing in the store, or have other bytes there."""

    @classmethod
    def begin(cls, store: Store, request: SaveRequest, plan: ShardPlan) -> _Save:
        """List the place, and read what a save must know about it.

        Raises:
            CheckpointChangedError: It changed meanwhile.
        """
        own = request.small_files
        nested = {name.rpartition("/")[0] for name in (*own, *request.companion_files) if "/" in name}
        state = read_store_state(store, request.options.names, nested)
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
        """Return the index, if everything to save is in the store already.

        Args:
            writer: Compares the shards.
            is_settled: Require also that there is nothing else, and that plain copies are right. False after a save by
                another process, which is about to do the rest.
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
        """Return whether there is nothing to delete, and no companion file to put."""
        is_alone = self.state.is_untouched and not self._replaced_below()
        return is_alone and not self.companion_files and not self._drops_plain_config()

    def run(self, writer: ShardWriter, check: Callable[[], None]) -> CheckpointIndex:
        """Copy and send the shards, and commit.

        Raises:
            RemoteChangedError, CommitUnfinishedError, StoreError: See `save_to_store`.
        """
        save_id = next_id(self.state.found)
        transaction = self._transaction(save_id)
        jobs = self._jobs(save_id)
        options = self.request.options
        transaction.copy_unchanged(jobs, writer, options.checksum)
        new_bytes = sum(shard.nbytes for shard in self.plan.shards if shard.file not in transaction.digests)
        with byte_progress("Saving", new_bytes, options.progress) as progress_callback:
            transaction.send(jobs, writer, options.checksum, progress_callback)
        index = index_of(self.plan, self.request, [transaction.digests[shard.file] for shard in self.plan.shards])
        transaction.add_small_files({**self.small_files, self.state.names.index: index.to_json()})
        save = transaction.contents(self.replaced)
        check()
        writer.confirm()
        with delay_interrupt():
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
        """Build the jobs of the shards: usual name -> contents."""
        files = [shard.file for shard in self.plan.shards]
        paths = [str(self.store.address.joined(save_id.object_name(file))) for file in files]
        return dict(zip(files, shard_jobs(self.plan, self.request, paths, has_index=True), strict=True))

    def _put_copies(self, transaction: StoreTransaction) -> tuple[Mapping[str, StoredObject], SaveId]:
        """Put the files that other tools read: companion files, and plain copies of the small files.

        Returns:
            The last listing, and the highest save in it.

        Raises:
            CommitUnfinishedError: The store refused, or failed.
        """
        entry, save_id = transaction.entry, transaction.save_id
        copies_of = partial(plain_copies, entry=entry)
        try:
            run_in_threads(lambda item, _: self._put_companion(*item), self.companion_files.items(), FILES_AT_ONCE)
            others = {name: found for name, found in self.state.found.items() if name != entry}  # it is another save's
            put_copies(self.store, copies_of(transaction.small_files, save_id), others)
            return settle_copies(self.store, entry, save_id, copies_of)
        except StoreError as error:
            address = str(self.store.address)
            raise CommitUnfinishedError(
                f"The new checkpoint in '{address}' was saved and hfshard loads it, but the plain copies that other "
                f"tools read could not be written: {error} Save again to finish.",
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
        """Delete what this save has replaced: earlier saves, complete or not, and uploads of another tool."""
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
                "hfshard loads the new checkpoint from '%s', but other tools load the remains of the old one until "
                "they are deleted: %s.",
                self.store.address,
                shorten_list([*uploaded, *config], _SHOWN),
            )

    def _replaced_below(self) -> list[str]:
        """List the objects of saves in folders for which the request has other weights, under plain file names."""
        own = self.request.companion_files
        folders = {name.rpartition("/")[0] for name in own if "/" in name and name.endswith(WEIGHTS_SUFFIXES)}
        below: dict[tuple[str, SaveId], dict[str, str]] = defaultdict(dict)
        for name in self.state.found.keys() - own.keys():
            if name.rpartition("/")[0] in folders and (split := split_object_name(name)) is not None:
                below[name.rpartition("/")[0], split[1]][name] = split[0]
        indexes, others = [], []
        for names in below.values():
            own_indexes = list(filter(is_save_index, names))
            if own_indexes:  # without an index, it may still be running
                indexes += [*own_indexes, *(self.state.found.keys() & {names[one] for one in own_indexes} - own.keys())]
                others += sorted(names.keys() - own_indexes)
        return list(dict.fromkeys([*indexes, *others]))

    def _drops_plain_config(self) -> bool:
        return self.request.drops_config and CONFIG_NAME in self.state.found

    def _note_signature(self) -> None:
        """Warn if an existing signature that this save does not include is now stale."""
        if SIGNATURE_NAME in self.state.found and SIGNATURE_NAME not in self.request.companion_files:
            logger.warning(
                "The signature '%s' is stale: this save replaced the files it covers, so verification will fail. Sign "
                "a directory (hfshard sign DIR --private-key KEY) and push it there, or delete the object.",
                self.store.address.joined(SIGNATURE_NAME),
            )


def _changed_companions(store: Store, request: SaveRequest, state: StoreState) -> dict[str, ByteSource]:
    """Find the companion files to put; an existing README is the user's own and stays, unless this is a copy."""
    keeps_readme = not request.kept_files
    changed = {}
    for name, source in request.companion_files.items():
        there = state.found.get(name)
        is_kept = there is not None and name == README and keeps_readme
        if not is_kept and (there is None or not contents_equal(source, StoredSource(store, there))):
            changed[name] = source
    return changed


# Saves to memory: the files of a request as streams, to be sent without a copy on disk.


def stream_request(request: SaveRequest) -> tuple[dict[str, ByteSource], CheckpointIndex]:
    """Stream the files that a save of this request into an empty directory would write, bit for bit.

    Each tensor is read once for the hashes, and again when its file is read. The tensors of a single file are read
    twice for the hashes, because the file contains its own digests.

    Args:
        request: The data and options; the tensors must not change until the files are read.

    Returns:
        Name -> contents, and the index.

    Raises:
        UnstorableTensorError, InvalidArgumentError: A value can't be stored, or an option is invalid, as in a save.
    """
    plan = plan_request(request)
    jobs = shard_jobs(plan, request, [""] * len(plan.shards))
    with byte_progress("Hashing", plan.total_size, request.options.progress) as progress_callback:
        digested = run_in_threads(partial(_digest, progress_callback=progress_callback), jobs, writer_threads())
    index = index_of(plan, request, [digest for digest, _ in digested])
    contents: dict[str, ByteSource] = {}
    for shard, job, (digest, header) in zip(plan.shards, jobs, digested, strict=True):
        opener = partial(SafetensorsStream, header, list(job.tensors.values()))
        sha256 = digest.sha256 if plan.is_sharded and digest.sha256 is not None else sha256_of_reader(opener())
        contents[shard.file] = StreamSource(digest.size or 0, sha256, opener)
    if plan.is_sharded:
        contents[request.options.names.index] = BytesSource(index.to_json())
    return contents | {name: BytesSource(raw) for name, raw in request.small_files.items()}, index


def _digest(
    job: WriteJob, cancelled: threading.Event, progress_callback: Callable[[int], object]
) -> tuple[FileDigest, bytes]:
    return digest_shard(job, "sha256", progress_callback, cancelled)
