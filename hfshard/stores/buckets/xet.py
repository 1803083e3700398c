"""Streams of bytes to and from Xet storage, by hf_xet: nothing goes to the disk, and memory is bounded."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, TypeVar

import hf_xet

from hfshard._util.threads import ProcessLock, start_thread
from hfshard.stores.buckets.hub_calls import without_queries
from hfshard.stores.buckets.tokens import XetTokens
from hfshard.stores.buckets.turns import (
    PIECE_BYTES,
    SMALL_BYTES,
    download_turn,
    downloads_at_once,
    give_memory_back,
    upload_turn,
    uploads_at_once,
)
from hfshard.stores.memory import store_memory_bytes

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

FailureKind = Literal["access", "missing", "connection", "other"]

_STATUS: Final = re.compile(r"\((\d{3}) [A-Z]")
"""How hf_xet quotes the status of an answer: "HTTP status client error (403 Forbidden)"."""
_BLOCK_BYTES: Final = 8_000_000
"""hf_xet takes a copy of what it is given, and cuts files into blocks of this size itself."""
_FRUITLESS_STREAMS: Final = 8
"""Streams in a row that end early without a byte and without an error, after which a read fails."""


class XetFailedError(Exception):
    """hf_xet gave up; the message has no token and no signed address."""

    def __init__(self, message: str, kind: FailureKind) -> None:
        """Keep what happened, and what kind of failure it is."""
        super().__init__(message)
        self.kind: FailureKind = kind


@dataclass(frozen=True, slots=True)
class XetFile:
    """A file in Xet storage. It has no name there: the Hub gives it one."""

    hash: str
    """Of its contents."""
    size: int
    sent_bytes: int
    """Bytes that were sent for it: chunks that the storage has are not."""


class _Sessions:
    """hf_xet's session of this process: a forked child begins its own."""

    def __init__(self) -> None:
        self._lock = ProcessLock()
        self._session: Any = None
        self._made_for: tuple[int, int] | None = None

    def get(self) -> Any:
        """The session; it is made again where the limit of memory has changed."""
        wanted = (os.getpid(), store_memory_bytes())
        with self._lock.held():
            if self._made_for != wanted:
                self._session, self._made_for = _new_session(wanted[1]), wanted
            return self._session


def _new_session(memory_bytes: int) -> Any:
    """Make a session that keeps to so many bytes, and else to hf_xet's own settings (HF_XET_...)."""
    config = hf_xet.XetConfig()
    buffer, uploads = memory_bytes // 4, uploads_at_once(memory_bytes)
    most = {
        "client.ac_initial_upload_concurrency": uploads,
        "client.ac_max_upload_concurrency": uploads,
        "client.ac_max_download_concurrency": downloads_at_once(memory_bytes),
        "reconstruction.download_buffer_size": buffer,
        "reconstruction.download_buffer_perfile_size": 0,
        "reconstruction.download_buffer_limit": buffer,
        "reconstruction.min_prefetch_buffer": buffer,
    }
    limited = {name: min(value, config.get(name)) for name, value in most.items()}
    return hf_xet.XetSession(config.with_config(limited))


_SESSIONS: Final = _Sessions()


class XetUpload:
    """A file that is sent as a stream, of which the storage keeps nothing before `finish`."""

    def __init__(self, tokens: XetTokens, size: int, *, sha256: str | None = None) -> None:
        """Begin, when it is this upload's turn.

        Args:
            tokens: To write.
            size: Bytes that will be written.
            sha256: Of the contents, in hex, where it is known; repos need it, and buckets don't.

        Raises:
            XetFailedError: The storage refused, or can't be reached.
            Whatever `XetTokens.current` raises.
        """
        arguments = tokens.arguments()
        known = hf_xet.SKIP_SHA256 if sha256 is None else sha256
        self._tokens, self._size = tokens, size
        self._turn = upload_turn(size)
        self._commit: Any = None
        try:
            self._commit = self._do(lambda: _SESSIONS.get().new_upload_commit(**arguments))
            self._stream: Any = self._do(lambda: self._commit.start_upload_stream(sha256=known))
        except BaseException:
            self.abort()
            raise

    def write(self, block: memoryview) -> None:
        """Send the next bytes, which may change when this returns; raises XetFailedError."""
        for begin in range(0, len(block), _BLOCK_BYTES):
            piece = bytes(block[begin : begin + _BLOCK_BYTES])
            self._do(lambda piece=piece: self._stream.write(piece))  # type: ignore[misc]

    def finish(self) -> XetFile:
        """Have the storage keep the file; raises XetFailedError."""
        try:
            found = self._do(lambda: self._stream.finish()).xet_info
            report = self._do(lambda: self._commit.wait_to_finish())
        finally:
            self._end()
        return XetFile(str(found.hash), int(found.file_size), int(report.dedup_metrics.total_bytes_uploaded))

    def abort(self) -> None:
        """Send nothing more. What was sent has no name, and goes when the storage sweeps."""
        self._end()
        if self._commit is not None:
            self._commit.abort()

    def _end(self) -> None:
        if self._size > SMALL_BYTES:
            give_memory_back()
        self._turn.end()

    def _do(self, call: Callable[[], _Answer]) -> _Answer:
        try:
            return interruptible(lambda: _asked(call), self.abort)
        except XetFailedError as error:
            if error.kind == "access":
                self._tokens.forget()
            raise


class XetReader:
    """Reads files of one bucket or repo."""

    def __init__(self, tokens: XetTokens) -> None:
        """Ask nothing yet.

        Args:
            tokens: To read.
        """
        self._tokens = tokens
        self._lock = threading.Lock()
        self._group: Any = None
        self._session: Any = None

    def read_into(self, file_hash: str, size: int, begin: int, target: memoryview) -> None:
        """Fill memory with bytes of a file; for several threads at once.

        Args:
            file_hash: What the storage knows the file by.
            size: Of the whole file.
            begin: The first byte wanted.
            target: As many bytes as it has are read.

        Raises:
            XetFailedError: The storage refused, has no such file, can't be reached, or stopped answering.
            Whatever `XetTokens.current` raises.
        """
        for at in range(0, len(target), PIECE_BYTES):
            piece = target[at : at + PIECE_BYTES]
            turn = download_turn(len(piece))
            try:
                self._read_piece((file_hash, size), begin + at, piece)
            finally:
                turn.end()

    def _read_piece(self, file: tuple[str, int], begin: int, piece: memoryview) -> None:
        """Read what one stream brings; once more where that may help, by a new group and with a new token.

        One stream that fails can spoil all others of its group, and hf_xet asks for a new token by the clock alone.
        """
        for is_last in (False, True):
            group = self._current_group()
            try:
                interruptible(partial(_asked, partial(_fill, group, file, begin, piece)), partial(self._abort, group))
            except XetFailedError as error:
                self._forget(group)
                if error.kind in ("access", "other"):
                    self._tokens.forget()
                if is_last and error.kind == "other":  # what failed is lost in hf_xet: "Data sender was dropped"
                    raise XetFailedError(f"it stopped sending ({error})", "connection") from error
                if is_last or error.kind not in ("access", "other"):
                    raise
            else:
                return

    def _current_group(self) -> Any:
        arguments = self._tokens.arguments()
        session = _SESSIONS.get()
        with self._lock:
            if self._session is not session:
                self._group = _asked(lambda: session.new_download_stream_group(**arguments))
                self._session = session
            return self._group

    def _forget(self, group: Any) -> None:
        with self._lock:
            if self._group is group:
                self._group = self._session = None

    def _abort(self, group: Any) -> None:
        self._forget(group)
        group.abort()


def _fill(group: Any, file: tuple[str, int], begin: int, target: memoryview) -> None:
    """Fill memory; what a stream did not bring is asked for again, and no more than that.

    hf_xet 1.8 loses about every second error: the stream just ends. So what counts is the number of bytes.
    """
    info = hf_xet.XetFileInfo(*file)
    at = fruitless = 0
    while at < len(target):
        before = at
        try:
            for block in group.download_stream(info, start=begin + at, end=begin + len(target)):
                target[at : at + len(block)] = block
                at += len(block)
        except (OSError, RuntimeError) as error:
            if at == before or _kind_of(error) != "connection":
                raise
            logger.info("A stream from Xet storage broke off after %d bytes: %s", at, without_queries(str(error)))
        fruitless = fruitless + 1 if at == before else 0
        if fruitless == _FRUITLESS_STREAMS:
            raise RuntimeError(f"its streams end after {at} of {len(target)} bytes, and do not say why")


def interruptible(call: Callable[[], _Answer], cancel: Callable[[], object]) -> _Answer:
    """Make a call of hf_xet that Ctrl-C ends: it holds up the main thread otherwise, as long as the network does.

    Args:
        call: What to do; in another thread if this is the main one.
        cancel: Makes the call return soon.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    future = start_thread(call, "hfshard-xet", daemon=True)
    if future is None:
        return call()
    try:
        return future.result()
    except BaseException:
        if not future.done():
            cancel()
            wait([future])
        raise


def _asked(call: Callable[[], _Answer]) -> _Answer:
    """Make a call of hf_xet; raises XetFailedError, whose message keeps secrets."""
    try:
        return call()
    except (OSError, RuntimeError, ValueError) as error:
        message = without_queries(str(error)) or type(error).__name__
        kind = _kind_of(error)
    raise XetFailedError(message, kind)


def _kind_of(error: Exception) -> FailureKind:
    status = {int(found) for found in _STATUS.findall(str(error))}
    if isinstance(error, PermissionError) or status & {401, 403}:
        return "access"
    if isinstance(error, FileNotFoundError) or 404 in status:
        return "missing"
    if isinstance(error, ConnectionError | TimeoutError) or any(code == 429 or code >= 500 for code in status):
        return "connection"
    return "other"
