"""A bucket of the Hugging Face Hub as a store: names by the Hub's bucket calls, bytes by streams of Xet."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from huggingface_hub import BucketFile

from hfshard._util.addresses import StoreAddress
from hfshard.errors import CheckpointChangedError, StoreConnectionError, StoreError
from hfshard.stores.buckets.calls import BucketCalls
from hfshard.stores.buckets.download import XetReader
from hfshard.stores.buckets.errors import translate_bucket_errors
from hfshard.stores.buckets.tokens import XetTokens, bucket_token_url
from hfshard.stores.buckets.upload import XetUpload
from hfshard.stores.buckets.xet import XetFailedError
from hfshard.stores.protocols import StoredObject, neighbors_of


class BucketStore:
    """The objects below a prefix of a bucket; see `Store`.

    An ETag is Xet's hash of the contents. Contents that a listing has shown can be read as long as the storage has
    them, whatever has their name by then.
    """

    def __init__(self, address: StoreAddress) -> None:
        """Ask nothing yet."""
        self.address = address
        self._start = f"{address.prefix}/" if address.prefix else ""
        self._calls = BucketCalls(address)
        self._write_tokens = XetTokens(bucket_token_url(address.bucket, "write"))
        self._reader = XetReader(XetTokens(bucket_token_url(address.bucket, "read")))

    def __repr__(self) -> str:
        """The address."""
        return f"{type(self).__name__}({str(self.address)!r})"

    def list_objects(self, folder: str = "", *, recursive: bool = False) -> dict[str, StoredObject]:
        """List the objects of a folder; see `Store`."""
        found = [self._object(file) for file in self._calls.files((self._start + folder).rstrip("/"), recursive)]
        return {one.name: one for one in sorted(found, key=lambda one: one.name)}

    def folders(self, folder: str = "") -> list[str]:
        """Name the folders directly in a folder; see `Store`."""
        return self._calls.folders((self._start + folder).rstrip("/"))

    def neighbors(self) -> list[str]:
        """Name the folders next to the place; see `Store`."""
        return neighbors_of(self.address, BucketStore)

    def find(self, name: str) -> StoredObject | None:
        """Ask for one object."""
        found = [file for file in self._calls.find([self._start + name]) if file.path == self._start + name]
        return self._object(found[0]) if found else None

    def read_into(self, found: StoredObject, begin: int, target: memoryview) -> None:
        """Fill memory with the bytes of an object from `begin` on.

        Raises:
            CheckpointChangedError: The storage no longer has these contents.
        """
        raw = target.cast("B")
        with translate_bucket_errors(self.address):
            try:
                self._reader.read_into(found.etag, found.size, begin, raw)
            except XetFailedError as error:
                if error.kind != "missing":
                    raise
                raise self._changed(found) from error

    def read(self, found: StoredObject) -> bytes:
        """The bytes of a small object; raises as `read_into`."""
        raw = bytearray(found.size)
        self.read_into(found, 0, memoryview(raw))
        return bytes(raw)

    def put(self, name: str, raw: bytes) -> StoredObject:
        """Put a small object, whole or not at all; see `Store`."""
        writer = self.open_writer(name, len(raw))
        try:
            writer.write(memoryview(raw))
            return writer.finish()
        except BaseException:
            writer.abort()
            raise

    def open_writer(self, name: str, size: int) -> BucketWriter:
        """Begin a large object of so many bytes."""
        with translate_bucket_errors(self.address):
            return BucketWriter(self, name, size, XetUpload(self._write_tokens, size))

    def copy(self, source: StoredObject, target: str) -> StoredObject:
        """Give the contents of an object another name, too; see `Store`."""
        try:
            self._calls.copy(source.etag, self._start + target)
        except StoreError as error:
            if not isinstance(error, StoreConnectionError) and self.find(source.name) != source:
                raise self._changed(source) from error
            raise
        return replace(source, name=target)

    def delete(self, names: Collection[str]) -> None:
        """Delete objects; those that are missing already are no error."""
        if names:
            self._calls.delete([self._start + name for name in names])

    def sweep_uploads(self, is_left: Callable[[str], bool]) -> int:
        """Nothing: what was sent and got no name is the Hub's to remove, and no call lists it."""
        return 0

    def _name(self, sent: StoredObject) -> StoredObject:
        """Make what was sent visible; where the answer is lost, look whether it is."""
        try:
            self._calls.name(self._start + sent.name, sent.etag)
        except StoreConnectionError as error:
            error.may_be_done = True
            if self.find(sent.name) != sent:
                raise
        return sent

    def _object(self, file: BucketFile) -> StoredObject:
        return StoredObject(file.path[len(self._start) :], file.size, file.xet_hash, file.uploaded_at)

    def _changed(self, found: StoredObject) -> CheckpointChangedError:
        return CheckpointChangedError(
            f"'{self.address.joined(found.name)}' is no longer what it was when it was listed: somebody has replaced "
            "or deleted it. Load it again.",
            path=str(self.address.joined(found.name)),
            expected=found.etag,
        )


class BucketWriter:
    """A large object that is sent as a stream; see `ObjectWriter`."""

    def __init__(self, store: BucketStore, name: str, size: int, upload: XetUpload) -> None:
        """Keep what is being sent."""
        self._store, self._name, self._size = store, name, size
        self._upload = upload
        self._written = 0

    def write(self, block: memoryview) -> None:
        """Send the next bytes, which may change when this returns. It waits while too much is under way."""
        raw = block.cast("B")
        with translate_bucket_errors(self._store.address):
            self._upload.write(raw)
        self._written += len(raw)

    def finish(self) -> StoredObject:
        """Make the object of the bytes that were written, replacing one of its name."""
        return self._store._name(self.send())

    def send(self) -> StoredObject:
        """Have all bytes in the storage; the object has no name yet."""
        if self._written != self._size:
            raise StoreError(
                f"'{self._store.address.joined(self._name)}' was to have {self._size} bytes and got {self._written}.",
                expected=self._size,
                actual=self._written,
            )
        with translate_bucket_errors(self._store.address):
            sent = self._upload.finish()
        return StoredObject(self._name, sent.size, sent.hash)

    def abort(self) -> None:
        """Give up. What was sent has no name: the Hub removes it in its own time."""
        self._upload.abort()
