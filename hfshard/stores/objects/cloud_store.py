"""A `Store` over obstore: names below a prefix, conditions, ranges, and what to do when an answer is lost."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

import obstore

from hfshard._util.addresses import StoreAddress
from hfshard.errors import (
    ChangedObjectError,
    CheckpointChangedError,
    HfshardError,
    MissingObjectError,
    StoreConnectionError,
    StoreError,
)
from hfshard.stores.memory import store_memory_bytes
from hfshard.stores.objects.connecting import connection_to
from hfshard.stores.objects.connection import refusal
from hfshard.stores.objects.failures import OBSTORE_ERRORS, Failure, read_failure
from hfshard.stores.objects.retrying import Patience, ask
from hfshard.stores.objects.upload import Upload
from hfshard.stores.protocols import ObjectWriter, StoredObject, neighbors_of

if TYPE_CHECKING:
    from obstore import GetOptions, ObjectMeta


_READ_BLOCK: Final = 1 << 20
"""Bytes that are gathered before they are copied: few calls, and little memory."""
_BODY_BYTES: Final = 1 << 20
"""A put of more bytes may take longer than the service may be silent."""

T = TypeVar("T")


class CloudStore:
    """The objects below one prefix of a bucket of S3, GCS or Azure; see `Store`.

    Every read names the ETag that was listed, so two objects of one name never mix. Objects that are put in parts must
    have names that stand for their bytes: the parts that Azure has not yet made a blob of belong to its name, not to
    their writer.
    """

    def __init__(self, address: StoreAddress) -> None:
        """Open.

        Raises:
            StoreAccessError: There are no credentials.
        """
        store_memory_bytes()  # raises where the environment asks for too little
        self._address = address
        self._connection = connection_to(address.scheme, address.bucket)
        self._prefix = f"{address.prefix}/" if address.prefix else ""
        self._bucket_seen = False

    def __repr__(self) -> str:
        return f"<CloudStore {self._address}>"

    @property
    def address(self) -> StoreAddress:
        """Where it is."""
        return self._address

    def list_objects(self, folder: str = "", *, recursive: bool = False) -> dict[str, StoredObject]:
        """List the objects of a folder; see `Store`."""
        below = self._prefix + (f"{folder}/" if folder else "")
        if recursive:
            listed = self._ask(lambda: obstore.list(self._connection.quick, below or None).collect(), folder)
        else:
            listed = self._list_level(folder)["objects"]
        self._bucket_seen = True
        # A folder that was made by hand is an object, too: "prefix/", which the client lists as "prefix"; and
        # "prefix/code/", listed as an empty "prefix/code".
        found = [self._stored(meta) for meta in listed if meta["path"].startswith(self._prefix)]
        above = {"/".join(parts[:end]) for parts in (one.name.split("/") for one in found) for end in range(len(parts))}
        return {one.name: one for one in found if one.size or one.name not in above}

    def folders(self, folder: str = "") -> list[str]:
        """Name the folders directly in a folder; see `Store`."""
        below = self._prefix + (f"{folder}/" if folder else "")
        return sorted(one.removeprefix(below).rstrip("/") for one in self._list_level(folder)["common_prefixes"])

    def neighbors(self) -> list[str]:
        """Name the folders next to the place; see `Store`."""
        return neighbors_of(self._address, CloudStore)

    def find(self, name: str) -> StoredObject | None:
        """Ask for one object; see `Store`."""
        try:
            return self._stored(self._ask(lambda: obstore.head(self._connection.quick, self._key(name)), name))
        except MissingObjectError:
            if not self._bucket_seen:
                self._list_level("")  # an answer without a body does not say what is missing: the bucket, perhaps
            return None

    def read_into(self, found: StoredObject, begin: int, target: memoryview) -> None:
        """Fill memory with the bytes of an object from `begin` on; see `Store`."""
        filled = 0
        patience = Patience(self._connection.follower())
        while filled < len(target):
            self._connection.check_process()
            try:
                for block in self._blocks(found, begin + filled, begin + len(target)):
                    target[filled : filled + len(block)] = block
                    filled += len(block)
                    patience.reset()
                if filled < len(target):
                    raise StoreConnectionError(f"The answer for '{self._at(found.name)}' was too short. Try again.")
            except OBSTORE_ERRORS as error:
                failure = read_failure(error)
                if not patience.wait_after(failure):
                    raise self._unreadable(found, failure) from None

    def read(self, found: StoredObject) -> bytes:
        """The bytes of a small object; see `Store`."""
        raw = bytearray(found.size)
        self.read_into(found, 0, memoryview(raw))
        return bytes(raw)

    def put(self, name: str, raw: bytes) -> StoredObject:
        """Put a small object, whole or not at all; see `Store`."""
        return self._put_whole(name, memoryview(raw))

    def open_writer(self, name: str, size: int) -> ObjectWriter:
        """Begin a large object of so many bytes; see `Store`."""
        return Upload(
            self._connection,
            self._key(name),
            name,
            size,
            put_whole=lambda raw: self._put_whole(name, raw),
            find=lambda: self.find(name),
            refused=lambda error: self._refused(read_failure(error), name),
        )

    def copy(self, source: StoredObject, target: str) -> StoredObject:
        """Copy an object on the server; see `Store`."""
        if self._connection.copy_pinned is not None:
            etag = self._connection.copy_pinned(self._key(source.name), source.etag, source.size, self._key(target))
            # Services exist that ignore the condition; a copy of an object that was put in parts gets another ETag.
            if etag is None or (etag != source.etag and not self._is_still(source)):
                raise self._changed(source.name)
            return StoredObject(target, source.size, etag)
        self._copy_whole(source.name, target)
        # obstore's copies have no condition, so the source must be the same one afterwards still.
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
        """Remove what unfinished uploads have left; see `Store`. Azure does that itself, after a week."""
        if self._connection.sweep is None:
            return 0
        return self._connection.sweep(self._prefix, is_left)

    def _is_still(self, found: StoredObject) -> bool:
        after = self.find(found.name)
        return after is not None and after.etag == found.etag

    def _key(self, name: str) -> str:
        return self._prefix + name

    def _at(self, name: str) -> str:
        return str(self._address.joined(name)) if name else str(self._address)

    def _stored(self, meta: ObjectMeta) -> StoredObject:
        name = meta["path"].removeprefix(self._prefix)
        return StoredObject(name, meta["size"], (meta["e_tag"] or "").strip('"'), meta["last_modified"])

    def _list_level(self, folder: str) -> obstore.ListResult[Sequence[ObjectMeta]]:
        """List one level: the objects of a folder, and its folders."""
        below = self._prefix + (f"{folder}/" if folder else "")
        listed = self._ask(lambda: obstore.list_with_delimiter(self._connection.quick, below or None), folder)
        self._bucket_seen = True
        return listed

    def _ask(self, request: Callable[[], T], name: str) -> T:
        """Do a request that changes nothing, and again where it may help."""
        return self._attempt(lambda: ask(request), name)

    def _attempt(self, action: Callable[[], T], name: str, note: Callable[[Failure], None] = lambda failure: None) -> T:
        """Do a request, and again where it may help.

        Args:
            action: The request.
            name: What is asked for, for messages.
            note: Called with each failure after which nobody knows whether it was done.
        """
        patience = Patience(self._connection.follower())
        while True:
            self._connection.check_process()
            try:
                return action()
            except OBSTORE_ERRORS as error:
                failure = read_failure(error)
            if failure.may_be_done:
                note(failure)
            if not patience.wait_after(failure):
                # Without the cause: obstore prints requests and answers whole, signatures included.
                raise self._final(failure, name) from None

    def _final(self, failure: Failure, name: str) -> StoreError:
        if failure.no_bucket:
            return self._refused(failure, name)
        where = self._at(name)
        if failure.differs:
            return ChangedObjectError(f"'{where}' is locked, or was changed meanwhile ({failure.code}).", path=where)
        if failure.missing:
            return MissingObjectError(f"'{where}' is not there.", path=where)
        return self._refused(failure, name)

    def _refused(self, failure: Failure, name: str) -> StoreError:
        return refusal(self._connection.service, self._connection.address, self._at(name), failure)

    def _changed(self, name: str) -> CheckpointChangedError:
        return CheckpointChangedError(
            f"'{self._at(name)}' was replaced or deleted while it was read. Load again.", path=self._at(name)
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
            raise self._changed(found.name)  # the service knows no conditions
        return answer.stream(_READ_BLOCK)

    def _put_whole(self, name: str, raw: memoryview) -> StoredObject:
        # What goes by the client for large bodies is tried again in there, and which of the tries failed is not told.
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
            # One is missing already. Where many go in one request, it may have hidden another one's error.
            if len(keys) > 1:
                for key in keys:
                    self._delete([key])
