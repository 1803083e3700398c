"""A safetensors file read by byte ranges: few requests, straight into place, compared with its digests on the way."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple, Protocol

import torch

from hfshard._util.progress import ProgressCallback
from hfshard._util.threads import in_threads, result_of, start_thread, wait_for
from hfshard.constants import FINGERPRINT_BYTES
from hfshard.disk.direct_io import BLOCK_BYTES
from hfshard.errors import DamagedCheckpointError, IntegrityError, remedy
from hfshard.format.digests import HASHERS, Hasher, Verify, fingerprint_positions, new_fingerprint, tensor_hasher
from hfshard.format.header import LENGTH_BYTES, TensorInfo, read_header_length
from hfshard.format.index import FileDigest
from hfshard.shards.shard import SafetensorsShard
from hfshard.tensors.stored_tensor import memory_of, own_memory

HEAD_BYTES: Final = 32 * 1024
"""Bytes of a file that are asked for first: the header of some 250 tensors. A longer one takes a second request. What
comes after the header is kept, and not asked for again."""

_STREAM_BYTES: Final = 4 * BLOCK_BYTES
"""Bytes that one request asks for where a file is read from end to end, maybe with seven others."""

_SAMPLE_BYTES: Final = 64 * 1024
"""Blocks of at most so many bytes are samples."""

_AHEAD: Final = 3
"""Such requests that are under way while the bytes of one are in use."""


class RangedEntry(Protocol):
    """A file as it was listed: later reads are of these very bytes, or an error."""

    @property
    def name(self) -> str:
        """Its path below the place."""

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def etag(self) -> str:
        """Another one for other bytes."""


class RangedFiles(Protocol):
    """A place whose files are read by ranges, such as a `Store`. Used by several threads at once."""

    def list_objects(self, folder: str = "") -> Mapping[str, Any]:
        """List the files directly in a folder by name, each a `RangedEntry`."""

    def folders(self, folder: str = "") -> list[str]:
        """Name the folders directly in a folder, sorted."""

    def find(self, name: str) -> Any:
        """Ask for one file, a `RangedEntry`; None where there is none."""

    def read_into(self, found: Any, begin: int, target: memoryview) -> None:
        """Fill memory with the bytes of a listed file from `begin` on.

        Raises:
            CheckpointChangedError: It has other bytes now, or is gone.
        """


class FilesInStore(RangedFiles, Protocol):
    """A place in a store."""

    def neighbors(self) -> list[str]:
        """Name the folders next to it."""


class RangedShard(SafetensorsShard):
    """One safetensors file that is read by ranges; nothing of it is on disk."""

    def __init__(self, files: RangedFiles, entry: RangedEntry, path: str) -> None:
        """Read and check the header.

        Args:
            files: Where it lies.
            entry: Which one.
            path: Its whole address, for messages.

        Raises:
            DamagedCheckpointError: The header does not match itself or the size of the file.
            Everything that `files` raises.
        """
        self._files, self._entry = files, entry
        self.identity: tuple[Any, ...] = (entry.etag, entry.size)
        self.recorded = FileDigest()
        """What was recorded of it when it was saved, with which what is read is compared."""
        self._head = memoryview(b"")
        head = self._read(0, min(entry.size, HEAD_BYTES))
        end = LENGTH_BYTES + read_header_length(bytes(head[:LENGTH_BYTES]), entry.size, path)
        if end > len(head):
            head = memoryview(bytes(head) + bytes(self._read(len(head), end)))
        raw_header = bytes(head[:end])
        if b"\0" in raw_header[LENGTH_BYTES:]:
            raise DamagedCheckpointError(
                f"'{path}' is damaged: its header contains zero bytes. {remedy(path)}", path=path
            )
        super().__init__(path, raw_header, entry.size)
        self._head = head if end < len(head) else self._head

    @property
    def is_far(self) -> bool:
        """It is."""
        return True

    def close(self) -> None:
        """Nothing is open."""
        forget(self)

    def read_into(self, begin: int, target: memoryview) -> None:
        """Fill memory with the bytes of the file from `begin` on.

        Raises:
            CheckpointChangedError: The file has other bytes now, or is gone.
            Everything that the place raises.
        """
        known = self._head[begin : begin + len(target)]
        target[: len(known)] = known
        if len(known) < len(target):
            self._files.read_into(self._entry, begin + len(known), target[len(known) :])

    def asked_bytes(self, begin: int, end: int) -> int:
        """How many bytes of a stretch have to be asked for, as they did not come with the header."""
        return max(0, end - max(begin, len(self._head)))

    def tensor_digests(self) -> dict[str, str]:
        """The recorded digest of each tensor by name; empty where there are none."""
        names = list(self.header.tensors)
        digests = self.recorded.split_tensor_digests(len(names))
        return {} if digests is None else dict(zip(names, digests, strict=True))

    def header_as_hashed(self) -> bytes:
        """All that comes before the data, as it goes into checksums and the fingerprint."""
        return self._blank_header()

    def _read(self, begin: int, end: int) -> memoryview:
        target = memoryview(bytearray(end - begin))
        self._files.read_into(self._entry, begin, target)
        return target

    def _stretch(self, start: int, count_bytes: int, block_bytes: int) -> Iterator[memoryview]:
        if block_bytes <= _SAMPLE_BYTES:
            yield from self._samples(start, count_bytes, block_bytes)
            return
        if count_bytes <= MOST_BYTES:
            found = read_ahead(self, start, count_bytes, self.size, self.read_into)
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
            wait_for([reading for reading, _ in under_way])

    def _samples(self, start: int, count_bytes: int, block_bytes: int) -> Iterator[memoryview]:
        """Small blocks, each asked for by itself: who asks for such takes the first, and leaves the rest."""
        for begin in range(0, count_bytes, block_bytes):
            room = memoryview(bytearray(min(block_bytes, count_bytes - begin)))
            self.read_into(start + begin, room)
            yield room

    def _begun(self, start: int, nbytes: int) -> tuple[Future[None], memoryview]:
        """Memory that another thread fills, or this one where none can be started."""
        found = memoryview(bytearray(nbytes))
        reading = start_thread(partial(self.read_into, start, found), "hfshard-range") if nbytes > BLOCK_BYTES else None
        if reading is None:
            self.read_into(start, found)
            reading = Future()
            reading.set_result(None)
        return reading, found

    def _places(self, places: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        for begin, count_bytes in places:
            room = memoryview(bytearray(count_bytes))
            self.read_into(begin, room)
            yield bytes(room)

    def _data(self, *, keep_cached: bool = False) -> Iterator[memoryview]:
        return self._stretch(self.header.data_start, self.data_bytes, BLOCK_BYTES)


# What a thread asks for beyond what it needs: the small tensors of a file, one after the other, in few requests.


MOST_BYTES: Final = 4 << 20
"""Of a window. A request takes some 50 ms, and eight threads have one each."""
_FIRST_BYTES: Final = 1 << 20
"""Of the first one. Each that follows another one is twice as large, so that little is asked for in vain."""


class _Window(threading.local):
    """The last window of this thread, whatever the file."""

    def __init__(self) -> None:
        self.file: object = None
        self.start = 0
        self.memory = memoryview(b"")


_window = _Window()


def read_ahead(
    file: object, start: int, count_bytes: int, end: int, read_into: Callable[[int, memoryview], None]
) -> memoryview:
    """The bytes of a stretch of a file; no byte is asked for twice as long as a thread reads on from where it was.

    Args:
        file: Which one.
        start: Of the stretch.
        count_bytes: Its length; at most `MOST_BYTES`.
        end: Of what may be asked for.
        read_into: Fills memory with the bytes of the file from a position on.

    Raises:
        Everything that `read_into` raises.
    """
    offset = start - _window.start
    goes_on = _window.file is file and 0 <= offset <= len(_window.memory)
    if not goes_on or offset + count_bytes > len(_window.memory):
        known = _window.memory[offset:] if goes_on else memoryview(b"")
        more = min(2 * len(_window.memory), MOST_BYTES) if goes_on else _FIRST_BYTES
        memory = memoryview(bytearray(min(max(more, count_bytes), end - start)))
        memory[: len(known)] = known
        _window.file = None  # until it is filled
        read_into(start + len(known), memory[len(known) :])
        _window.file = file
        _window.start = start
        _window.memory = memory
        offset = 0
    return _window.memory[offset : offset + count_bytes]


def forget(file: object) -> None:
    """Let go of what this thread has of a file."""
    if _window.file is file:
        _window.file = None
        _window.memory = memoryview(b"")


# Reads pieces of files by few requests: near ones at once, several under way, each straight to where it is wanted.


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


# Brings tensors of files that are read by ranges into memory of their own, on the CPU or a device.


def read_whole(
    wanted: Sequence[tuple[RangedShard, Sequence[str]]],
    device: torch.device,
    *,
    level: Verify = "structure",
    progress_callback: ProgressCallback | None = None,
    memory_bytes: int = DEFAULT_MEMORY,
) -> dict[str, torch.Tensor]:
    """Read tensors, each into memory of its own; every byte is asked for once.

    Args:
        wanted: Files, each with the names of tensors.
        device: Where they go.
        level: What is compared on the way (see `Comparison`).
        progress_callback: Called with numbers of bytes that have come.
        memory_bytes: What this may take beside the tensors.

    Raises:
        IntegrityError: Bytes are not those that were saved.
        DamagedCheckpointError: This torch does not know a dtype; nothing was read.
        Everything that `RangedShard.read_into` raises.
    """
    tensors: dict[str, torch.Tensor] = {}
    jobs: list[tuple[RangedShard, list[Piece]]] = []
    comparisons: list[Comparison] = []
    for shard, names in wanted:
        for name in names:
            shard.described(name)  # raises before memory is taken
    for shard, names in wanted:
        comparison = Comparison(shard, level)
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
        return own_memory((nbytes,), torch.uint8)
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _page_locked(nbytes: int) -> memoryview:
    return memory_of(torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True))


def pieces_of(info: TensorInfo, data_start: int, raw: torch.Tensor, digest: RunningDigest | None) -> Iterator[Piece]:
    """The pieces by which a tensor is read whole.

    Args:
        info: Which tensor.
        data_start: Of its file.
        raw: Where its bytes go, in one dimension.
        digest: Takes them too.
    """
    memory = memory_of(raw) if raw.device.type == "cpu" else None
    # The caller's stream, on which the memory was allocated: another thread has another one.
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
    digest: RunningDigest | None,
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


# Compares what is read of a file by ranges with the digests that were recorded when it was saved.


class Comparison:
    """The digests of one file that a read of some of its tensors can compare.

    1. Of a tensor that is read whole, its own; at every level but "none".
    2. "full" compares every byte: where the file has no digests of its tensors, the whole file is read, in order, for
       its checksum. Where they are all read, the fingerprint is compared too, for the header's sake.
    """

    def __init__(self, shard: RangedShard, level: Verify) -> None:
        self._shard = shard
        self._is_full = level in ("full", "sha256")
        self._expected = {} if level == "none" else shard.tensor_digests()
        self._digests: dict[str, RunningDigest] = {}
        self._file: tuple[str, RunningDigest] | None = None
        recorded = shard.recorded
        if self._is_full and shard.header.tensors and not self._expected and recorded.is_verifiable:
            kind = "sha256" if recorded.sha256 is not None else "xxh3"
            hasher = HASHERS[kind]()
            hasher.update(shard.header_as_hashed())
            self._file = kind, RunningDigest(hasher, shard.header.data_start, shard.data_bytes)

    def digest_of(self, info: TensorInfo) -> RunningDigest | None:
        """What takes the bytes of a tensor that is read whole, once; None: nothing is to be compared."""
        if self._file is not None:
            return self._file[1]
        if info.name not in self._expected or info.name in self._digests:
            return None
        digest = RunningDigest(tensor_hasher(), self._shard.header.data_start + info.begin, info.nbytes)
        self._digests[info.name] = digest
        return digest

    def others(self, names: Collection[str]) -> Iterator[Piece]:
        """What has to be read besides tensors of these names, which are read anyway."""
        if self._file is None:
            return
        digest = self._file[1]
        for info in self._shard.header.tensors.values():
            if info.name not in names:
                begin = self._shard.header.data_start + info.begin
                for start in range(begin, begin + info.nbytes, REQUEST_BYTES):
                    nbytes = min(REQUEST_BYTES, begin + info.nbytes - start)
                    yield Piece(start, nbytes, None, partial(_hash, digest, start))

    def compare(self) -> None:
        """Compare, when everything has been read.

        Raises:
            IntegrityError: It names a tensor, or the file, whose bytes are not those that were saved.
        """
        for name, digest in self._digests.items():
            if digest.is_whole and digest.hexdigest() != self._expected[name]:
                raise self._differs(f"Tensor '{name}' of", "xxh3", self._expected[name], digest.hexdigest(), name)
        recorded = self._shard.recorded
        if self._file is not None:
            kind, whole = self._file
            expected = recorded.sha256 if kind == "sha256" else recorded.xxh3
            if whole.hexdigest() != expected:
                raise self._differs("", kind, str(expected), whole.hexdigest())
            return
        fingerprint = self._fingerprint() if self._is_full and recorded.fingerprint is not None else None
        if fingerprint not in (None, recorded.fingerprint):
            raise self._differs("The header of", "fingerprint", str(recorded.fingerprint), str(fingerprint))

    def _fingerprint(self) -> str | None:
        """The file's fingerprint, made of what has passed; None where not all of it has."""
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
            f"{expected}. Read it again; if it fails again, it is damaged where it lies: save it again.",
            path=path,
            fqn=fqn,
            expected=expected,
            actual=found,
        )


def _hash(digest: RunningDigest, start: int, block: memoryview, cancelled: threading.Event) -> None:
    digest.add(start, block, cancelled, stays=False)


# Digests of what is read in pieces: computed in order while the pieces come in any order, then compared.


_LOOK_SECONDS: Final = 0.1
"""How soon a thread that waits for its turn notices that another one has failed."""


class RunningDigest:
    """Hashes a stretch of bytes whose pieces come in any order, from several threads."""

    def __init__(self, hasher: Hasher, start: int, nbytes: int) -> None:
        """Wait for the first piece.

        Args:
            hasher: What it goes into.
            start: Where the stretch begins in its file.
            nbytes: Of the stretch.
        """
        self.head = b""
        """The first bytes, as many as go into a file's fingerprint."""
        self._hasher = hasher
        self._start, self._next, self._end = start, start, start + nbytes
        self._early: dict[int, memoryview] = {}
        self._changed = threading.Condition()
        self._is_busy = False

    @property
    def is_whole(self) -> bool:
        """Whether all bytes have been hashed."""
        return self._next == self._end

    def hexdigest(self) -> str:
        """The digest."""
        return self._hasher.hexdigest()

    def add(self, start: int, block: memoryview, cancelled: threading.Event, *, stays: bool) -> None:
        """Take a piece.

        Args:
            start: Where it begins in the file. Pieces are begun in the order of their bytes.
            block: Its bytes.
            cancelled: Set by others that failed.
            stays: Whether the memory keeps these bytes; else this waits for the pieces before it.

        Raises:
            InterruptedError: Another piece failed, so that the turn never comes.
        """
        if start == self._start:
            self.head = bytes(block[:FINGERPRINT_BYTES])
        with self._changed:
            while not stays and (self._is_busy or self._next != start):
                if cancelled.is_set():
                    raise InterruptedError("another range failed, or Ctrl-C came")
                self._changed.wait(_LOOK_SECONDS)
            self._early[start] = block
            if self._is_busy:
                return  # who is busy takes it
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
