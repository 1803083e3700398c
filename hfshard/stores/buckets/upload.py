"""Files that go to Xet storage as streams: nothing goes to the disk, and memory is bounded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import hf_xet

from hfshard.stores.buckets.tokens import XetTokens
from hfshard.stores.buckets.turns import SMALL_BYTES, give_memory_back, upload_turn
from hfshard.stores.buckets.xet import SESSIONS, XetFailedError, asked, interruptible

_Answer = TypeVar("_Answer")

_BLOCK_BYTES: Final = 8_000_000
"""hf_xet takes a copy of what it is given, and cuts files into blocks of this size itself."""


@dataclass(frozen=True, slots=True)
class XetFile:
    """A file in Xet storage. It has no name there: the Hub gives it one."""

    hash: str
    """Of its contents."""
    size: int
    sent_bytes: int
    """Bytes that were sent for it: chunks that the storage has are not."""


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
            self._commit = self._do(lambda: SESSIONS.get().new_upload_commit(**arguments))
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
            return interruptible(lambda: asked(call), self.abort)
        except XetFailedError as error:
            if error.kind == "access":
                self._tokens.forget()
            raise
