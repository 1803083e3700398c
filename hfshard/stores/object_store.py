"""A `Store` over obstore: names below a prefix, conditions, ranges, multipart uploads, and lost responses."""

from __future__ import annotations

import atexit
import hashlib
import os
import queue
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from mmap import mmap
from typing import TYPE_CHECKING, Final, TypeVar

import obstore

from hfshard._util.arguments import StoreAddress
from hfshard._util.threads import sleep_unless_cancelled
from hfshard.errors import (
    ChangedObjectError,
    CheckpointChangedError,
    HfshardError,
    MissingObjectError,
    StoreConnectionError,
    StoreError,
)
from hfshard.stores import azure, gcs, s3
from hfshard.stores.byte_budget import ByteBudget, ByteShare, store_memory_bytes
from hfshard.stores.connection import OBSTORE_ERRORS, Connection, Failure, RequestRetry, ask, read_failure, refusal
from hfshard.stores.store import ObjectWriter, StoredObject, neighbors_of

if TYPE_CHECKING:
    from obstore import GetOptions, ObjectMeta, PutResult


_READ_BLOCK: Final = 1 << 20
"""Bytes gathered before a copy: few calls, and little memory."""
_BODY_BYTES: Final = 1 << 20
"""A put of more bytes can take longer than the stall limit."""

T = TypeVar("T")


class ObjectStore:
    """The objects below one prefix of a bucket of S3, GCS or Azure; see `Store`.

    Every read names the listed ETag, so two objects of one name never mix. Objects that are put in parts need names
    that identify their bytes: until Azure has created the blob, its parts belong to its name, not to their writer.
    """

    def __init__(self, address: StoreAddress) -> None:
        """Open the store.

        Raises:
            StoreAccessError: There are no credentials.
        """
        store_memory_bytes()  # raises if the environment sets too little
        self._address = address
        self._connection = connection_to(address.scheme, address.bucket)
        self._prefix = f"{address.prefix}/" if address.prefix else ""
        self._bucket_seen = False

    def __repr__(self) -> str:
        return f"<ObjectStore {self._address}>"

    @property
    def address(self) -> StoreAddress:
        """The store's address."""
        return self._address

    def list_objects(self, folder: str = "", *, recursive: bool = False) -> dict[str, StoredObject]:
        """List the objects of a folder; see `Store`."""
        if recursive:
            below = self._below(folder)
            listed = self._ask(lambda: obstore.list(self._connection.quick, below or None).collect(), folder)
        else:
            listed = self._list_level(folder)["objects"]
        self._bucket_seen = True
        # A folder that was created by hand is also an object: "prefix/", which the client lists as "prefix"; and
        # "prefix/code/", listed as an empty "prefix/code".
        found = [self._stored(meta) for meta in listed if meta["path"].startswith(self._prefix)]
        above = {"/".join(parts[:end]) for parts in (one.name.split("/") for one in found) for end in range(len(parts))}
        return {one.name: one for one in found if one.size or one.name not in above}

    def folders(self, folder: str = "") -> list[str]:
        """Name the folders directly in a folder; see `Store`."""
        below = self._below(folder)
        return sorted(one.removeprefix(below).rstrip("/") for one in self._list_level(folder)["common_prefixes"])

    def neighbors(self) -> list[str]:
        """Name the folders next to the place; see `Store`."""
        return neighbors_of(self._address, ObjectStore)

    def find(self, name: str) -> StoredObject | None:
        """Look up one object; see `Store`."""
        try:
            return self._stored(self._ask(lambda: obstore.head(self._connection.quick, self._key(name)), name))
        except MissingObjectError:
            if not self._bucket_seen:
                self._list_level("")  # without a body, the response does not say whether the bucket is missing
            return None

    def read_into(self, found: StoredObject, begin: int, target: memoryview) -> None:
        """Fill memory with the bytes of an object from `begin` on; see `Store`."""
        filled = 0
        retry = RequestRetry(self._connection.follower())
        while filled < len(target):
            self._connection.check_process()
            try:
                for block in self._blocks(found, begin + filled, begin + len(target)):
                    target[filled : filled + len(block)] = block
                    filled += len(block)
                    retry.reset()
                if filled < len(target):
                    raise StoreConnectionError(f"The response for '{self._at(found.name)}' was too short. Try again.")
            except OBSTORE_ERRORS as error:
                failure = read_failure(error)
                if not retry.wait_after(failure):
                    raise self._unreadable(found, failure) from None

    def read(self, found: StoredObject) -> bytes:
        """Return the bytes of a small object; see `Store`."""
        raw = bytearray(found.size)
        self.read_into(found, 0, memoryview(raw))
        return bytes(raw)

    def put(self, name: str, raw: bytes) -> StoredObject:
        """Put a small object completely or not at all; see `Store`."""
        return self._put_whole(name, memoryview(raw))

    def open_writer(self, name: str, size: int, replaced: StoredObject | None = None) -> ObjectWriter:
        """Begin a large object of `size` bytes; see `Store`."""
        return Upload(
            self._connection,
            self._key(name),
            name,
            size,
            replaced,
            put_whole=lambda raw: self._put_whole(name, raw),
            find=lambda: self.find(name),
            refused=lambda error: self._refused(read_failure(error), name),
        )

    def copy(self, source: StoredObject, target: str) -> StoredObject:
        """Copy an object on the server; see `Store`."""
        if self._connection.copy_pinned is not None:
            etag = self._connection.copy_pinned(self._key(source.name), source.etag, source.size, self._key(target))
            # Some services ignore the condition; a copy of an object that was put in parts gets another ETag.
            if etag is None or (etag != source.etag and not self._is_still(source)):
                raise self._changed(source.name)
            return StoredObject(target, source.size, etag)
        self._copy_whole(source.name, target)
        # obstore's copies have no condition, so check afterwards that the source is still the same.
        copy = self.find(target) if self._is_still(source) else None
        if copy is None or copy.size != source.size:
            raise self._changed(source.name)
        return copy

    def delete(self, names: Collection[str]) -> None:
        """Delete objects; see `Store`."""
        keys = [self._key(name) for name in names]
        together = self._connection.service.deletes_together
        for begin in range(0, len(keys), together):
            self._delete(keys[begin : begin + together])

    def sweep_uploads(self, is_left: Callable[[str], bool]) -> int:
        """Remove what unfinished uploads have left; see `Store`. Azure does this itself after a week."""
        if self._connection.sweep is None:
            return 0
        return self._connection.sweep(self._prefix, is_left)

    def _is_still(self, found: StoredObject) -> bool:
        after = self.find(found.name)
        return after is not None and after.etag == found.etag

    def _key(self, name: str) -> str:
        return self._prefix + name

    def _below(self, folder: str) -> str:
        return self._prefix + (f"{folder}/" if folder else "")

    def _at(self, name: str) -> str:
        return str(self._address.joined(name)) if name else str(self._address)

    def _stored(self, meta: ObjectMeta) -> StoredObject:
        name = meta["path"].removeprefix(self._prefix)
        return StoredObject(name, meta["size"], (meta["e_tag"] or "").strip('"'), meta["last_modified"])

    def _list_level(self, folder: str) -> obstore.ListResult[Sequence[ObjectMeta]]:
        """List one level: the objects of a folder, and its folders."""
        below = self._below(folder)
        listed = self._ask(lambda: obstore.list_with_delimiter(self._connection.quick, below or None), folder)
        self._bucket_seen = True
        return listed

    def _ask(self, request: Callable[[], T], name: str) -> T:
        """Send a request that changes nothing, with retries."""
        return self._attempt(lambda: ask(request), name)

    def _attempt(self, action: Callable[[], T], name: str, note: Callable[[Failure], None] = lambda failure: None) -> T:
        """Send a request, with retries; `note` gets each failure after which it may have been carried out."""
        retry = RequestRetry(self._connection.follower())
        while True:
            self._connection.check_process()
            try:
                return action()
            except OBSTORE_ERRORS as error:
                failure = read_failure(error)
            if failure.may_be_done:
                note(failure)
            if not retry.wait_after(failure):
                # Without the cause: obstore prints complete requests and responses, signatures included.
                raise self._final(failure, name) from None

    def _final(self, failure: Failure, name: str) -> StoreError:
        if failure.no_bucket:
            return self._refused(failure, name)
        where = self._at(name)
        if failure.differs:
            return ChangedObjectError(
                f"'{where}' is locked, or another writer changed it ({failure.code}).", path=where
            )
        if failure.missing:
            return MissingObjectError(f"'{where}' does not exist.", path=where)
        return self._refused(failure, name)

    def _refused(self, failure: Failure, name: str) -> StoreError:
        return refusal(self._connection.service, self._connection.address, self._at(name), failure)

    def _changed(self, name: str) -> CheckpointChangedError:
        return CheckpointChangedError(
            f"'{self._at(name)}' was replaced or deleted while it was read. Load it again.", path=self._at(name)
        )

    def _unreadable(self, found: StoredObject, failure: Failure) -> HfshardError:
        gone = failure.differs or failure.missing or failure.status == 416
        if gone and not failure.no_bucket:
            return self._changed(found.name)
        return self._refused(failure, found.name)

    def _blocks(self, found: StoredObject, begin: int, end: int) -> obstore.BytesStream:
        options: GetOptions = {"if_match": f'"{found.etag}"', "range": (begin, end)}
        answer = ask(lambda: obstore.get(self._connection.quick, self._key(found.name), options=options))
        if self._stored(answer.meta).etag != found.etag:
            raise self._changed(found.name)  # the service ignores conditions
        return answer.stream(_READ_BLOCK)

    def _put_whole(self, name: str, raw: memoryview) -> StoredObject:
        # The client for large bodies retries by itself, and does not report which of the attempts failed.
        is_large = len(raw) > _BODY_BYTES
        doubts: list[Failure] = []
        try:
            result = self._attempt(
                lambda: obstore.put(
                    self._connection.uploads if is_large else self._connection.quick,
                    self._key(name),
                    raw,
                    use_multipart=False,
                ),
                name,
                doubts.append,
            )
        except StoreError as error:
            error.may_be_done = bool(doubts) or is_large
            raise
        return StoredObject(name, len(raw), (result["e_tag"] or "").strip('"'))

    def _copy_whole(self, source: str, target: str) -> None:
        keys = self._key(source), self._key(target)
        try:
            self._attempt(lambda: obstore.copy(self._connection.uploads, *keys), source)
        except MissingObjectError:
            raise self._changed(source) from None

    def _delete(self, keys: list[str]) -> None:
        delete_together = self._connection.delete_together
        if len(keys) > 1 and delete_together is not None and delete_together(keys):
            return
        try:
            self._attempt(lambda: obstore.delete(self._connection.quick, keys), "")
        except MissingObjectError:
            # One is already missing. In a request for several, this can have hidden another one's error.
            if len(keys) > 1:
                for key in keys:
                    self._delete([key])


# Multipart upload of a large object: parts are sent while the next ones are filled; it is not visible before the end.


_PARTS_AT_ONCE: Final = 8
"""Parts of one object sent at once: one connection to S3 carries 50 to 100 MB/s."""
_LOOK_SECONDS: Final = 0.5
"""Interval of the cancellation check while waiting for the last parts."""
_ABORT_SECONDS: Final = 10.0
"""The longest wait for an upload to stop; the next save sweeps what it leaves after that."""

_OPEN: Final[weakref.WeakSet[Upload]] = weakref.WeakSet()


class _GivenUpError(Exception):
    """Raised into obstore, which then removes the parts."""


class Upload:
    """An `ObjectWriter`. An object of at most one part is kept in memory until `finish`, and then put in one request.

    obstore runs in its own thread, takes parts from the queue and sends up to eight at once. It owns a part's memory
    until the part is sent; then the memory is reused.
    """

    def __init__(
        self,
        connection: Connection,
        key: str,
        name: str,
        size: int,
        replaced: StoredObject | None,
        put_whole: Callable[[memoryview], StoredObject],
        find: Callable[[], StoredObject | None],
        refused: Callable[[BaseException], HfshardError],
    ) -> None:
        """Begin the upload.

        Args:
            connection, size: The bucket's connection, and the object's bytes.
            key, name: The object's name in the bucket, and below the store's prefix.
            replaced: The object that it replaces.
            put_whole: Put it in one request.
            find: Look up the object of this name after a lost response.
            refused: Build the error to raise for one of obstore's.
        """
        self._connection = connection
        self._key = key
        self._name = name
        self._size = size
        self._replaced = replaced
        self._put_whole = put_whole
        self._find = find
        self._refused = refused
        self._part_bytes = part_bytes(size)
        self._written = 0
        self._buffer: mmap | None = None
        self._used = 0
        self._parts: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._asked = False
        self._result: PutResult | None = None
        self._error: BaseException | None = None
        self._over = False
        self._gone = False
        PART_MEMORY.join()
        _OPEN.add(self)

    def write(self, block: memoryview) -> None:
        """Send the next bytes; see `ObjectWriter`."""
        rest = block.cast("B") if block.ndim != 1 or block.format != "B" else block
        if self._written + len(rest) > self._size:
            raise StoreError(
                f"'{self._name}' was declared with {self._size} bytes, got more. Retry the save; if it happens "
                "again, report a bug.",
                path=self._name,
            )
        while len(rest):
            self._check()
            if self._buffer is None:
                self._buffer = PART_MEMORY.take_buffer(min(self._part_bytes, self._size - self._written))
                self._used = 0
            taken = min(len(rest), len(self._buffer) - self._used)
            self._buffer[self._used : self._used + taken] = rest[:taken]
            self._used += taken
            self._written += taken
            rest = rest[taken:]
            if self._used == len(self._buffer) and self._size > self._part_bytes:
                self._send_part()

    def finish(self) -> StoredObject:
        """Create the object; see `ObjectWriter`."""
        try:
            if self._written != self._size:
                raise StoreError(
                    f"'{self._name}' was declared with {self._size} bytes, got {self._written}. Nothing was stored. "
                    "Retry the save; if it happens again, report a bug.",
                    path=self._name,
                )
            if self._thread is None:
                return self._put_whole(memoryview(self._buffer)[: self._used] if self._buffer else memoryview(b""))
            return self._complete(self._thread)
        finally:
            self.abort()

    def abort(self) -> None:
        """Give up; see `ObjectWriter`."""
        if self._gone:
            return
        self._gone = True
        self.stop()
        _OPEN.discard(self)
        if self._thread is not None:
            self._thread.join(_ABORT_SECONDS)
        self._drop_parts()
        if self._buffer is not None:
            PART_MEMORY.give_back_buffer(self._buffer)
            self._buffer = None
        PART_MEMORY.leave()

    def stop(self) -> None:
        """Make the thread raise into obstore when it asks for the next part."""
        self._over = True
        self._parts.put(None)

    def _check(self) -> None:
        self._connection.check_process()
        if self._over:
            raise StoreError(f"'{self._name}' was already finished or aborted.", path=self._name)
        if self._error is not None:
            raise self._failed(self._error)

    def _send_part(self) -> None:
        assert self._buffer is not None
        buffer, self._buffer = self._buffer, None  # first: whatever comes next, it has one owner
        self._parts.put(PART_MEMORY.lend(buffer, self._used))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"upload {self._name}", daemon=True)
            self._thread.start()

    def _complete(self, thread: threading.Thread) -> StoredObject:
        if self._buffer is not None:
            self._send_part()
        self._parts.put(None)
        while thread.is_alive():
            thread.join(_LOOK_SECONDS)
            sleep_unless_cancelled(0)
        if self._error is not None:
            raise self._failed(self._error)
        etag = self._result["e_tag"] if self._result else None
        if etag is None:
            raise StoreError(f"'{self._name}': the upload ended without a result.", path=self._name)
        return StoredObject(self._name, self._size, etag.strip('"'))

    def _failed(self, error: BaseException) -> HfshardError:
        """Build the error to raise, with a separate one if the upload itself is gone."""
        if not isinstance(error, OBSTORE_ERRORS):
            return StoreError(f"'{self._name}' was not stored: {type(error).__name__}: {error}", path=self._name)
        failure = read_failure(error)
        if failure.missing and not failure.no_bucket:
            return StoreError(
                f"The unfinished upload of '{self._name}' was removed by another save, which committed first. "
                "Nothing was stored.",
                path=self._name,
            )
        return self._refused(error)

    def _run(self) -> None:
        """Pass the parts to obstore in this thread; the outcome is in `_result` or `_error`."""
        retry = RequestRetry(self._connection.follower())
        while True:
            try:
                self._result = obstore.put(
                    self._connection.uploads,
                    self._key,
                    self._taken(),
                    use_multipart=True,
                    chunk_size=self._part_bytes,
                    max_concurrency=_PARTS_AT_ONCE,
                )
                return
            except _GivenUpError as error:
                self._error = error
                self._drop_parts()
                return
            except OBSTORE_ERRORS as error:
                # Until the first part is requested, a restart loses nothing.
                if not self._asked and retry.wait_after(read_failure(error)):
                    continue
                if not self._was_completed():
                    self._error = error
                self._drop_parts()
                return

    def _taken(self) -> Iterator[memoryview]:
        while True:
            part = self._parts.get()
            self._asked = True
            if self._over:
                raise _GivenUpError
            if part is None:
                return
            yield part
            del part

    def _was_completed(self) -> bool:
        """Return whether the object exists after all, because only the response to its completion was lost."""
        if self._written != self._size:
            return False
        try:
            found = self._find()
        except HfshardError:
            return False  # report the first error instead
        if found is None or found.size != self._size or found == self._replaced:
            return False
        self._result = {"e_tag": found.etag, "version": None}
        return True

    def _drop_parts(self) -> None:
        while True:
            try:
                self._parts.get_nowait()
            except queue.Empty:
                return


@atexit.register
def _give_up_all() -> None:
    """Remove the parts of open uploads when the interpreter exits."""
    left = list(_OPEN)
    for upload in left:
        upload.stop()
    for upload in left:
        upload.abort()


os.register_at_fork(after_in_child=_OPEN.clear)  # they are the parent's


# Memory of the parts that are being filled or sent: bounded, and shared by all uploads of the process.


_SHARE: Final = 3, 4
"""Share of the allowed memory for parts; the client uses the rest."""


class BufferPool(ByteBudget):
    """Pool of reusable buffers for parts."""

    def __init__(self) -> None:
        super().__init__(by_thread=False)

    def _renew(self) -> None:
        super()._renew()
        self._free: list[mmap] = []
        self._shares: weakref.WeakKeyDictionary[mmap, ByteShare] = weakref.WeakKeyDictionary()
        """Bytes of each buffer that is in use; one that is dropped returns them."""
        self._uploads = 0

    def join(self) -> None:
        """Register the start of an upload."""
        with self._changed:
            self._uploads += 1

    def leave(self) -> None:
        """Register the end of an upload; after the last one, free all buffers."""
        with self._changed:
            self._uploads = max(0, self._uploads - 1)  # in a forked child, it may be the parent's
            if not self._uploads:
                self._free.clear()

    def take_buffer(self, size: int) -> mmap:
        """Return a buffer of this size, waiting until it fits. One that exceeds the budget waits to be the only one.

        Raises:
            InterruptedError: This thread's work was cancelled; see `sleep_unless_cancelled`.
        """
        limit = store_memory_bytes() * _SHARE[0] // _SHARE[1]
        share = self.take(size, limit)
        with self._changed:
            buffer = next((kept for kept in self._free if len(kept) == size), None)
            if buffer is not None:
                self._free.remove(buffer)
            while buffer is None and self._free and self.taken_bytes + sum(map(len, self._free)) > limit:
                self._free.pop()
            buffer = buffer or mmap(-1, size)  # not from the heap, which would keep it
            self._shares[buffer] = share
        return buffer

    def lend(self, buffer: mmap, used: int) -> memoryview:
        """Return a view of a buffer's first `used` bytes; the buffer returns to the pool when the view is freed."""
        view = memoryview(buffer)[:used]
        weakref.finalize(view, self.give_back_buffer, buffer).atexit = False
        return view

    def give_back_buffer(self, buffer: mmap) -> None:
        """Return a buffer to the pool."""
        with self._changed:
            share = self._shares.pop(buffer, None)
            if share is None:
                return  # the parent's, in a forked child
            if self._uploads:
                self._free.append(buffer)
            share.end()


PART_MEMORY: Final = BufferPool()


# Part sizes of an object.


_LEAST_PART: Final = 8 << 20
"""S3 and GCS require parts of at least 5 MiB, except for the last one."""
_MOST_PARTS: Final = 10_000
"""Limit of S3 and GCS; Azure's is 50,000."""


def part_bytes(object_bytes: int) -> int:
    """Return the part size of an object, which depends only on its size and is the same for every writer.

    Example:
        >>> part_bytes(5 << 40) >> 20
        525
    """
    least = -(-object_bytes // _MOST_PARTS)
    whole_mib = -(-least // (1 << 20)) << 20
    return max(_LEAST_PART, whole_mib)


# Connections: one per process for each bucket and its settings.


_VARIABLES: Final = ("AWS_", "AZURE_", "GOOGLE_", "STORAGE_EMULATOR_HOST", "CLOUDSDK_", "HFSHARD_STORE_", "HOME")
"""Name prefixes of environment variables that can change a connection."""

_CONNECT: Final[dict[str, Callable[[str], Connection]]] = {
    "s3": s3.connect,
    "gs": gcs.connect,
    "az": azure.connect,
}

_lock = threading.Lock()
_CONNECTIONS: Final[dict[tuple[str, str, str], Connection]] = {}


def connection_to(scheme: str, bucket: str) -> Connection:
    """Return the connection to a bucket, created on the first request with the current environment.

    Raises:
        StoreAccessError: There are no credentials.
    """
    key = (scheme, bucket, _environment())
    with _lock:
        if key not in _CONNECTIONS:
            _CONNECTIONS[key] = _CONNECT[scheme](bucket)
        return _CONNECTIONS[key]


def _forget() -> None:
    """Start empty in a forked child: another thread of the parent may have held the lock."""
    global _lock
    _lock = threading.Lock()
    _CONNECTIONS.clear()


os.register_at_fork(after_in_child=_forget)


def _environment() -> str:
    """Return a digest of the variables, since they contain secrets."""
    digest = hashlib.sha256()
    for name in sorted(os.environ):
        if name.startswith(_VARIABLES):
            digest.update(f"{name}\0{os.environ[name]}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()
