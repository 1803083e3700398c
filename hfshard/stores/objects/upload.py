"""A large object on its way: parts are sent while the next ones are filled, and nobody sees it before the end."""

from __future__ import annotations

import atexit
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from mmap import mmap
from typing import TYPE_CHECKING, Final

import obstore

from hfshard._util.threads import pause
from hfshard.errors import HfshardError, StoreError
from hfshard.stores.objects.connection import Connection
from hfshard.stores.objects.failures import OBSTORE_ERRORS, read_failure
from hfshard.stores.objects.part_memory import PART_MEMORY
from hfshard.stores.objects.retrying import Patience
from hfshard.stores.objects.settings import part_bytes
from hfshard.stores.protocols import StoredObject

if TYPE_CHECKING:
    from obstore import PutResult

_PARTS_AT_ONCE: Final = 8
"""Of one object: one connection to S3 carries 50 to 100 MB/s."""
_LOOK_SECONDS: Final = 0.5
"""How often who waits for the last parts looks whether the work was cancelled."""
_ABORT_SECONDS: Final = 10.0
"""How long a caller waits for an upload to be given up; what is left then is swept by the next save."""

_OPEN: Final[weakref.WeakSet[Upload]] = weakref.WeakSet()


class _GivenUpError(Exception):
    """Raised into obstore, which then removes the parts."""


class Upload:
    """An `ObjectWriter`. An object of at most one part is kept in memory until `finish`, and then put in one request.

    obstore runs in a thread of its own, takes the parts from here and sends up to eight at once. A part's memory is
    obstore's until it is sent, and is then used again.
    """

    def __init__(
        self,
        connection: Connection,
        key: str,
        name: str,
        size: int,
        put_whole: Callable[[memoryview], StoredObject],
        find: Callable[[], StoredObject | None],
        refused: Callable[[BaseException], HfshardError],
    ) -> None:
        """Begin.

        Args:
            connection: Of the bucket.
            key: The object's name in the bucket.
            name: Its name below the store's prefix.
            size: Its bytes.
            put_whole: Puts it in one request.
            find: Finds the object of this name, after a lost answer: no other writer has the name.
            refused: The error to raise for one of obstore.
        """
        self._connection = connection
        self._key = key
        self._name = name
        self._size = size
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
            raise StoreError(f"'{self._name}' was to have {self._size} bytes and got more.", path=self._name)
        while len(rest):
            self._check()
            if self._buffer is None:
                self._buffer = PART_MEMORY.take(min(self._part_bytes, self._size - self._written))
                self._used = 0
            taken = min(len(rest), len(self._buffer) - self._used)
            self._buffer[self._used : self._used + taken] = rest[:taken]
            self._used += taken
            self._written += taken
            rest = rest[taken:]
            if self._used == len(self._buffer) and self._size > self._part_bytes:
                self._send_part()

    def finish(self) -> StoredObject:
        """Make the object; see `ObjectWriter`."""
        try:
            if self._written != self._size:
                raise StoreError(
                    f"'{self._name}' was to have {self._size} bytes and got {self._written}. Nothing was put.",
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
            PART_MEMORY.give_back(self._buffer)
            self._buffer = None
        PART_MEMORY.leave()

    def stop(self) -> None:
        """Let the thread raise into obstore when it asks for the next part."""
        self._over = True
        self._parts.put(None)

    def _check(self) -> None:
        self._connection.check_process()
        if self._over:
            raise StoreError(f"'{self._name}' was finished or given up already.", path=self._name)
        if self._error is not None:
            raise self._failed(self._error)

    def _send_part(self) -> None:
        assert self._buffer is not None
        self._parts.put(PART_MEMORY.lend(self._buffer, self._used))
        self._buffer = None
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"upload {self._name}", daemon=True)
            self._thread.start()

    def _complete(self, thread: threading.Thread) -> StoredObject:
        if self._buffer is not None:
            self._send_part()
        self._parts.put(None)
        while thread.is_alive():
            thread.join(_LOOK_SECONDS)
            pause(0)
        if self._error is not None:
            raise self._failed(self._error)
        etag = self._result["e_tag"] if self._result else None
        if etag is None:
            raise StoreError(f"'{self._name}': the upload ended without saying how.", path=self._name)
        return StoredObject(self._name, self._size, etag.strip('"'))

    def _failed(self, error: BaseException) -> HfshardError:
        """The error to raise: in words, and another one where the upload itself is gone."""
        if not isinstance(error, OBSTORE_ERRORS):
            return StoreError(f"'{self._name}' was not put: {type(error).__name__}: {error}", path=self._name)
        failure = read_failure(error)
        if failure.missing and not failure.no_bucket:
            return StoreError(
                f"The unfinished upload of '{self._name}' was removed, as a save does once it is committed: somebody "
                "else saved here meanwhile. Nothing was put.",
                path=self._name,
            )
        return self._refused(error)

    def _run(self) -> None:
        """Hand the parts to obstore, in this thread; its outcome lies in `_result` or `_error`."""
        patience = Patience(self._connection.follower())
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
                # Before the first part was asked for, nothing is lost by beginning again.
                if not self._asked and patience.wait_after(read_failure(error)):
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
        """Whether the object is there all the same: the answer to its completion was lost."""
        if self._written != self._size:
            return False
        try:
            found = self._find()
        except HfshardError:
            return False  # the first error is the one to tell
        if found is None or found.size != self._size:
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
    """Remove the parts of uploads that were left open when the interpreter ends."""
    left = list(_OPEN)
    for upload in left:
        upload.stop()
    for upload in left:
        upload.abort()


os.register_at_fork(after_in_child=_OPEN.clear)  # they are the parent's
