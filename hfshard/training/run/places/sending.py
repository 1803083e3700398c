"""Sends the files of one checkpoint into a store: what did not change is copied there, all else is streamed."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from hfshard._util.threads import in_threads
from hfshard.constants import FILES_AT_ONCE, SAFETENSORS_SUFFIX
from hfshard.errors import CheckpointChangedError, RemoteChangedError, StaleObjectError
from hfshard.planning.plan import ShardPlan
from hfshard.saving.linking import KnownFile
from hfshard.saving.prepare import index_of, plan_request, shard_jobs
from hfshard.saving.writing import OwnShardWriter, ShardWriter
from hfshard.storage.format.index import FileDigest
from hfshard.storage.weights.safetensors_writer import WriteJob, await_devices
from hfshard.stores.opening import open_store
from hfshard.stores.protocols import ANYTHING, Store, StoredObject
from hfshard.training.run.manifest import MANIFEST, CheckpointManifest, shard_record, small_record
from hfshard.training.run.places.protocols import CheckpointOrder
from hfshard.training.run.run_checkpoint import RunCheckpoint
from hfshard.training.run.writing import TRAINING_STATE

_DIGITS_BYTES: Final = 8
"""Random bytes in the names of a save's shards: no other save gives the same."""

_TRIES: Final = 5
"""How often a small file is put in the place of one that changes."""


@dataclass
class Sender:
    """Sends one checkpoint, and knows what it has put, which may have to be taken back."""

    store: Store
    """Of the run."""
    folder: str
    """Of the checkpoint in it."""
    check: Callable[[], None]
    """Raises where another manager has taken the run over."""
    known: dict[str, tuple[StoredObject, FileDigest]] = field(default_factory=dict)
    """Fingerprint -> a file of the run that may have the same bytes, and what its manifest tells of it."""
    shards: set[str] = field(default_factory=set)
    """Names that only this save gives."""
    small: dict[str, StoredObject | None] = field(default_factory=dict)
    """Names that others may give, and the objects that were put under them; None: it is not known whether one was."""
    manifest: bytes | None = None
    """What was, or may have been, put as the manifest."""

    def know(self, newest: RunCheckpoint, listed: Mapping[str, StoredObject]) -> None:
        """Copy the weights of a checkpoint that did not change, on the server.

        Args:
            newest: The one that was saved last.
            listed: Its files by name.
        """
        assert newest.manifest is not None
        for name, record in newest.manifest.files.items():
            is_known = record.fingerprint is not None and record.is_verifiable and name in listed
            if is_known and name.endswith(SAFETENSORS_SUFFIX) and listed[name].size == record.size:
                self.known[record.fingerprint or ""] = (listed[name], record)

    def send(self, order: CheckpointOrder) -> CheckpointManifest:
        """Send all files but the manifest; a small one first, by which a killed save is found.

        Returns:
            The manifest with all files.

        Raises:
            StoreError: The store refused or failed.
            RemoteChangedError: Another manager has taken the run over.
        """
        digits = secrets.token_hex(_DIGITS_BYTES)
        small = {**order.files, TRAINING_STATE: order.payload.training_state}
        self.put_small(TRAINING_STATE, small[TRAINING_STATE])
        plans: dict[str, ShardPlan] = {}
        jobs: dict[str, WriteJob] = {}
        for base, request in order.payload.requests.items():
            plan = plan_request(request)
            names = request.options.names.stored_shards(len(plan.shards), digits)
            shards = [replace(shard, file=name) for shard, name in zip(plan.shards, names, strict=True)]
            plans[base] = replace(plan, shards=tuple(shards))
            paths = [str(self.store.address.joined(f"{self.folder}/{name}")) for name in names]
            jobs |= zip(names, shard_jobs(plans[base], request, paths, has_index=True), strict=True)
            small |= request.small_files
        records = self._copy_or_send(jobs, order)
        for base, request in order.payload.requests.items():
            own = [records[shard.file] for shard in plans[base].shards]
            small[request.options.names.index] = index_of(plans[base], request, own).to_json()
        left = [(name, raw) for name, raw in small.items() if name != TRAINING_STATE]
        in_threads(lambda item, _: self.put_small(*item), left, FILES_AT_ONCE)
        table = {name: shard_record(record) for name, record in records.items()}
        table |= {name: small_record(raw) for name, raw in small.items()}
        return replace(order.manifest, files=table)

    def put_small(self, name: str, raw: bytes) -> None:
        """Put a small file that is not there yet, or that a killed save has left.

        What is there was left while the run was this manager's, if it still is that afterwards: so the files of one
        that has taken the run over are never replaced.

        Raises:
            RemoteChangedError: Another manager has taken the run over.
        """
        path = f"{self.folder}/{name}"
        self.small[name] = None
        if not self.store.has_conditional_put:
            self.check()
            self.small[name] = self.store.put(path, raw, ANYTHING)
            return
        there: StoredObject | None = None
        for attempt in range(_TRIES):
            try:
                self.small[name] = self.store.put(path, raw, there)
            except StaleObjectError:
                if attempt == _TRIES - 1:
                    raise
                there = self.store.find(path)
                self.check()
            else:
                return

    def put_manifest(self, manifest: CheckpointManifest) -> StoredObject:
        """Put the manifest, which makes the checkpoint whole.

        Raises:
            RemoteChangedError: Somebody else has made one of this step.
        """
        self.manifest = manifest.to_json()
        condition = None if self.store.has_conditional_put else ANYTHING
        try:
            return self.store.put(f"{self.folder}/{MANIFEST}", self.manifest, condition)
        except StaleObjectError as error:
            self.manifest = None
            where = f"{self.store.address}/{self.folder}"
            raise RemoteChangedError(
                f"Another CheckpointManager has saved '{where}' meanwhile. Stop one of the two runs, or give it "
                "another address.",
                path=where,
            ) from error

    def are_there(self, manifest: CheckpointManifest, listed: Mapping[str, StoredObject]) -> bool:
        """Whether all files of the manifest are those that were put."""
        for name, record in manifest.files.items():
            found = listed.get(name)
            own = self.small.get(name)
            if found is None or found.size != record.size or (own is not None and own.etag != found.etag):
                return False
        return True

    def own_among(self, listed: Mapping[str, StoredObject], *, is_alone: bool) -> set[str]:
        """Choose the files that this has put, of those that are there.

        Args:
            listed: What is there.
            is_alone: Whether nobody else saves there, so that what may have been put by this was.
        """
        small = {
            name
            for name, own in self.small.items()
            if name in listed and (is_alone if own is None else own.etag == listed[name].etag)
        }
        return small | (self.shards & listed.keys())

    def _copy_or_send(self, jobs: Mapping[str, WriteJob], order: CheckpointOrder) -> dict[str, FileDigest]:
        """Copy the shards that did not change, send all others, and return the digests of both by name."""
        await_devices(list(jobs.values()))  # a step that still runs must not change what is compared and sent
        writer = order.writer or OwnShardWriter()
        checksum = next((request.options.checksum for request in order.payload.requests.values()), None)
        self.shards |= jobs.keys()
        records = self._copied(jobs, writer, checksum)
        left = {name: job for name, job in jobs.items() if name not in records}
        place = open_store(self.store.address.joined(self.folder))
        sent = writer.write(list(left.values()), checksum, order.progress_callback, place)
        return records | dict(zip(left, sent, strict=True))

    def _copied(self, jobs: Mapping[str, WriteJob], writer: ShardWriter, checksum: str | None) -> dict[str, FileDigest]:
        if checksum is None or not self.known:
            return {}
        known = {fingerprint: KnownFile(None, record) for fingerprint, (_, record) in self.known.items()}
        linked = writer.link(list(jobs.values()), known, checksum)
        same = {name: record for name, record in zip(jobs, linked, strict=True) if record is not None}
        copied = in_threads(lambda item, _: self._copy(*item), same.items(), FILES_AT_ONCE)
        return {name: record for (name, record), is_copied in zip(same.items(), copied, strict=True) if is_copied}

    def _copy(self, name: str, record: FileDigest) -> bool:
        found, _ = self.known[record.fingerprint or ""]
        try:
            self.store.copy(found, f"{self.folder}/{name}")
        except CheckpointChangedError:  # somebody has replaced or removed it: then it is sent
            return False
        return True
