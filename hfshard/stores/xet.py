"""hf_xet within the memory that is allowed: its session, its failures, and its streams up and down."""

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

from hfshard._util.text import without_url_secrets
from hfshard._util.threads import ProcessLock, cancellation, start_thread
from hfshard.stores.byte_budget import (
    PIECE_BYTES,
    SMALL_BYTES,
    download_turn,
    downloads_at_once,
    give_memory_back,
    store_memory_bytes,
    upload_turn,
    uploads_at_once,
)
from hfshard.stores.xet_tokens import XetTokens

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

FailureKind = Literal["access", "missing", "connection", "other"]

_STATUS: Final = re.compile(r"\((\d{3}) [A-Z]")
"""How hf_xet quotes the status of an answer: "HTTP status client error (403 Forbidden)"."""

_LOOK_SECONDS: Final = 0.2
"""How often who waits for hf_xet looks whether it shall end."""


class XetFailedError(Exception):
    """hf_xet gave up; the message has no token and no signed address."""

    def __init__(self, message: str, kind: FailureKind) -> None:
        """Keep what happened, and what kind of failure it is."""
        super().__init__(message)
        self.kind: FailureKind = kind


class _Sessions:
    """hf_xet's sessions of this process, one for each limit of memory: a forked child begins its own."""

    def __init__(self) -> None:
        self._lock = ProcessLock()
        self._sessions: dict[tuple[int, int], Any] = {}

    def get(self, memory_bytes: int | None = None) -> Any:
        """The session that keeps to so many bytes; None: to those of all transfers."""
        wanted = (os.getpid(), memory_bytes or store_memory_bytes())
        with self._lock.held():
            if wanted not in self._sessions:
                self._sessions[wanted] = _new_session(wanted[1])
            return self._sessions[wanted]

    def renew(self) -> None:
        """Let what comes next have sessions of its own: one in which a call was cancelled may refuse all others."""
        with self._lock.held():
            self._sessions = {}


def _new_session(memory_bytes: int) -> Any:
    """Make a session that keeps to so many bytes, and else to hf_xet's own settings (HF_XET_...)."""
    config = hf_xet.XetConfig()
    most = session_limits(memory_bytes)
    known = most.keys() & set(config.keys())
    if known != most.keys():
        logger.warning("hf_xet does not know %s: it may take more memory.", sorted(most.keys() - known))
    limited = {name: min(most[name], config.get(name)) for name in known}
    return hf_xet.XetSession(config.with_config(limited))


def session_limits(memory_bytes: int) -> dict[str, int]:
    """The most that the settings of a session may be, by their names in hf_xet's configuration."""
    buffer = memory_bytes // 4
    uploads, downloads = uploads_at_once(memory_bytes), downloads_at_once(memory_bytes)
    return {
        "client.ac_min_upload_concurrency": 1,
        "client.ac_initial_upload_concurrency": uploads,
        "client.ac_max_upload_concurrency": uploads,
        "client.ac_min_download_concurrency": 1,
        "client.ac_initial_download_concurrency": downloads,
        "client.ac_max_download_concurrency": downloads,
        "reconstruction.download_buffer_size": buffer,
        "reconstruction.download_buffer_perfile_size": 0,
        "reconstruction.download_buffer_limit": buffer,
        "reconstruction.min_prefetch_buffer": buffer,
    }


SESSIONS: Final = _Sessions()


def interruptible(call: Callable[[], _Answer], cancel: Callable[[], object]) -> _Answer:
    """Make a call of hf_xet that Ctrl-C ends: it holds up its thread otherwise, as long as the network does.

    Args:
        call: What to do; in another thread if this is the main one, or one that works for it, where it may go on after
            Ctrl-C.
        cancel: Makes the call return soon, and do no harm until it does.

    Raises:
        InterruptedError: In a thread of `in_threads`: another item failed, or Ctrl-C came.
    """
    cancelled = cancellation()
    if cancelled is None and threading.current_thread() is not threading.main_thread():
        return call()
    future = start_thread(call, "hfshard-xet", daemon=True)
    if future is None:
        return call()
    try:
        # Not without end in the main thread either: it may not notice a signal that another thread was woken for.
        while not wait([future], _LOOK_SECONDS).done:
            if cancelled is not None and cancelled.is_set():
                raise InterruptedError("another item failed, or Ctrl-C came")
        return future.result()
    except BaseException:
        if not future.done():
            SESSIONS.renew()
            cancel()
        raise


def asked(call: Callable[[], _Answer]) -> _Answer:
    """Make a call of hf_xet; raises XetFailedError, whose message keeps secrets."""
    try:
        return call()
    except (OSError, RuntimeError, ValueError) as error:
        message = without_url_secrets(str(error)) or type(error).__name__
        kind = kind_of(error)
    raise XetFailedError(message, kind)


def kind_of(error: Exception) -> FailureKind:
    """What kind of failure an error of hf_xet is, by its class and the status that it quotes."""
    status = {int(found) for found in _STATUS.findall(str(error))}
    if isinstance(error, PermissionError) or status & {401, 403}:
        return "access"
    if isinstance(error, FileNotFoundError) or 404 in status:
        return "missing"
    if isinstance(error, ConnectionError | TimeoutError) or any(code == 429 or code >= 500 for code in status):
        return "connection"
    return "other"


# Files that go to Xet storage as streams: nothing goes to the disk, and memory is bounded.


_BLOCK_BYTES: Final = 8_000_000
"""hf_xet takes a copy of what it is given, and cuts files into blocks of this size itself."""


@dataclass(frozen=True, slots=True)
class XetFile:
    """A file in Xet storage. It has no name there: the Hub gives it one."""

    hash: str
    """Of its contents."""
    size: int


class XetCommit:
    """Files that are sent together; the storage keeps none of them before `finish`, and none if one fails.

    What is new in all of them goes in common blocks, and they are registered by one request.
    """

    def __init__(
        self, tokens: XetTokens, total_bytes: int, *, at_once: int = 1, memory_bytes: int | None = None
    ) -> None:
        """Begin, when it is this commit's turn.

        Args:
            tokens: To write.
            total_bytes: Of all files that will be sent.
            at_once: Large files that will be sent at once: that many turns are taken.
            memory_bytes: That all transfers may take; None: `store_memory_bytes`.

        Raises:
            XetFailedError: The storage refused, or can't be reached.
            Whatever `XetTokens.current` raises.
        """
        arguments = tokens.arguments()
        self._tokens, self._total_bytes = tokens, total_bytes
        memory_bytes = memory_bytes or store_memory_bytes()
        self._turns = [upload_turn(total_bytes, memory_bytes) for _ in range(at_once)]
        self._commit: Any = None
        try:
            self._commit = self.do(lambda: SESSIONS.get(memory_bytes).new_upload_commit(**arguments))
        except BaseException:
            self.abort()
            raise

    def open(self, *, sha256: str | None = None) -> XetStream:
        """Begin a file; several threads may each send one.

        Args:
            sha256: Of the contents, in hex, where it is known; repos need it, and buckets don't.

        Raises:
            XetFailedError: Something went wrong with this file or another one.
        """
        known = hf_xet.SKIP_SHA256 if sha256 is None else sha256
        return XetStream(self, self.do(lambda: self._commit.start_upload_stream(sha256=known)))

    def finish(self) -> int:
        """Have the storage keep the files, whose streams have ended.

        Returns:
            Bytes that were sent: chunks that the storage has are not.

        Raises:
            XetFailedError: It keeps none of them.
        """
        try:
            report = self.do(lambda: self._commit.wait_to_finish())
        finally:
            self._end()
        return int(report.dedup_metrics.total_bytes_uploaded)

    def abort(self) -> None:
        """Send nothing more. What was sent has no name, and goes when the storage sweeps."""
        self._end()
        if self._commit is not None:
            self._commit.abort()

    def do(self, call: Callable[[], _Answer]) -> _Answer:
        """Make a call of hf_xet, which Ctrl-C ends; raises XetFailedError."""
        try:
            return interruptible(lambda: asked(call), self.abort)
        except XetFailedError as error:
            if error.kind == "access":
                self._tokens.forget()
            raise

    def _end(self) -> None:
        if self._total_bytes > SMALL_BYTES:
            give_memory_back()
        for turn in self._turns:
            turn.end()


class XetStream:
    """One file of a commit."""

    def __init__(self, commit: XetCommit, stream: Any) -> None:
        """Keep what takes the bytes."""
        self._commit, self._stream = commit, stream
        self._written = 0

    def write(self, block: memoryview) -> None:
        """Send the next bytes, which may change when this returns; raises XetFailedError."""
        for begin in range(0, len(block), _BLOCK_BYTES):
            piece = bytes(block[begin : begin + _BLOCK_BYTES])
            self._commit.do(lambda piece=piece: self._stream.write(piece))  # type: ignore[misc]
            self._written += len(piece)

    def finish(self) -> XetFile:
        """End the file; raises XetFailedError."""
        found = self._commit.do(lambda: self._stream.finish()).xet_info
        if self._written > SMALL_BYTES:
            give_memory_back()
        return XetFile(str(found.hash), int(found.file_size))


class XetUpload:
    """A file that is sent alone; otherwise as `XetCommit` and `XetStream`, which see."""

    def __init__(self, tokens: XetTokens, size: int) -> None:
        """Begin, when it is this upload's turn."""
        self._commit = XetCommit(tokens, size)
        try:
            self._stream = self._commit.open()
        except BaseException:
            self._commit.abort()
            raise

    def write(self, block: memoryview) -> None:
        """Send the next bytes."""
        self._stream.write(block)

    def finish(self) -> XetFile:
        """Have the storage keep the file."""
        found = self._stream.finish()
        self._commit.finish()
        return found

    def abort(self) -> None:
        """Send nothing more."""
        self._commit.abort()


# Bytes of files in Xet storage, read as streams straight into memory.


_FRUITLESS_STREAMS: Final = 8
"""Streams in a row that end early without a byte and without an error, after which a read fails."""


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
            group, target = self._current_group(), _Target(piece)
            call = partial(asked, partial(_fill, group, file, begin, target))
            try:
                interruptible(call, partial(self._abort, group, target))
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
        session = SESSIONS.get()
        with self._lock:
            if self._session is not session:
                self._group = asked(lambda: session.new_download_stream_group(**arguments))
                self._session = session
            return self._group

    def _forget(self, group: Any) -> None:
        with self._lock:
            if self._group is group:
                self._group = self._session = None

    def _abort(self, group: Any, target: _Target) -> None:
        target.take_away()
        self._forget(group)
        group.abort()


class _Target:
    """Memory that is being filled, until it is taken away."""

    def __init__(self, memory: memoryview) -> None:
        self._lock = threading.Lock()
        self._memory: memoryview | None = memory
        self.size = len(memory)
        self.filled = 0

    def put(self, block: bytes) -> None:
        with self._lock:
            if self._memory is None:
                raise RuntimeError("the read was interrupted")
            self._memory[self.filled : self.filled + len(block)] = block
            self.filled += len(block)

    def take_away(self) -> None:
        """Leave the memory to its owner: a stream that goes on for a while does not touch it any more."""
        with self._lock:
            self._memory = None


def _fill(group: Any, file: tuple[str, int], begin: int, target: _Target) -> None:
    """Fill memory; what a stream did not bring is asked for again, and no more than that.

    hf_xet 1.8 loses about every second error: the stream just ends. So what counts is the number of bytes.
    """
    info = hf_xet.XetFileInfo(*file)
    fruitless = 0
    while target.filled < target.size:
        before = target.filled
        try:
            for block in group.download_stream(info, start=begin + before, end=begin + target.size):
                target.put(block)
        except (OSError, RuntimeError) as error:
            if target.filled == before or kind_of(error) != "connection":
                raise
            logger.info(
                "A stream from Xet broke off after %d bytes: %s", target.filled, without_url_secrets(str(error))
            )
        fruitless = fruitless + 1 if target.filled == before else 0
        if fruitless == _FRUITLESS_STREAMS:
            raise RuntimeError(f"its streams end after {before} of {target.size} bytes, and do not say why")
