"""Sends the files of one checkpoint into a store: what did not change is copied there, all else is streamed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event
from typing import Final

from hfshard._util.threads import cancellable, in_threads
from hfshard.constants import FILES_AT_ONCE, SAFETENSORS_SUFFIX
from hfshard.errors import CheckpointChangedError, RemoteChangedError, StaleObjectError
from hfshard.saving.prepare import index_of, plan_request, shard_jobs
from hfshard.storage.format.index import FileDigest
from hfshard.storage.weights.safetensors_stream import SafetensorsStream
from hfshard.storage.weights.safetensors_writer import WriteJob, await_devices, digest_shard, writer_threads
from hfshard.stores.protocols import ANYTHING, Store, StoredObject
from hfshard.training.run.manifest import MANIFEST, CheckpointManifest, shard_record, small_record
from hfshard.training.run.places.protocols import CheckpointOrder
from hfshard.training.run.run_checkpoint import RunCheckpoint
from hfshard.training.run.writing import TRAINING_STATE

_BLOCK_BYTES: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class KnownObject:
    """A file of an older checkpoint in the same run."""

    found: StoredObject
    digest: FileDigest
    """What the manifest tells of it."""


@dataclass
class Sender:
    """Sends one checkpoint; what it has put is noted, to be taken back."""

    store: Store
    """Of the run."""
    folder: str
    """Of the checkpoint in it."""
    known: dict[str, KnownObject] = field(default_factory=dict)
    """Fingerprint -> a file that may have the same bytes."""
    put: dict[str, StoredObject | None] = field(default_factory=dict)
    """Names that may be there now, and the objects that were put under them where that is known."""
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
                self.known[record.fingerprint or ""] = KnownObject(listed[name], record)

    def send(self, order: CheckpointOrder) -> CheckpointManifest:
        """Send all files but the manifest.

        Returns:
            The manifest with all files.

        Raises:
            StoreError: The store refused or failed.
            StaleObjectError: Somebody else puts files there.
        """
        plans = {base: plan_request(request) for base, request in order.payload.requests.items()}
        small = {**order.files, TRAINING_STATE: order.payload.training_state}
        table: dict[str, FileDigest] = {}
        for base, request in order.payload.requests.items():
            plan = plans[base]
            jobs = shard_jobs(plan, request, [""] * len(plan.shards))
            sent = self._send_all(jobs, [shard.file for shard in plan.shards], order, request.options.checksum)
            names = [name for name, _ in sent]
            digests = [digest for _, digest in sent]
            table |= {name: shard_record(digest) for name, digest in sent}
            small |= request.small_files
            if plan.is_sharded:
                shards = [replace(shard, file=name) for shard, name in zip(plan.shards, names, strict=True)]
                named = replace(plan, shards=tuple(shards))
                small[request.options.names.index] = index_of(named, request, digests).to_json()
        in_threads(lambda item, _: self.put_small(*item), small.items(), FILES_AT_ONCE)
        table |= {name: small_record(raw) for name, raw in small.items()}
        return replace(order.manifest, files=table)

    def put_manifest(self, manifest: CheckpointManifest) -> None:
        """Put the manifest, which makes the checkpoint whole.

        Raises:
            RemoteChangedError: Somebody else has made one of this step.
        """
        self.manifest = manifest.to_json()
        try:
            self.store.put(
                f"{self.folder}/{MANIFEST}", self.manifest, None if self.store.has_conditional_put else ANYTHING
            )
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
            own = self.put.get(name)
            if found is None or found.size != record.size or (own is not None and own.etag != found.etag):
                return False
        return True

    def own_among(self, listed: Mapping[str, StoredObject], *, is_alone: bool) -> set[str]:
        """Choose the files that this has put, of those that are there.

        Args:
            listed: What is there.
            is_alone: Whether nobody else saves there, so that what may have been put by this was.
        """
        return {
            name
            for name, own in self.put.items()
            if name in listed and (is_alone if own is None else own.etag == listed[name].etag)
        }

    def put_small(self, name: str, raw: bytes) -> None:
        """Put a small file that is not there yet, or that a killed save has left.

        A manager that has lost the run without knowing it never gets through: it replaces only what it has seen before.
        """
        path = f"{self.folder}/{name}"
        self.put[name] = None
        if not self.store.has_conditional_put:
            self.put[name] = self.store.put(path, raw, ANYTHING)
            return
        try:
            self.put[name] = self.store.put(path, raw, None)
        except StaleObjectError:
            self.put[name] = self.store.put(path, raw, self.store.find(path))

    def _send_all(
        self, jobs: Sequence[WriteJob], files: Sequence[str], order: CheckpointOrder, checksum: str | None
    ) -> list[tuple[str, FileDigest]]:
        await_devices(jobs)  # a step that still runs must not change what is hashed and sent
        send = partial(self._send_one, order=order, checksum=checksum, is_sharded=len(files) > 1)
        return in_threads(send, zip(jobs, files, strict=True), writer_threads())

    def _send_one(
        self,
        item: tuple[WriteJob, str],
        cancelled: Event,
        *,
        order: CheckpointOrder,
        checksum: str | None,
        is_sharded: bool,
    ) -> tuple[str, FileDigest]:
        job, file = item
        digest, header = digest_shard(job, checksum, None, cancelled)
        name = _name_by_content(file, digest) if is_sharded else file
        path = f"{self.folder}/{name}"
        self.put[name] = None
        tell = cancellable(order.progress_callback, cancelled)
        if not self._copy(digest, path):
            stream = SafetensorsStream(header, list(job.tensors.values()))
            writer = self.store.open_writer(path, digest.size or 0)
            try:
                while block := stream.read(_BLOCK_BYTES):
                    writer.write(memoryview(block))
                    tell(len(block))
                self.put[name] = writer.finish()
            except BaseException:
                writer.abort()
                raise
        return name, digest

    def _copy(self, digest: FileDigest, path: str) -> bool:
        """Copy a file of the checkpoint before that has the same bytes, if there is one."""
        known = self.known.get(digest.fingerprint or "")
        if known is None or replace(digest, tensor_digests=None) != known.digest:
            return False
        try:
            self.store.copy(known.found, path)
        except CheckpointChangedError:  # somebody has replaced or removed it: then it is sent
            return False
        return True


def _name_by_content(file: str, digest: FileDigest) -> str:
    """The name of a shard, with digits of its content: two saves never give one name to different bytes."""
    digits = (digest.xxh3 or digest.sha256 or digest.fingerprint or "")[:16]
    return f"{file.removesuffix(SAFETENSORS_SUFFIX)}-{digits}{SAFETENSORS_SUFFIX}"
