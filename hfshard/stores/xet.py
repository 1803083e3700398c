"""hf_xet within the memory budget: its sessions, its failures, and its upload and download streams."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, TypeVar

import hf_xet

from hfshard._util.text import without_url_secrets
from hfshard._util.threads import ForkSafeLock, current_cancellation, result_unless_cancelled, start_worker
from hfshard.stores.byte_budget import ByteBudget, store_memory_bytes
from hfshard.stores.hub_calls import XetTokens
from hfshard.stores.retry import Retry

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

FailureKind = Literal["access", "missing", "connection", "other"]

_STATUS: Final = re.compile(r"\((\d{3}) [A-Z]")
"""The status of a response as hf_xet quotes it: "HTTP status client error (403 Forbidden)"."""


class XetFailedError(Exception):
    """Failure of hf_xet after its retries; the message has no token and no signed URL."""

    def __init__(self, message: str, kind: FailureKind) -> None:
        super().__init__(message)
        self.kind: FailureKind = kind


class _Sessions:
    """hf_xet's sessions of this process, one per memory limit; a forked child creates its own."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._sessions: dict[tuple[int, int], Any] = {}

    def get(self, memory_bytes: int | None = None) -> Any:
        """Return the session that is limited to `memory_bytes`; None: to the budget of all transfers."""
        wanted = (os.getpid(), memory_bytes or store_memory_bytes())
        with self._lock.held():
            if wanted not in self._sessions:
                self._sessions[wanted] = _new_session(wanted[1])
            return self._sessions[wanted]

    def renew(self) -> None:
        """Use new sessions from now on: one in which a call was cancelled can refuse all others."""
        with self._lock.held():
            self._sessions = {}


def _new_session(memory_bytes: int) -> Any:
    """Create a session limited to `memory_bytes`, otherwise with hf_xet's own settings (HF_XET_...)."""
    config = hf_xet.XetConfig()
    most = session_limits(memory_bytes)
    known = most.keys() & set(config.keys())
    if known != most.keys():
        logger.warning("hf_xet does not support %s, so it may use more memory.", sorted(most.keys() - known))
    limited = {name: min(most[name], config.get(name)) for name in known}
    return hf_xet.XetSession(config.with_config(limited))


def session_limits(memory_bytes: int) -> dict[str, int]:
    """Return the upper limits of a session's settings, by their names in hf_xet's configuration."""
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
    """Make a call of hf_xet that Ctrl-C ends; otherwise it blocks its thread as long as the network does.

    Args:
        call: The call. From the main thread, or one that works for it, it runs in another thread, where it can continue
            after Ctrl-C.
        cancel: Make the call return soon, and do no harm until it does.

    Raises:
        InterruptedError: In a thread of `run_in_threads`: another item failed, or Ctrl-C came.
    """
    if current_cancellation() is None and threading.current_thread() is not threading.main_thread():
        return call()
    future = start_worker(call, "hfshard-xet", daemon=True)
    if future is None:
        return call()
    try:
        return result_unless_cancelled(future)
    except BaseException:
        if not future.done():
            SESSIONS.renew()
            cancel()
        raise


def call_xet(call: Callable[[], _Answer]) -> _Answer:
    """Make a call of hf_xet; raises XetFailedError, whose message reveals no secrets."""
    try:
        return call()
    except (OSError, RuntimeError, ValueError) as error:
        message = without_url_secrets(str(error)) or type(error).__name__
        kind = failure_kind(error)
    raise XetFailedError(message, kind)


def failure_kind(error: Exception) -> FailureKind:
    """Classify an error of hf_xet by its class and the status that it quotes."""
    status = {int(found) for found in _STATUS.findall(str(error))}
    if isinstance(error, PermissionError) or status & {401, 403}:
        return "access"
    if isinstance(error, FileNotFoundError) or 404 in status:
        return "missing"
    if isinstance(error, ConnectionError | TimeoutError) or any(code == 429 or code >= 500 for code in status):
        return "connection"
    return "other"


# Memory that hf_xet's transfers use: it limits how many run at once, which hf_xet itself does not.


_UPLOADS: Final = ByteBudget()
_DOWNLOADS: Final = ByteBudget()

UPLOAD_BYTES: Final = 170 * 2**20
"""The most memory one stream uses: 64 MB gathered, and 64 MB packed and sent (measured: up to 165)."""
_SESSION_BYTES: Final = 100 * 2**20
"""Memory that hf_xet uses in addition (measured: 93)."""
SMALL_BYTES: Final = 8_000_000
"""The most bytes of a transfer that takes nothing from the budget."""
PIECE_BYTES: Final = 16 * 2**20
"""Bytes that one stream downloads: hf_xet returns them in blocks of up to 64 MB, each of which exists twice."""
BLOCK_BYTES: Final = 64 * 2**20
"""Bytes that hf_xet gathers from a commit's files before it sends them as a block."""
_PIECE_SHARE: Final = 64 * 2**20
"""Memory that one piece uses: sent, unpacked, and passed to Python."""


def uploads_at_once(memory_bytes: int) -> int:
    """Return the number of large uploads that fit this much memory; one is always allowed."""
    return max(1, (memory_bytes - _SESSION_BYTES) // UPLOAD_BYTES)


def commit_streams(sizes: Collection[int], memory_bytes: int) -> int:
    """Return how many files of one commit this much memory allows at once; 0 if they cannot share a commit.

    The rest of a file that does not fill a block waits in memory for the next file, which gathers a block of its own.
    If no file is larger than a block, this uses no more than one large file (measured: 255 MB at most; a file of 300 MB
    alone 255 MB, and two in one commit 282 MB).
    """
    at_once = max(0, memory_bytes - _SESSION_BYTES - BLOCK_BYTES) // UPLOAD_BYTES
    return max(at_once, int(len(sizes) == 1 or max(sizes) <= BLOCK_BYTES))


def upload_commits(sizes: Sequence[int], memory_bytes: int) -> list[list[int]]:
    """Divide files into the fewest commits that fit this much memory: one, or one per large file and one for the rest.

    Returns:
        The file numbers of each commit.
    """
    every = list(range(len(sizes)))
    if not every or commit_streams(sizes, memory_bytes):
        return [every] if every else []
    small = [number for number in every if sizes[number] <= BLOCK_BYTES]
    return [*([number] for number in every if sizes[number] > BLOCK_BYTES), *([small] if small else [])]


def downloads_at_once(memory_bytes: int) -> int:
    """Return the number of pieces that fit this much memory; one is always allowed."""
    return max(1, memory_bytes // _PIECE_SHARE)


def trim_heap() -> None:
    """Return freed memory to the system, if the C library supports it.

    glibc keeps freed memory for the thread that used it: six files, one after another in six threads, use 540 MB
    without this, and 231 MB with it.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


# Uploads to Xet storage as streams: nothing is written to disk, and memory is bounded.


_BLOCK_BYTES: Final = 8_000_000
"""Bytes per write: hf_xet copies what it is given, and itself splits files into blocks of this size."""


@dataclass(frozen=True, slots=True)
class XetFile:
    """A file in Xet storage. It has no name there until the Hub gives it one."""

    hash: str
    """Hash of its contents."""
    size: int


class XetCommit:
    """Files that are sent together; the storage keeps none of them before `finish`, and none if one fails.

    Their new contents share blocks, and one request registers them.
    """

    def __init__(
        self, tokens: XetTokens, total_bytes: int, *, at_once: int = 1, memory_bytes: int | None = None
    ) -> None:
        """Wait until this commit's memory is free, and begin.

        Args:
            tokens, total_bytes: Tokens to write, and the bytes of all files that will be sent.
            at_once: Number of large files that will be sent at once; each takes its share of the memory.
            memory_bytes: Memory that all transfers may use; None: `store_memory_bytes`.

        Raises:
            XetFailedError: The storage refused, or cannot be reached.
            Whatever `XetTokens.current` raises.
        """
        arguments = tokens.arguments()
        self._tokens, self._total_bytes = tokens, total_bytes
        memory_bytes = memory_bytes or store_memory_bytes()
        share_bytes = UPLOAD_BYTES if total_bytes > SMALL_BYTES else 0
        self._shares = [_UPLOADS.take(share_bytes, memory_bytes - _SESSION_BYTES) for _ in range(at_once)]
        self._commit: Any = None
        try:
            self._commit = self.do(lambda: SESSIONS.get(memory_bytes).new_upload_commit(**arguments))
        except BaseException:
            self.abort()
            raise

    def open(self, *, sha256: str | None = None) -> XetStream:
        """Begin a file; several threads may each send one.

        Args:
            sha256: The contents' SHA-256 in hex, if it is known; repos need it, and buckets do not.

        Raises:
            XetFailedError: This file or another one failed.
        """
        known = hf_xet.SKIP_SHA256 if sha256 is None else sha256
        return XetStream(self, self.do(lambda: self._commit.start_upload_stream(sha256=known)))

    def finish(self) -> int:
        """Commit the files, whose streams must have ended, to the storage.

        Returns:
            Bytes that were sent; chunks that the storage already has are not.

        Raises:
            XetFailedError: The storage keeps none of the files.
        """
        try:
            report = self.do(lambda: self._commit.wait_to_finish())
        finally:
            self._end()
        return int(report.dedup_metrics.total_bytes_uploaded)

    def abort(self) -> None:
        """Send nothing more. What was sent has no name, and the storage's sweep removes it."""
        self._end()
        if self._commit is not None:
            self._commit.abort()

    def do(self, call: Callable[[], _Answer]) -> _Answer:
        """Make a call of hf_xet that Ctrl-C ends; raises XetFailedError."""
        try:
            return interruptible(lambda: call_xet(call), self.abort)
        except XetFailedError as error:
            if error.kind == "access":
                self._tokens.forget()
            raise

    def _end(self) -> None:
        if self._total_bytes > SMALL_BYTES:
            trim_heap()
        for share in self._shares:
            share.end()


class XetStream:
    """One file of a commit."""

    def __init__(self, commit: XetCommit, stream: Any) -> None:
        self._commit, self._stream = commit, stream
        self._written = 0

    def write(self, block: memoryview) -> None:
        """Send the next bytes; the caller can reuse their memory on return; raises XetFailedError."""
        for begin in range(0, len(block), _BLOCK_BYTES):
            piece = bytes(block[begin : begin + _BLOCK_BYTES])
            self._commit.do(lambda piece=piece: self._stream.write(piece))  # type: ignore[misc]
            self._written += len(piece)

    def finish(self) -> XetFile:
        """End the file; raises XetFailedError."""
        found = self._commit.do(lambda: self._stream.finish()).xet_info
        if self._written > SMALL_BYTES:
            trim_heap()
        return XetFile(str(found.hash), int(found.file_size))


# Downloads from Xet storage as streams, straight into memory.


_FRUITLESS_STREAMS: Final = 8
"""Number of consecutive streams without a byte and without an error after which a read fails."""


class XetReader:
    """Reader of one bucket's or repo's files."""

    def __init__(self, tokens: XetTokens) -> None:
        self._tokens = tokens
        self._lock = threading.Lock()
        self._group: Any = None
        self._session: Any = None

    def read_into(self, file_hash: str, size: int, begin: int, target: memoryview) -> None:
        """Fill memory with a file's bytes from `begin` on. Several threads can read at once.

        Raises:
            XetFailedError: The storage refused, has no such file, cannot be reached, or stopped responding.
            Whatever `XetTokens.current` raises.
        """
        for at in range(0, len(target), PIECE_BYTES):
            piece = target[at : at + PIECE_BYTES]
            share_bytes = _PIECE_SHARE if len(piece) > SMALL_BYTES else 0
            with _DOWNLOADS.take(share_bytes, store_memory_bytes()):
                self._read_piece((file_hash, size), begin + at, piece)

    def _read_piece(self, file: tuple[str, int], begin: int, piece: memoryview) -> None:
        """Read one stream's piece; retry once, if that may help, with a new group and a new token.

        A failed stream can break all others of its group, and hf_xet requests a new token only by the clock.
        """
        retry = Retry(attempts=2)
        while True:
            group, target = self._current_group(), _Target(piece)
            call = partial(call_xet, partial(_fill, group, file, begin, target))
            try:
                interruptible(call, partial(self._abort, group, target))
            except XetFailedError as error:
                self._forget(group)
                if error.kind not in ("access", "other"):
                    raise
                self._tokens.forget()
                if retry.wait():
                    continue
                if error.kind == "other":  # what failed is lost in hf_xet: "Data sender was dropped"
                    raise XetFailedError(f"it stopped sending ({error})", "connection") from error
                raise
            else:
                return

    def _current_group(self) -> Any:
        arguments = self._tokens.arguments()
        session = SESSIONS.get()
        with self._lock:
            if self._session is not session:
                self._group = call_xet(lambda: session.new_download_stream_group(**arguments))
                self._session = session
            return self._group

    def _forget(self, group: Any) -> None:
        with self._lock:
            if self._group is group:
                self._group = self._session = None

    def _abort(self, group: Any, target: _Target) -> None:
        target.detach()
        self._forget(group)
        group.abort()


class _Target:
    """Memory that is being filled until it is taken away."""

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

    def detach(self) -> None:
        """Return the memory to its owner, so that a stream that continues for a while no longer writes to it."""
        with self._lock:
            self._memory = None


def _fill(group: Any, file: tuple[str, int], begin: int, target: _Target) -> None:
    """Fill memory, requesting again only the bytes that a stream did not deliver.

    hf_xet 1.8 loses about every second error: the stream just ends. So the number of bytes decides.
    """
    info = hf_xet.XetFileInfo(*file)
    fruitless = 0
    while target.filled < target.size:
        before = target.filled
        try:
            for block in group.download_stream(info, start=begin + before, end=begin + target.size):
                target.put(block)
        except (OSError, RuntimeError) as error:
            if target.filled == before or failure_kind(error) != "connection":
                raise
            logger.info(
                "A Xet stream was interrupted after %d bytes: %s", target.filled, without_url_secrets(str(error))
            )
        fruitless = fruitless + 1 if target.filled == before else 0
        if fruitless == _FRUITLESS_STREAMS:
            raise RuntimeError(f"its streams ended after {before} of {target.size} bytes without an error")
