"""A safetensors file whose bytes are asked for by ranges: its header first, then what is wanted of its tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import islice
from typing import Any, Final, Protocol

from hfshard._util.threads import result_of, start_thread, wait_for
from hfshard.disk.direct_io import BLOCK_BYTES
from hfshard.errors import DamagedCheckpointError, remedy
from hfshard.format.header import LENGTH_BYTES, read_header_length
from hfshard.format.index import FileDigest
from hfshard.storage.weights.ranged.read_ahead import MOST_BYTES, forget, read_ahead
from hfshard.storage.weights.safetensors_shard import SafetensorsShard

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
