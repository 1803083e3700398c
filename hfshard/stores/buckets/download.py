"""Bytes of files in Xet storage, read as streams straight into memory."""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import Any, Final

import hf_xet

from hfshard._util.text import without_url_secrets
from hfshard.stores.buckets.tokens import XetTokens
from hfshard.stores.buckets.turns import PIECE_BYTES, download_turn
from hfshard.stores.buckets.xet import SESSIONS, XetFailedError, asked, interruptible, kind_of

logger = logging.getLogger(__name__)

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
