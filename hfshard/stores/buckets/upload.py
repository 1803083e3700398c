"""Files that go to Xet storage as streams: nothing goes to the disk, and memory is bounded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import hf_xet

from hfshard.stores.buckets.tokens import XetTokens
from hfshard.stores.buckets.turns import SMALL_BYTES, give_memory_back, upload_turn
from hfshard.stores.buckets.xet import SESSIONS, XetFailedError, asked, interruptible
from hfshard.stores.memory import store_memory_bytes

_Answer = TypeVar("_Answer")

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
