"""Reads pieces of files by few requests: near ones at once, several under way, each straight to where it is wanted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Final, NamedTuple

from hfshard._util.progress import ProgressCallback
from hfshard._util.threads import in_threads
from hfshard.storage.weights.ranged.ranged_shard import RangedShard

REQUEST_BYTES: Final = 8 * 1024 * 1024
"""Bytes that one request asks for at most: what stores advise (8 to 16 MiB), and a tenth of a second of one stream."""

GAP_BYTES: Final = 128 * 1024
"""Pieces with fewer bytes between them are asked for at once: a request takes longer than these bytes."""

_MOST_UNDER_WAY: Final = 12
"""Requests: one stream of a store gives some 80 MB/s, whatever the line."""

_BYTES_EACH: Final = 2 * REQUEST_BYTES
"""Memory of a request under way: its answer, and where pieces wait to be copied to their places."""

DEFAULT_MEMORY: Final = 256 * 1024 * 1024
"""Bytes that the reads of one call may take, beyond what they fill."""


class Piece(NamedTuple):
    """A stretch of a file that is wanted, at most `REQUEST_BYTES` long."""

    start: int
    """In the file."""
    nbytes: int
    target: memoryview | None
    """Memory to fill; None: the bytes are only shown to `take`."""
    take: Callable[[memoryview, threading.Event], object] | None = None
    """Gets the bytes when they are there, and what others set that have failed. Without a target they are gone when it
    returns."""

    @property
    def end(self) -> int:
        """In the file: one past the last byte."""
        return self.start + self.nbytes


class _Request(NamedTuple):
    shard: RangedShard
    pieces: Sequence[Piece]


class _Stages:
    """Memory in which pieces wait to be taken, used again and again."""

    def __init__(self, new_stage: Callable[[], memoryview] | None) -> None:
        self.free: SimpleQueue[memoryview] = SimpleQueue()
        self._new_stage = new_stage

    def take(self) -> memoryview:
        """Never waits for one: who has it may be waiting for the piece that this one is for."""
        try:
            return self.free.get_nowait()
        except Empty:
            return memoryview(bytearray(REQUEST_BYTES)) if self._new_stage is None else self._new_stage()


def read_pieces(
    wanted: Sequence[tuple[RangedShard, Sequence[Piece]]],
    progress_callback: ProgressCallback | None = None,
    memory_bytes: int = DEFAULT_MEMORY,
    new_stage: Callable[[], memoryview] | None = None,
) -> int:
    """Read pieces of files into place.

    Args:
        wanted: Files, each with the pieces that are wanted of it, in any order.
        progress_callback: Called with numbers of bytes of pieces that have come.
        memory_bytes: What this may take beside the targets.
        new_stage: Gives memory of `REQUEST_BYTES` in which pieces wait to be taken; None: any.

    Returns:
        Bytes that were asked for, with those between pieces.

    Raises:
        Everything that `RangedShard.read_into` and the `take` of a piece raise.
    """
    requests = [_Request(shard, run) for shard, pieces in wanted for run in _runs(pieces)]
    count = max(1, min(_MOST_UNDER_WAY, memory_bytes // _BYTES_EACH))
    stages = _Stages(new_stage)

    def read(request: _Request, cancelled: threading.Event) -> int:
        if cancelled.is_set():
            raise InterruptedError("another range failed, or Ctrl-C came")
        asked = _read(request, stages, cancelled)
        if progress_callback is not None:
            progress_callback(sum(piece.nbytes for piece in request.pieces))
        return asked

    return sum(in_threads(read, requests, count))


def _read(request: _Request, stages: _Stages, cancelled: threading.Event) -> int:
    shard, pieces = request
    start, end = pieces[0].start, max(piece.end for piece in pieces)
    target = pieces[0].target
    if len(pieces) == 1 and target is not None:
        shard.read_into(start, target)
        _show(pieces[0], target, cancelled)
        return shard.asked_bytes(start, end)
    stage = stages.take()
    try:
        shard.read_into(start, stage[: end - start])
        for piece in pieces:
            found = stage[piece.start - start : piece.end - start]
            if piece.target is not None:
                piece.target[:] = found
            _show(piece, found if piece.target is None else piece.target, cancelled)
    finally:
        stages.free.put(stage)
    return shard.asked_bytes(start, end)


def _show(piece: Piece, found: memoryview, cancelled: threading.Event) -> None:
    if piece.take is not None:
        piece.take(found, cancelled)


def _runs(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Group the pieces that one request asks for, in the order of their bytes."""
    run: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if run and (piece.start - run[-1].end > GAP_BYTES or piece.end - run[0].start > REQUEST_BYTES):
            yield run
            run = []
        run.append(piece)
    if run:
        yield run
