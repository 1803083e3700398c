"""Safetensors files read by byte ranges: few requests, straight into place, verified during the read."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple, Protocol

import torch

from hfshard._util.progress import ProgressCallback
from hfshard._util.threads import result_of, run_in_threads, start_worker, wait_all
from hfshard.constants import FINGERPRINT_BYTES
from hfshard.disk.direct_io import BLOCK_BYTES
from hfshard.errors import DamagedCheckpointError, IntegrityError, repair_hint
from hfshard.format.header import LENGTH_BYTES, TensorInfo, read_header_length
from hfshard.format.index import (
    HASHERS,
    FileDigest,
    Hasher,
    Verify,
    fingerprint_positions,
    new_fingerprint,
    tensor_hasher,
)
from hfshard.shards.shard import SafetensorsShard
from hfshard.tensors.stored_tensor import allocate_pages, bytes_view

HEAD_BYTES: Final = 32 * 1024
"""Bytes of a file's first request: the header of about 250 tensors. A longer one takes a second request. Data after the
header is kept, and not requested again."""

_STREAM_BYTES: Final = 4 * BLOCK_BYTES
"""Bytes per request when a file is read from end to end, with up to seven other files."""

_SAMPLE_BYTES: Final = 64 * 1024
"""The largest block size, in bytes, that counts as sampling."""

_AHEAD: Final = 3
"""The most such requests in flight while the bytes of one are in use."""


class RangedFile(Protocol):
    """A file as it was listed: later reads return exactly these bytes, or raise."""

    @property
    def name(self) -> str:
        """Path below the place."""

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def etag(self) -> str:
        """Identifies the bytes: other bytes have another ETag."""


class RangeReader(Protocol):
    """A place whose files are read by ranges, such as a `Store`. Several threads use it at once."""

    def list_objects(self, folder: str = "") -> Mapping[str, Any]:
        """List the files directly in a folder by name, each a `RangedFile`."""

    def folders(self, folder: str = "") -> list[str]:
        """Name the folders directly in a folder, sorted."""

    def read_into(self, found: Any, begin: int, target: memoryview) -> None:
        """Fill memory with a listed file's bytes from `begin` on.

        Raises:
            CheckpointChangedError: The file now has other bytes, or is gone.
        """


class RangedShard(SafetensorsShard):
    """One safetensors file that is read by ranges, with nothing on disk."""

    def __init__(self, files: RangeReader, entry: RangedFile, path: str) -> None:
        """Read and check the header.

        Args:
            files: The place of the file.
            entry: The file.
            path: Its complete address, for messages.

        Raises:
            DamagedCheckpointError: The header does not match itself or the size of the file.
            Everything that `files` raises.
        """
        self._files, self._entry = files, entry
        self.identity: tuple[Any, ...] = (entry.etag, entry.size)
        self.recorded = FileDigest()
        """Digests that were recorded when the file was saved; reads are compared with them."""
        self._head = memoryview(b"")
        head = bytes(self._read(0, min(entry.size, HEAD_BYTES)))
        end = LENGTH_BYTES + read_header_length(head[:LENGTH_BYTES], entry.size, path)
        if end > len(head):
            head += self._read(len(head), end - len(head))
        raw_header = head[:end]
        if b"\0" in raw_header[LENGTH_BYTES:]:
            raise DamagedCheckpointError(
                f"'{path}' is damaged: its header contains zero bytes. {repair_hint(path)}", path=path
            )
        super().__init__(path, raw_header, entry.size)
        self._head = memoryview(head if end < len(head) else b"")

    @property
    def is_networked(self) -> bool:
        """Return True."""
        return True

    def close(self) -> None:
        """Release what this thread has read ahead; no file is open."""
        if _window.file is self:
            _window.file = None
            _window.memory = memoryview(b"")

    def read_into(self, begin: int, target: memoryview) -> None:
        """Fill memory with the file's bytes from `begin` on.

        Raises:
            CheckpointChangedError: The file now has other bytes, or is gone.
            Everything that the place raises.
        """
        known = self._head[begin : begin + len(target)]
        target[: len(known)] = known
        if len(known) < len(target):
            self._files.read_into(self._entry, begin + len(known), target[len(known) :])

    def asked_bytes(self, begin: int, end: int) -> int:
        """Count the bytes of a range that must be requested, because they did not arrive with the header."""
        return max(0, end - max(begin, len(self._head)))

    def _read(self, begin: int, count_bytes: int) -> memoryview:
        """Read bytes into memory that can be written: torch warns of any other."""
        found = memoryview(bytearray(count_bytes))
        self.read_into(begin, found)
        return found

    def _stretch(self, start: int, count_bytes: int, block_bytes: int) -> Iterator[memoryview]:
        if block_bytes <= _SAMPLE_BYTES:
            for begin in range(0, count_bytes, block_bytes):  # one by one: callers often take the first only
                yield self._read(start + begin, min(block_bytes, count_bytes - begin))
            return
        if count_bytes <= MOST_BYTES:
            found = _read_ahead(self, start, count_bytes)
            yield from (found[begin : begin + block_bytes] for begin in range(0, count_bytes, block_bytes))
            return
        read_bytes = max(1, _STREAM_BYTES // block_bytes) * block_bytes
        end = start + count_bytes
        starts = iter(range(start, end, read_bytes))
        under_way: deque[tuple[Future[None], memoryview]] = deque()
        try:
            while True:
                for at in islice(starts, _AHEAD - len(under_way)):
                    under_way.append(self._begun(at, min(read_bytes, end - at)))
                if not under_way:
                    return
                reading, found = under_way.popleft()
                result_of(reading)
                for begin in range(0, len(found), block_bytes):
                    yield found[begin : begin + block_bytes]
        finally:
            wait_all([reading for reading, _ in under_way])

    def _begun(self, start: int, nbytes: int) -> tuple[Future[None], memoryview]:
        """Return memory that another thread fills, or this one if the range is small or no thread can be started."""
        found = memoryview(bytearray(nbytes))
        reading = start_worker(partial(self.read_into, start, found), "hfshard-range") if nbytes > BLOCK_BYTES else None
        if reading is None:
            self.read_into(start, found)
            reading = Future()
            reading.set_result(None)
        return reading, found

    def _places(self, places: Iterable[tuple[int, int]]) -> Iterator[bytes]:
        return (bytes(self._read(*place)) for place in places)

    def _data(self, *, keep_cached: bool = False) -> Iterator[memoryview]:
        return self._stretch(self.header.data_start, self.data_bytes, BLOCK_BYTES)


# Read-ahead of a thread: it reads a file's small tensors in order with few requests.


MOST_BYTES: Final = 4 << 20
"""The largest window. A request takes about 50 ms, and eight threads have one each."""
_FIRST_BYTES: Final = 1 << 20
"""The first window. Each following one is twice as large, so that few bytes are requested in vain."""


class _Window(threading.local):
    """This thread's last window, of any file."""

    def __init__(self) -> None:
        self.file: object = None
        self.start = 0
        self.memory = memoryview(b"")


_window = _Window()


def _read_ahead(file: RangedShard, start: int, count_bytes: int) -> memoryview:
    """Return at most `MOST_BYTES` of a file; a thread that reads on from its last position requests no byte twice."""
    offset = start - _window.start
    goes_on = _window.file is file and 0 <= offset <= len(_window.memory)
    if not goes_on or offset + count_bytes > len(_window.memory):
        known = _window.memory[offset:] if goes_on else memoryview(b"")
        more = min(2 * len(_window.memory), MOST_BYTES) if goes_on else _FIRST_BYTES
        memory = memoryview(bytearray(min(max(more, count_bytes), file.size - start)))
        memory[: len(known)] = known
        _window.file = None  # until it is filled
        file.read_into(start + len(known), memory[len(known) :])
        _window.file = file
        _window.start = start
        _window.memory = memory
        offset = 0
    return _window.memory[offset : offset + count_bytes]


# Range reads in few requests: nearby pieces together, several requests at once, each piece straight to its target.


REQUEST_BYTES: Final = 8 * 1024 * 1024
"""The most bytes per request: as stores advise (8 to 16 MiB), and a tenth of a second of one stream."""

GAP_BYTES: Final = 128 * 1024
"""Pieces with at most this many bytes between them share a request, which takes longer than these bytes."""

_MOST_UNDER_WAY: Final = 12
"""The most requests in flight: one stream of a store delivers about 80 MB/s, regardless of the line."""

_BYTES_EACH: Final = 2 * REQUEST_BYTES
"""Memory of a request in flight: its response, and the stage where pieces wait to be copied to their targets."""

DEFAULT_MEMORY: Final = 256 * 1024 * 1024
"""Bytes that the reads of one call may use in addition to their targets."""


class Piece(NamedTuple):
    """A file range to read, at most `REQUEST_BYTES` long."""

    start: int
    """Position in the file."""
    nbytes: int
    target: memoryview | None
    """Memory to fill; None: the bytes are only passed to `take`."""
    take: Callable[[memoryview, threading.Event], object] | None = None
    """Called with the bytes after they arrive, and with the event that is set when another request fails. Without a
    target, the bytes are valid only until it returns."""

    @property
    def end(self) -> int:
        """Position in the file, one past the last byte."""
        return self.start + self.nbytes


class _Request(NamedTuple):
    shard: RangedShard
    pieces: Sequence[Piece]


class _Stages:
    """Reusable memory in which pieces wait to be taken."""

    def __init__(self, new_stage: Callable[[], memoryview] | None) -> None:
        self.free: SimpleQueue[memoryview] = SimpleQueue()
        self._new_stage = new_stage

    def take(self) -> memoryview:
        """Return a stage without waiting for one: its user may be waiting for the piece that this one is for."""
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
        wanted: Files, each with the pieces to read from it, in any order.
        progress_callback: Called with the bytes of pieces that have arrived.
        memory_bytes: Memory that this may use in addition to the targets.
        new_stage: Return memory of `REQUEST_BYTES` in which pieces wait to be taken; None: ordinary memory is used.

    Returns:
        Requested bytes, including those between pieces.

    Raises:
        Everything that `RangedShard.read_into` and the `take` of a piece raise.
    """
    requests = [_Request(shard, run) for shard, pieces in wanted for run in _runs(pieces)]
    count = max(1, min(_MOST_UNDER_WAY, memory_bytes // _BYTES_EACH))
    stages = _Stages(new_stage)

    def read(request: _Request, cancelled: threading.Event) -> int:
        if cancelled.is_set():
            raise InterruptedError("another range failed, or Ctrl-C was pressed")
        asked = _read(request, stages, cancelled)
        if progress_callback is not None:
            progress_callback(sum(piece.nbytes for piece in request.pieces))
        return asked

    return sum(run_in_threads(read, requests, count))


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
    """Group pieces by request, in the order of their bytes."""
    run: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if run and (piece.start - run[-1].end > GAP_BYTES or piece.end - run[0].start > REQUEST_BYTES):
            yield run
            run = []
        run.append(piece)
    if run:
        yield run


# Reads of complete tensors by ranges, each into its own memory on the CPU or a device.


def read_full_tensors(
    wanted: Sequence[tuple[RangedShard, Sequence[str]]],
    device: torch.device,
    *,
    level: Verify = "structure",
    progress_callback: ProgressCallback | None = None,
    memory_bytes: int = DEFAULT_MEMORY,
) -> dict[str, torch.Tensor]:
    """Read tensors, each into its own memory, requesting every byte once.

    Args:
        wanted: Files, each with the names of tensors.
        device: The device of the tensors.
        level: The digests to compare during the read (see `DigestComparison`).
        progress_callback: Called with the bytes that have arrived.
        memory_bytes: Memory that this may use in addition to the tensors.

    Raises:
        IntegrityError: Bytes differ from the saved ones.
        DamagedCheckpointError: This torch does not know a dtype; nothing was read.
        Everything that `RangedShard.read_into` raises.
    """
    tensors: dict[str, torch.Tensor] = {}
    jobs: list[tuple[RangedShard, list[Piece]]] = []
    comparisons: list[DigestComparison] = []
    for shard, names in wanted:
        for name in names:
            shard.described(name)  # raises before memory is allocated
    for shard, names in wanted:
        comparison = DigestComparison(shard, level)
        pieces: list[Piece] = list(comparison.others(set(names)))
        for name in names:
            info = shard.header.tensors[name]
            raw = _memory(info.nbytes, device)
            tensors[name] = shard.shaped(name, raw.untyped_storage())
            if info.nbytes:
                pieces += pieces_of(info, shard.header.data_start, raw, comparison.digest_of(info))
        jobs.append((shard, pieces))
        comparisons.append(comparison)
    stage = partial(_page_locked, REQUEST_BYTES) if device.type == "cuda" else None
    read_pieces(jobs, progress_callback, memory_bytes, stage)
    for comparison in comparisons:
        comparison.compare()
    return {name: tensors[name] for _, names in wanted for name in names}


def _memory(nbytes: int, device: torch.device) -> torch.Tensor:
    if device.type == "cpu" and nbytes:
        return allocate_pages((nbytes,), torch.uint8)
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _page_locked(nbytes: int) -> memoryview:
    return bytes_view(torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True))


def pieces_of(info: TensorInfo, data_start: int, raw: torch.Tensor, digest: UnorderedDigest | None) -> Iterator[Piece]:
    """Yield the pieces that make up a complete tensor.

    Args:
        info: The tensor.
        data_start: Start of the data in its file.
        raw: One-dimensional target of its bytes.
        digest: Digest that also gets them.
    """
    memory = bytes_view(raw) if raw.device.type == "cpu" else None
    # The caller's stream, on which the memory was allocated: other threads have their own.
    stream = torch.cuda.current_stream(raw.device) if raw.device.type == "cuda" else None
    for at in range(0, info.nbytes, REQUEST_BYTES):
        nbytes = min(REQUEST_BYTES, info.nbytes - at)
        start = data_start + info.begin + at
        target = None if memory is None else memory[at : at + nbytes]
        into = None if memory is not None else raw[at : at + nbytes]
        take = None if digest is None and into is None else partial(_take, start, digest, into, stream)
        yield Piece(start, nbytes, target, take)


def _take(
    start: int,
    digest: UnorderedDigest | None,
    into: torch.Tensor | None,
    stream: torch.cuda.Stream | None,
    found: memoryview,
    cancelled: threading.Event,
) -> None:
    if into is not None:
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            into.copy_(torch.frombuffer(found, dtype=torch.uint8))
    if digest is not None:
        digest.add(start, found, cancelled, stays=into is None)


# Verification of range reads against the digests that were recorded when the file was saved.


class DigestComparison:
    """Comparison of one file's digests with a read of some of its tensors.

    1. A tensor that is read completely is compared with its own digest, at every level except "none".
    2. "full" compares every byte: if the file has no tensor digests, the complete file is read in order for its
       checksum. If all sampled tensors are read, the fingerprint is compared too, to cover the header.
    """

    def __init__(self, shard: RangedShard, level: Verify) -> None:
        self._shard = shard
        self._is_full = level in ("full", "sha256")
        recorded = shard.recorded
        self._expected = {} if level == "none" else recorded.split_tensor_digests(shard.header.tensors) or {}
        self._digests: dict[str, UnorderedDigest] = {}
        self._file: UnorderedDigest | None = None
        self._kind, self._checksum = recorded.checksum or ("", "")
        if self._is_full and shard.header.tensors and not self._expected and self._kind:
            hasher = HASHERS[self._kind]()
            hasher.update(shard.header_as_hashed())
            self._file = UnorderedDigest(hasher, shard.header.data_start, shard.data_bytes)

    def digest_of(self, info: TensorInfo) -> UnorderedDigest | None:
        """Return the digest that gets the bytes of a tensor read completely, once; None if nothing is compared."""
        if self._file is not None:
            return self._file
        if info.name not in self._expected or info.name in self._digests:
            return None
        digest = UnorderedDigest(tensor_hasher(), self._shard.header.data_start + info.begin, info.nbytes)
        self._digests[info.name] = digest
        return digest

    def others(self, names: Collection[str]) -> Iterator[Piece]:
        """Yield pieces to read in addition to the tensors of these names, which are read anyway."""
        if self._file is None:
            return
        for info in self._shard.header.tensors.values():
            if info.name not in names:
                begin = self._shard.header.data_start + info.begin
                for start in range(begin, begin + info.nbytes, REQUEST_BYTES):
                    nbytes = min(REQUEST_BYTES, begin + info.nbytes - start)
                    yield Piece(start, nbytes, None, partial(self._file.add, start, stays=False))

    def compare(self) -> None:
        """Compare the digests once everything has been read.

        Raises:
            IntegrityError: A tensor or the file, which the message names, differs from what was saved.
        """
        for name, digest in self._digests.items():
            if digest.is_whole and digest.hexdigest() != self._expected[name]:
                raise self._differs(f"Tensor '{name}' of", "xxh3", self._expected[name], digest.hexdigest(), name)
        recorded = self._shard.recorded
        if self._file is not None:
            if self._file.hexdigest() != self._checksum:
                raise self._differs("", self._kind, self._checksum, self._file.hexdigest())
            return
        fingerprint = self._fingerprint() if self._is_full and recorded.fingerprint is not None else None
        if fingerprint not in (None, recorded.fingerprint):
            raise self._differs("The header of", "fingerprint", str(recorded.fingerprint), str(fingerprint))

    def _fingerprint(self) -> str | None:
        """Compute the file's fingerprint from the tensors that were read; None if one of them is missing."""
        infos = list(self._shard.header.tensors.values())
        fingerprint = new_fingerprint()
        fingerprint.update(self._shard.header_as_hashed())
        for position in fingerprint_positions(len(infos)):
            info = infos[position]
            if info.nbytes:
                digest = self._digests.get(info.name)
                if digest is None or not digest.is_whole:
                    return None
                fingerprint.update(digest.head)
        return fingerprint.hexdigest()

    def _differs(self, what: str, kind: str, expected: str, found: str, fqn: str | None = None) -> IntegrityError:
        path = self._shard.path
        return IntegrityError(
            f"{f'{what} shard' if what else 'Shard'} '{path}' is not what was saved: its {kind} is {found}, but was "
            f"{expected}. Read it again; if that fails too, the stored file is damaged: save it again.",
            path=path,
            fqn=fqn,
            expected=expected,
            actual=found,
        )


# Digests of pieces that arrive in any order, computed in the order of their bytes.


_LOOK_SECONDS: Final = 0.1
"""Interval at which a thread that waits for its turn checks whether another one has failed."""


class UnorderedDigest:
    """Digest of a byte range whose pieces arrive in any order, from several threads."""

    def __init__(self, hasher: Hasher, start: int, nbytes: int) -> None:
        """Begin without pieces.

        Args:
            hasher: The hasher that gets the bytes.
            start: Start of the range in its file.
            nbytes: Bytes of the range.
        """
        self.head = b""
        """The first bytes, up to the number that a file's fingerprint uses."""
        self._hasher = hasher
        self._start, self._next, self._end = start, start, start + nbytes
        self._early: dict[int, memoryview] = {}
        self._changed = threading.Condition()
        self._is_busy = False

    @property
    def is_whole(self) -> bool:
        """Return whether all bytes have been hashed."""
        return self._next == self._end

    def hexdigest(self) -> str:
        """Return the digest."""
        return self._hasher.hexdigest()

    def add(self, start: int, block: memoryview, cancelled: threading.Event, *, stays: bool) -> None:
        """Hash a piece when its turn comes.

        Args:
            start: Start of the piece in the file. Pieces are started in the order of their bytes.
            block: Its bytes.
            cancelled: Set when another piece fails.
            stays: Whether the memory keeps these bytes; if not, this waits for the pieces before it.

        Raises:
            InterruptedError: Another piece failed, so that this one's turn never comes.
        """
        if start == self._start:
            self.head = bytes(block[:FINGERPRINT_BYTES])
        with self._changed:
            while not stays and (self._is_busy or self._next != start):
                if cancelled.is_set():
                    raise InterruptedError("another range failed, or Ctrl-C was pressed")
                self._changed.wait(_LOOK_SECONDS)
            self._early[start] = block
            if self._is_busy:
                return  # the busy thread hashes it
            self._is_busy = True
        while (block_in_turn := self._in_turn()) is not None:
            self._hasher.update(block_in_turn)
            self._next += len(block_in_turn)

    def _in_turn(self) -> memoryview | None:
        with self._changed:
            block = self._early.pop(self._next, None)
            if block is None:
                self._is_busy = False
                self._changed.notify_all()
            return block
