"""Saves into a store: plan, look at what is there, send what has changed, commit by one conditional put."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from hfshard._util.progress import bytes_bar
from hfshard._util.threads import pause
from hfshard.constants import README, SAFETENSORS_SUFFIX, SIGNATURE_NAME
from hfshard.errors import CheckpointChangedError, RemoteChangedError
from hfshard.planning.plan import ShardPlan
from hfshard.saving.linking import KnownFile
from hfshard.saving.prepare import index_of, plan_request, shard_jobs
from hfshard.saving.request import SaveRequest
from hfshard.saving.stores.store_state import StoreState, has_bytes, read_store_state
from hfshard.saving.stores.transaction import StoreTransaction
from hfshard.saving.writing import OwnShardWriter, ShardWriter
from hfshard.storage.commit.new_checkpoint import NewCheckpoint, changed_config, content_digest
from hfshard.storage.commit.steps import CommitPlan
from hfshard.storage.commit.store_plan import plan_protection, plan_store_commit
from hfshard.storage.disk.byte_source import ByteSource, has_same_bytes
from hfshard.storage.format.index import CheckpointIndex, FileDigest
from hfshard.storage.tensors.tensor_layout import RawTensor
from hfshard.storage.weights.safetensors_writer import WriteJob, writer_threads
from hfshard.stores.opening import open_store
from hfshard.stores.protocols import Store
from hfshard.stores.stored_source import StoredSource

logger = logging.getLogger(__name__)

_TRIES: Final = 5
"""Times that a place is looked at because somebody else replaced what was listed before it was read."""

_LOOKS: Final = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
"""Seconds before each look whether who was faster is done."""

_DIGITS_BYTES: Final = 8
"""Random bytes in the names of a save's shards: no other save, of this machine or another one, gives the same."""


def save_to_store(
    request: SaveRequest,
    address: str,
    check: Callable[[], None] = lambda: None,
    writer: ShardWriter | None = None,
) -> CheckpointIndex:
    """Save what a request holds into a store, all or nothing; nothing is written to the disk.

    A save that changes nothing puts nothing, and shards that are there already are not sent again.

    Args:
        request: What to save, and how. `hides_single` does not matter: a checkpoint in a store has an index.
        address: "s3://bucket/prefix" or another one.
        check: Called when the place was looked at, and just before the commit.
        writer: Sends the shards; None: this process does.

    Returns:
        The index.

    Raises:
        RemoteChangedError: Somebody else saved there meanwhile: their checkpoint stays, and nothing of this one.
        CommitUnfinishedError: The new checkpoint is there, but not all that follows the commit is done.
        StoreError: The store refused, or failed: the old checkpoint stays.
    """
    return save_into(open_store(address), request, check, writer or OwnShardWriter())


def save_into(store: Store, request: SaveRequest, check: Callable[[], None], writer: ShardWriter) -> CheckpointIndex:
    """Save into a store that is open; see `save_to_store`."""
    writer_threads()  # raises where the environment asks for more than there is
    plan = plan_request(request)
    save = _look(store, request, plan, writer)
    check()
    index = save.if_unchanged()
    if index is not None:
        logger.info("Nothing has changed in '%s': nothing was sent.", store.address)
        return index
    try:
        index = save.run(writer, check)
    except RemoteChangedError:
        is_alone = isinstance(writer, OwnShardWriter)  # other ranks have given up
        index = _found_same(store, request, plan, writer) if is_alone else None
        if index is None:
            raise
        logger.info("Somebody else has saved the very same into '%s'.", store.address)
        return index
    logger.info("Saved %d tensors, %d bytes, into '%s'.", len(index.weight_map), plan.total_size, store.address)
    return index


def _found_same(store: Store, request: SaveRequest, plan: ShardPlan, writer: ShardWriter) -> CheckpointIndex | None:
    """The index of whoever was faster, if they save the very same, and are done within seconds."""
    for seconds in _LOOKS:
        with suppress(CheckpointChangedError):
            if read_store_state(store, request.options.names, request.config).is_settled:
                break
        pause(seconds)
    return _look(store, request, plan, writer).if_unchanged()


def _look(store: Store, request: SaveRequest, plan: ShardPlan, writer: ShardWriter) -> _Save:
    """Look at what is there, again where it changes meanwhile.

    Raises:
        RemoteChangedError: It changed each time.
    """
    for _ in range(_TRIES - 1):
        with suppress(CheckpointChangedError):
            return _look_once(store, request, plan, writer)
    try:
        return _look_once(store, request, plan, writer)
    except CheckpointChangedError as error:
        address = str(store.address)
        raise RemoteChangedError(
            f"Others save into '{address}': it was replaced while it was looked at. Nothing was sent. Save again.",
            path=address,
        ) from error


def _look_once(store: Store, request: SaveRequest, plan: ShardPlan, writer: ShardWriter) -> _Save:
    """Look at what is there, and compare it with what is to be saved."""
    state = read_store_state(store, request.options.names, request.config)
    digits = secrets.token_hex(_DIGITS_BYTES)
    plan = _with_files(plan, request.options.names.stored_shards(len(plan.shards), digits))
    kept = _kept_shards(store, plan, request, state, writer)
    return _Save(
        store,
        request,
        state,
        _with_files(plan, [kept[at][0] if at in kept else shard.file for at, shard in enumerate(plan.shards)]),
        kept=dict(kept.values()),
        model_files=_changed_model_files(store, request, state),
        companion_files=_changed_companions(store, request, state),
        digits=digits,
    )


@dataclass(frozen=True, slots=True)
class _Save:
    """One save into a store, when it is known which shards are there already."""

    store: Store
    request: SaveRequest
    state: StoreState
    plan: ShardPlan
    kept: Mapping[str, FileDigest]
    """The shards that are there."""
    model_files: Mapping[str, bytes]
    """Those that are not there, or have other bytes."""
    companion_files: Mapping[str, ByteSource]
    """Those that are not there, or have other bytes."""
    digits: str
    """Of this save."""

    def if_unchanged(self) -> CheckpointIndex | None:
        """The index, if all that is to be saved is there, and leads every reader to it."""
        state = self.state
        is_open = state.has_single or state.weights_override is not None or state.is_bringing
        if is_open or len(self.kept) < len(self.plan.shards):
            return None
        index = index_of(self.plan, self.request, [self.kept[shard.file] for shard in self.plan.shards])
        path = str(self.store.address.joined(state.names.index))
        if CheckpointIndex.from_json(index.to_json(), path) != state.index:
            return None
        is_changed = changed_config(state, self._checkpoint(index)) is not None
        return None if is_changed or self.model_files or self.companion_files else index

    def run(self, writer: ShardWriter, check: Callable[[], None]) -> CheckpointIndex:
        """Send what is not there, and commit."""
        transaction = StoreTransaction(self.store, self.state, self.digits, self.companion_files)
        sent = [shard.file for shard in self.plan.shards if shard.file not in self.kept]
        try:
            protection = plan_protection(self.state)
            transaction.protect(protection)
            digests = {**self.kept, **self._send(writer, sent)}
            index = index_of(self.plan, self.request, [digests[shard.file] for shard in self.plan.shards])
            check()
            writer.confirm()
            transaction.commit(self._commit_plan(index, protection))
        except BaseException as error:
            if transaction.is_decided:
                raise
            instead = transaction.lost_or(error)
            transaction.roll_back(sent, is_lost=isinstance(instead, RemoteChangedError))
            if instead is error:
                raise
            raise instead from error
        self._send_missing(writer, transaction)
        self._note_signature()
        return index

    def _note_signature(self) -> None:
        """Say that a signature which was there, and which this save does not bring along, is one of other files."""
        if SIGNATURE_NAME in self.state.found and SIGNATURE_NAME not in self.request.companion_files:
            logger.warning(
                "'%s' no longer holds: the checkpoint beside it was replaced, and who checks the signature will refuse "
                "it. Sign a directory (hfshard sign DIR --private-key KEY) and push it there, or delete the object.",
                self.store.address.joined(SIGNATURE_NAME),
            )

    def _send(self, writer: ShardWriter, names: Collection[str]) -> dict[str, FileDigest]:
        """Send some of the shards."""
        jobs = zip(self.plan.shards, _jobs(self.store, self.plan, self.request), strict=True)
        new = {shard.file: job for shard, job in jobs if shard.file in names}
        new_bytes = sum(shard.nbytes for shard in self.plan.shards if shard.file in new)
        options = self.request.options
        with bytes_bar("Saving", new_bytes, options.progress) as progress_callback:
            digests = writer.write(list(new.values()), options.checksum, progress_callback, self.store)
        return dict(zip(new, digests, strict=True))

    def _commit_plan(self, index: CheckpointIndex, protection: CommitPlan) -> CommitPlan:
        state = self.state
        put = {step.target: protection.small_files[step.source] for step in protection.steps}
        return plan_store_commit(
            replace(state, listing=state.listing | put.keys(), owned=state.owned | put.keys()),
            self._checkpoint(index),
            claim=put.get(state.names.index, state.raw_index),
            is_contested=state.is_claimed,
            mark=self.digits if state.is_claimed or state.is_marked else None,
        )

    def _checkpoint(self, index: CheckpointIndex) -> NewCheckpoint:
        """What is to be committed."""
        raw = index.to_json()
        return NewCheckpoint(
            shards={},
            kept_shards=frozenset(shard.file for shard in self.plan.shards),
            keys=list(index.weight_map),
            index=raw,
            config=self.request.config,
            drops_config=self.request.drops_config,
            model_files=self.model_files,
            digest=content_digest([raw]),
            companion_files={name: name for name in self.companion_files},
        )

    def _send_missing(self, writer: ShardWriter, transaction: StoreTransaction) -> None:
        """Without conditional puts, two writers may both commit: send again what the other one has removed."""
        if not self.store.has_conditional_put:
            missing = transaction.missing([shard.file for shard in self.plan.shards])
            if missing:
                self._send(writer, missing)


def _changed_model_files(store: Store, request: SaveRequest, state: StoreState) -> dict[str, bytes]:
    """Those that are not there, or that an earlier save is about to replace: its index tells of other bytes."""
    digests, there = request.model_file_digests, state.found
    told = {} if state.index is None else state.index.files
    return {
        name: raw
        for name, raw in request.model_files.items()
        if told.get(name) not in (None, digests.get(name)) or not has_bytes(store, there.get(name), raw)
    }


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


def _with_files(plan: ShardPlan, files: Sequence[str]) -> ShardPlan:
    """A plan with other names of files."""
    return replace(
        plan, shards=tuple(replace(shard, file=file) for shard, file in zip(plan.shards, files, strict=True))
    )


def _jobs(store: Store, plan: ShardPlan, request: SaveRequest) -> list[WriteJob]:
    paths = [str(store.address.joined(shard.file)) for shard in plan.shards]
    return shard_jobs(plan, request, paths, has_index=True)


def _kept_shards(
    store: Store, plan: ShardPlan, request: SaveRequest, state: StoreState, writer: ShardWriter
) -> dict[int, tuple[str, FileDigest]]:
    """Find the shards of a plan that the old checkpoint has, byte for byte: position -> its name there, and digest."""
    checksum = request.options.checksum
    if state.index is None or checksum is None:
        return {}
    names: dict[str, str] = {}
    known: dict[str, KnownFile] = {}
    for name, digest in state.index.files.items():
        there = state.found.get(name)
        is_whole = there is not None and there.size == digest.size and name.endswith(SAFETENSORS_SUFFIX)
        if is_whole and digest.fingerprint is not None and digest.is_verifiable:
            names[digest.fingerprint] = name
            known[digest.fingerprint] = KnownFile(None, replace(digest, tensor_digests=None))
    if not known:
        return {}
    recorded = {digest.tensor_digests for digest in state.index.files.values()}
    jobs = {at: job for at, job in enumerate(_jobs(store, plan, request)) if _may_be_known(job, recorded)}
    digests = writer.link(list(jobs.values()), known, checksum)
    return {
        position: (names[digest.fingerprint], digest)
        for position, digest in zip(jobs, digests, strict=True)
        if digest is not None and digest.fingerprint is not None
    }


def _may_be_known(job: WriteJob, recorded: Collection[str | None]) -> bool:
    """Whether an old file may hold the tensors of a job, as far as that is known without reading any."""
    digests = [value.digest if isinstance(value, RawTensor) else None for value in job.tensors.values()]
    return None in digests or not digests or "".join(filter(None, digests)) in recorded
