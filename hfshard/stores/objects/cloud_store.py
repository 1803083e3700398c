"""A `Store` over obstore: names below a prefix, conditions, ranges, and what to do when an answer is lost."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Final, TypeVar

import obstore

from hfshard._util.addresses import StoreAddress
from hfshard.errors import (
    ChangedObjectError,
    CheckpointChangedError,
    HfshardError,
    MissingObjectError,
    StaleObjectError,
    StoreConnectionError,
    StoreError,
)
from hfshard.stores.memory import store_memory_bytes
from hfshard.stores.objects.connecting import connection_to
from hfshard.stores.objects.connection import refusal
from hfshard.stores.objects.failures import OBSTORE_ERRORS, Failure, read_failure
from hfshard.stores.objects.retrying import Patience, ask
from hfshard.stores.objects.upload import TOKEN, Upload
from hfshard.stores.protocols import ANYTHING, Anything, ObjectWriter, StoredObject

if TYPE_CHECKING:
    from obstore import GetOptions, ObjectMeta, PutMode

    from hfshard.stores.objects.connection import Client

_READ_BLOCK: Final = 1 << 20
"""Bytes that are gathered before they are copied: few calls, and little memory."""
_BODY_BYTES: Final = 1 << 20
"""A put of more bytes may take longer than the service may be silent."""

LARGEST_COPY: Final = 5 << 30
"""Bytes that S3 copies in one request."""

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

    @property
    def has_conditional_put(self) -> bool:
        """True."""
        return True

    @property
    def has_content_etags(self) -> bool:
        """Whether an object that gets its old bytes again gets its old ETag again: S3 and GCS."""
        return self._connection.service.has_content_etags

    def list_objects(self, folder: str = "") -> dict[str, StoredObject]:
        """List all objects below a folder; see `Store`."""
        below = self._prefix + (f"{folder}/" if folder else "")
        listed = self._ask(lambda: obstore.list(self._connection.quick, below or None).collect(), folder)
        self._bucket_seen = True
        # A folder that was made by hand is an object, too: "prefix/", which the client lists as "prefix"; and
        # "prefix/code/", listed as an empty "prefix/code".
        found = [self._stored(meta) for meta in listed if meta["path"].startswith(self._prefix)]
        above = {"/".join(parts[:end]) for parts in (one.name.split("/") for one in found) for end in range(len(parts))}
        return {one.name: one for one in found if one.size or one.name not in above}

    def folders(self) -> list[str]:
        """Name the folders directly below the prefix; see `Store`."""
        listed = self._ask(lambda: obstore.list_with_delimiter(self._connection.quick, self._prefix or None), "")
        self._bucket_seen = True
        return sorted(folder.removeprefix(self._prefix).rstrip("/") for folder in listed["common_prefixes"])

    def find(self, name: str) -> StoredObject | None:
        """Ask for one object; see `Store`."""
        try:
            return self._stored(self._ask(lambda: obstore.head(self._connection.quick, self._key(name)), name))
        except MissingObjectError:
            if not self._bucket_seen:
                self.folders()  # an answer without a body does not say what is missing: the bucket, perhaps
            return None

    def read_into(self, found: StoredObject, begin: int, target: memoryview) -> None:
        """Fill memory with the bytes of an object from `begin` on; see `Store`."""
        filled = 0
        patience = Patience()
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

    def put(self, name: str, raw: bytes, condition: StoredObject | Anything | None = ANYTHING) -> StoredObject:
        """Put a small object, whole or not at all; see `Store`."""
        if isinstance(condition, Anything):
            return self._put_whole(name, memoryview(raw))
        try:
            return self._put_if(name, raw, condition)
        except StaleObjectError:
            if condition is None or not self._has_new_generation(condition):
                raise
        return self._put_if(name, raw, condition)

    def open_writer(self, name: str, size: int) -> ObjectWriter:
        """Begin a large object of so many bytes; see `Store`."""
        token = secrets.token_hex(16)
        return Upload(
            self._connection,
            self._key(name),
            name,
            size,
            token,
            put_whole=lambda raw: self._put_whole(name, raw),
            find_own=lambda: self._find_own(name, token),
            refused=lambda error: self._refused(read_failure(error), name),
        )

    def copy(self, source: StoredObject, target: str) -> None:
        """Copy an object on the server; see `Store`."""
        in_parts = self._connection.copy_in_parts
        if in_parts is not None and source.size > LARGEST_COPY:
            if not in_parts(self._key(source.name), source.etag, source.size, self._key(target)):
                raise self._changed(source.name)
        else:
            self._copy_whole(source.name, target)
        # obstore's copies have no condition, so the source must be the same one afterwards still.
        after = self.find(source.name)
        if after is None or after.etag != source.etag:
            self.delete([target])
            raise self._changed(source.name)

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

    def _key(self, name: str) -> str:
        return self._prefix + name

    def _at(self, name: str) -> str:
        return str(self._address.joined(name)) if name else str(self._address)

    def _stored(self, meta: ObjectMeta) -> StoredObject:
        name = meta["path"].removeprefix(self._prefix)
        etag = (meta["e_tag"] or "").strip('"')
        if meta["version"] is not None:
            self._connection.generations.note(meta["path"], etag, meta["version"])
        return StoredObject(name, meta["size"], etag, meta["last_modified"])

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
        patience = Patience()
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
        return self._put(name, raw, "overwrite", None)

    def _put(
        self,
        name: str,
        raw: memoryview,
        mode: PutMode,
        token: str | None,
        note: Callable[[Failure], None] = lambda failure: None,
    ) -> StoredObject:
        client = self._client_for(len(raw))
        attributes = {TOKEN: token} if token else None
        result = self._attempt(
            lambda: obstore.put(client, self._key(name), raw, mode=mode, attributes=attributes, use_multipart=False),
            name,
            note,
        )
        etag = (result["e_tag"] or "").strip('"')
        if result["version"] is not None:
            self._connection.generations.note(self._key(name), etag, result["version"])
        return StoredObject(name, len(raw), etag)

    def _put_if(self, name: str, raw: bytes, condition: StoredObject | None) -> StoredObject:
        token = secrets.token_hex(16)
        doubts: list[Failure] = []
        try:
            mode = self._mode(condition)
            return self._put(name, memoryview(raw), mode, token, doubts.append)
        except (ChangedObjectError, MissingObjectError):
            # The client for large bodies does not tell of what it tried again: its first try may have been done.
            may_be_own = doubts or self._client_for(len(raw)) is self._connection.uploads
            own = self._find_own(name, token) if may_be_own else None
            if own is None:
                raise StaleObjectError(
                    f"'{self._at(name)}' is not what it was when it was looked at: somebody else was faster. Nothing "
                    "was put.",
                    path=self._at(name),
                ) from None
            return own
        except StoreError as error:
            if not doubts:
                raise
            return self._in_doubt(name, token, error)

    def _has_new_generation(self, condition: StoredObject) -> bool:
        """Whether an object has its bytes, but not the generation by which this process knew them."""
        known, key = self._connection.generations, self._key(condition.name)
        before = known.find(key, condition.etag)
        if before is None:
            return False
        known.forget(key)
        self.find(condition.name)
        return known.find(key, condition.etag) not in (None, before)

    def _client_for(self, count_bytes: int) -> Client:
        """The client for a put of so many bytes."""
        return self._connection.uploads if count_bytes > _BODY_BYTES else self._connection.quick

    def _mode(self, condition: StoredObject | None) -> PutMode:
        if condition is None:
            return "create"
        if not self._connection.service.has_generations:
            return {"e_tag": f'"{condition.etag}"'}
        known = self._connection.generations
        key = self._key(condition.name)
        generation = known.find(key, condition.etag)
        if generation is None:
            self.find(condition.name)
            generation = known.find(key, condition.etag)
            if generation is None:
                raise ChangedObjectError(f"'{self._at(condition.name)}' was changed meanwhile.")
        return {"e_tag": f'"{condition.etag}"', "version": generation}

    def _find_own(self, name: str, token: str) -> StoredObject | None:
        """Find an object if it is the one that was put with this token."""
        options: GetOptions = {"head": True}
        try:
            answer = self._ask(lambda: obstore.get(self._connection.quick, self._key(name), options=options), name)
        except MissingObjectError:
            return None
        return self._stored(answer.meta) if answer.attributes.get(TOKEN) == token else None

    def _in_doubt(self, name: str, token: str, error: StoreError) -> StoredObject:
        """Find out whether an object was put, after the last try failed."""
        try:
            own = self._find_own(name, token)
        except StoreError:
            raise StoreError(
                f"Nobody can tell whether '{self._at(name)}' was put: {error.message}", path=self._at(name)
            ) from error
        if own is None:
            raise error
        return own

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
