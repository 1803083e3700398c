"""Write or stream safetensors files straight from tensor memory, computing checksums in the same pass."""

from __future__ import annotations

import json
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Self

import torch

from hfshard._util.progress import ProgressCallback
from hfshard._util.threads import cancellable, run_in_threads
from hfshard.constants import COPY_BYTES, FILES_AT_ONCE, FINGERPRINT_BYTES, FORMAT_VERSION, METADATA_KEY
from hfshard.disk.byte_source import SeekableReader
from hfshard.disk.direct_io import BLOCK_BYTES, BlockWriter
from hfshard.disk.fsops import copy_mode, sync, write_all
from hfshard.errors import InvalidArgumentError
from hfshard.format.header import build_header_from_entries, header_entries
from hfshard.format.index import (
    HASHERS,
    TENSOR_DIGEST_HEX,
    FileDigest,
    Hasher,
    fingerprint_positions,
    new_fingerprint,
    single_file_metadata,
    tensor_digest,
    tensor_digest_of_bytes,
)
from hfshard.tensors.stored_tensor import (
    TensorLike,
    element_bytes,
    first_bytes,
    is_complex_as_real,
    iter_blocks,
    small_bytes,
    tensor_layouts,
    tensor_nbytes,
)

COMPLEX_AS_REAL_KEY: Final = "hfshard.complex"
"""Key of a file's `__metadata__`: JSON list of the complex tensors, which are stored as pairs of real numbers."""

WRITERS_VARIABLE: Final = "HFSHARD_WRITERS"
"""Environment variable: the number of files to write at once; with 1, one thread does everything."""


@dataclass(frozen=True, slots=True)
class WriteJob:
    """One file to write."""

    path: str
    tensors: Mapping[str, TensorLike]
    """Tensors in the order of their bytes."""
    metadata: Mapping[str, str]
    """The file's `__metadata__`."""
    hfshard_metadata: Mapping[str, Any] | None = None
    """For a single file: its own description (see `index.build_hfshard_metadata`), to which its digests are added."""
    like: os.stat_result | None = None
    """Status of the file that it will replace."""

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(map(tensor_nbytes, self.tensors.values()))


def write_shards(
    jobs: Sequence[WriteJob], *, checksum: str | None, progress_callback: ProgressCallback | None = None
) -> list[FileDigest]:
    """Write files durably, several at once, in bounded memory.

    Args:
        jobs: The files to write; their paths must not exist.
        checksum: A key of `HASHERS`, or None.
        progress_callback: Called from any thread with the number of bytes of each written block.

    Returns:
        The digest of each file, in order.

    Raises:
        OSError: The first error of any file; the others stop. The caller removes what was written.
    """
    synchronize_devices(jobs)
    threads = writer_threads()
    write = partial(
        _write_shard,
        checksum=checksum,
        progress_callback=progress_callback,
        background=threads > 1,
        hash_apart=threads > 1 and 2 * len(jobs) <= (os.cpu_count() or 1),  # else the files keep all cores busy
    )
    return run_in_threads(write, jobs, threads)


def synchronize_devices(jobs: Sequence[WriteJob]) -> None:
    """Wait for pending GPU work: the threads that read the tensors use the default stream."""
    if torch.cuda.is_initialized():
        tensors = (tensor for job in jobs for tensor in job.tensors.values())
        for device in {tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.is_cuda}:
            torch.cuda.synchronize(device)


def writer_threads() -> int:
    """Return the most files to write at once."""
    wanted = os.environ.get(WRITERS_VARIABLE, "")
    if not wanted:
        return FILES_AT_ONCE
    if not (wanted.isascii() and wanted.isdigit() and int(wanted) > 0):
        raise InvalidArgumentError(
            f"The variable {WRITERS_VARIABLE} must be a positive number of threads, got {wanted!r}."
        )
    return int(wanted)


def fingerprint_of(header: bytes, tensors: Sequence[TensorLike]) -> str:
    """Compute the fingerprint of a file with this header and these tensors, given in the order of their bytes."""
    fingerprint = new_fingerprint()
    fingerprint.update(header)
    for position in fingerprint_positions(len(tensors)):
        for block in first_bytes(tensors[position], FINGERPRINT_BYTES):
            fingerprint.update(block)
    return fingerprint.hexdigest()


def fingerprint_of_job(job: WriteJob, checksum: str | None) -> str:
    """Compute the fingerprint of the file that `write_shards` would write for a job, reading only the first bytes."""
    return fingerprint_of(blank_header(job, checksum), list(job.tensors.values()))


def file_order(tensors: Mapping[str, TensorLike]) -> dict[str, TensorLike]:
    """Sort tensors by the size of their elements, largest first, so that each is aligned to its own size."""
    if len(set(map(element_bytes, tensors.values()))) <= 1:
        return dict(tensors)
    return dict(sorted(tensors.items(), key=lambda item: -element_bytes(item[1])))


def shard_metadata(tensors: Mapping[str, TensorLike], extra: Mapping[str, str]) -> dict[str, str]:
    """Build a shard's `__metadata__` from the entries of other readers, hfshard and the caller."""
    complex_names = [name for name, tensor in tensors.items() if is_complex_as_real(tensor)]
    own = {COMPLEX_AS_REAL_KEY: json.dumps(complex_names, ensure_ascii=False)} if complex_names else {}
    mark = {METADATA_KEY: str(FORMAT_VERSION)}
    return mark | own | dict(extra) | {"format": "pt"} | mark


@dataclass(frozen=True, slots=True)
class _Head:
    """The header of a file that is being written: its tensor entries are built once, its digests are added later."""

    job: WriteJob
    checksum: str | None
    entries: bytes
    """Header entries of the tensors."""
    data_bytes: int
    """Bytes of all tensors together."""

    @classmethod
    def of(cls, job: WriteJob, checksum: str | None) -> Self:
        """Begin the header of the file that `write_shards` would write for a job."""
        layouts = tensor_layouts(job.tensors.values())
        named = zip(job.tensors, layouts, strict=True)
        entries = header_entries((name, layout.dtype, layout.shape, layout.nbytes) for name, layout in named)
        return cls(job, checksum, entries, sum(layout.nbytes for layout in layouts))

    def blank(self) -> bytes:
        """Build the header from which the digests are computed, with zeros in the place of the file's own digests."""
        lengths = {"fingerprint": 32}
        if self.checksum is not None:
            lengths |= {
                self.checksum: 64 if self.checksum == "sha256" else 32,
                "tensor_digests": TENSOR_DIGEST_HEX * len(self.job.tensors),
            }
        return self.with_digests({name: "0" * length for name, length in lengths.items()})

    def with_digests(self, digests: Mapping[str, str]) -> bytes:
        """Build the header with these digests, in the order of `blank`; only a single file contains its own digests."""
        metadata = dict(self.job.metadata)
        if self.job.hfshard_metadata is not None:
            metadata[METADATA_KEY] = single_file_metadata(self.job.hfshard_metadata, digests)
        return build_header_from_entries(self.entries, metadata)


def _write_shard(
    job: WriteJob,
    cancelled: threading.Event,
    *,
    checksum: str | None,
    progress_callback: ProgressCallback | None,
    background: bool,
    hash_apart: bool,
) -> FileDigest:
    fd = os.open(job.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        head = _Head.of(job, checksum)
        blank = head.blank()
        size = len(blank) + head.data_bytes
        hasher = _new_hasher(checksum)
        hash_block = hasher.update if hasher is not None and hash_apart else None
        writer = BlockWriter(fd, size, cancelled, progress_callback, background=background, hash_block=hash_block)
        put = writer.write if hash_apart else _hashed(writer.write, hasher)
        try:
            digest, header = _put_through(head, blank, put, writer.finish, hasher)
        finally:
            writer.close()
        if header != blank:
            os.lseek(fd, 0, os.SEEK_SET)
            write_all(fd, header)
        copy_mode(fd, job.like)
        sync(fd, job.path)
    finally:
        os.close(fd)
    return digest


def stream_shard(
    job: WriteJob, checksum: str | None, open_output: Callable[[int], Callable[[memoryview], object]]
) -> FileDigest:
    """Stream the bytes that `write_shards` would write for a job to an output that cannot seek.

    Tensors are read once, or twice for a single file, which starts with its own digests.

    Args:
        job: The file to stream; its path is not used.
        checksum: A key of `HASHERS`, or None.
        open_output: Takes the number of bytes, and returns a function that takes each block, valid until it returns.
    """
    head = _Head.of(job, checksum)
    blank = head.blank()
    put = open_output(len(blank) + head.data_bytes)
    if job.hfshard_metadata is None:
        return _hash_and_put(head, blank, put)[0]
    digest, header = digest_shard(job, checksum, None, threading.Event())
    output = TensorWriter(put, with_digests=False)
    output.add([memoryview(header)], 0)
    for tensor in job.tensors.values():
        output.add_tensor(tensor, 0)
    output.flush()
    return digest


def digest_shard(
    job: WriteJob, checksum: str | None, progress_callback: ProgressCallback | None, cancelled: threading.Event
) -> tuple[FileDigest, bytes]:
    """Compute the digest and header of the file that `write_shards` would write for a job, without writing.

    Without a checksum, only the tensors' first bytes are read, for the fingerprint.

    Raises:
        InterruptedError: `cancelled` was set.
    """
    head = _Head.of(job, checksum)
    blank = head.blank()
    if checksum is None:
        return _digest_and_header(head, blank, {"fingerprint": fingerprint_of(blank, list(job.tensors.values()))})
    tell = cancellable(progress_callback, cancelled)
    return _hash_and_put(head, blank, lambda block: tell(len(block)))


def blank_header(job: WriteJob, checksum: str | None) -> bytes:
    """Build the header from which a file's digests are computed, with zeros in the place of its own digests."""
    return _Head.of(job, checksum).blank()


def _hash_and_put(head: _Head, blank: bytes, put: Callable[[memoryview], object]) -> tuple[FileDigest, bytes]:
    """Do what `_put_through` does, and hash each block."""
    hasher = _new_hasher(head.checksum)
    return _put_through(head, blank, _hashed(put, hasher), lambda: None, hasher)


def _hashed(put: Callable[[memoryview], object], hasher: Hasher | None) -> Callable[[memoryview], object]:
    """Wrap `put` so that `hasher` gets each block first, which is then in the core's cache."""
    if hasher is None:
        return put

    def hash_and_put(block: memoryview) -> None:
        hasher.update(block)
        put(block)

    return hash_and_put


def _put_through(
    head: _Head,
    blank: bytes,
    put: Callable[[memoryview], object],
    finish: Callable[[], object],
    hasher: Hasher | None,
) -> tuple[FileDigest, bytes]:
    """Pass on a file's blocks, each valid until `put` returns; return the file's digest and header.

    When `finish` has returned, `hasher` must have got all of them.
    """
    output = TensorWriter(put, with_digests=hasher is not None)
    output.add([memoryview(blank)], fingerprint_bytes=len(blank))
    sampled = set(fingerprint_positions(len(head.job.tensors)))
    tensors = [
        output.add_tensor(tensor, FINGERPRINT_BYTES if position in sampled else 0)
        for position, tensor in enumerate(head.job.tensors.values())
    ]
    output.flush()
    finish()
    digests = {"fingerprint": output.fingerprint.hexdigest()}
    if head.checksum is not None and hasher is not None:
        digests |= {head.checksum: hasher.hexdigest(), "tensor_digests": "".join(tensors)}
    return _digest_and_header(head, blank, digests)


def _new_hasher(checksum: str | None) -> Hasher | None:
    return HASHERS[checksum]() if checksum is not None else None


def _digest_and_header(head: _Head, blank: bytes, digests: Mapping[str, str]) -> tuple[FileDigest, bytes]:
    header = blank if head.job.hfshard_metadata is None else head.with_digests(digests)
    return FileDigest(len(header) + head.data_bytes, **digests), header


# Output path of a file's bytes: each tensor gets its digest, and small tensors are passed on together.


_SMALL_BYTES: Final = 16 * 1024
"""Tensors of at most this size are gathered: separately, 100,000 of them took 1.1 s to hash and write, not 0.2."""

_TOGETHER_BYTES: Final = 256 * 1024
"""Gathered bytes per write: they stay in the core's cache."""


class TensorWriter:
    """Writer of a file's tensors in order: it hashes each block, and passes it on while it is in the core's cache."""

    def __init__(self, put: Callable[[memoryview], object], *, with_digests: bool) -> None:
        """Begin a file.

        Args:
            put: Takes each block, which is valid until it returns.
            with_digests: Whether to compute the tensors' digests.
        """
        self._put = put
        self._with_digests = with_digests
        self.fingerprint = new_fingerprint()
        self._small: list[bytes] = []
        self._small_bytes = 0

    def add_tensor(self, tensor: TensorLike, fingerprint_bytes: int) -> str:
        """Add all bytes of the next tensor (see `add`); small tensors are passed on together."""
        raw = small_bytes(tensor, _SMALL_BYTES)
        if raw is None:
            return self.add(iter_blocks(tensor, BLOCK_BYTES), fingerprint_bytes)
        return self._add_small(raw, fingerprint_bytes)

    def flush(self) -> None:
        """Pass on the gathered small tensors; must also be called after the last tensor."""
        if self._small_bytes:
            self._put(memoryview(b"".join(self._small)))
        self._small.clear()
        self._small_bytes = 0

    def add(self, blocks: Iterable[memoryview], fingerprint_bytes: int) -> str:
        """Add the blocks of one tensor, and return its digest ("" without digests).

        Args:
            blocks: The tensor's blocks; each is valid until the next one is requested.
            fingerprint_bytes: Number of first bytes that go into the file's fingerprint.
        """
        self.flush()
        blocks = self._passed_on(blocks, fingerprint_bytes)
        if self._with_digests:
            return tensor_digest(blocks)
        for _ in blocks:
            continue
        return ""

    def _add_small(self, raw: bytes, fingerprint_bytes: int) -> str:
        if fingerprint_bytes:
            self.fingerprint.update(raw[:fingerprint_bytes])
        self._small.append(raw)
        self._small_bytes += len(raw)
        if self._small_bytes >= _TOGETHER_BYTES:
            self.flush()
        return tensor_digest_of_bytes(raw) if self._with_digests else ""

    def _passed_on(self, blocks: Iterable[memoryview], fingerprint_bytes: int) -> Iterator[memoryview]:
        for block in blocks:
            if fingerprint_bytes > 0:
                self.fingerprint.update(block[:fingerprint_bytes])
                fingerprint_bytes -= len(block)
            yield block
            self._put(block)


# A virtual safetensors file: reads take their bytes from a header and tensors.


class SafetensorsStream(SeekableReader):
    """Reader of the file with this header and these tensors; it copies at most one block of a tensor at a time."""

    def __init__(self, header: bytes, tensors: Sequence[TensorLike]) -> None:
        """Start at the first byte.

        Args:
            header: All bytes before the data.
            tensors: Tensors in the order of their bytes; they must not change until the last byte is read.
        """
        self._header, self._tensors = header, tensors
        self._starts = [0]
        end = len(header)
        for tensor in tensors:
            self._starts.append(end)
            end += tensor_nbytes(tensor)
        super().__init__(end)
        self._rest: Iterator[memoryview] = iter(())
        self._block = memoryview(b"")
        self._block_end = -1
        """End of the last block that was read; reading on from there needs no search."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Read the next `size` bytes, or fewer at the end; all remaining bytes if it is None or negative."""
        left = self._size - self._position
        left = max(0, left if size is None or size < 0 else min(size, left))
        parts = []
        while left:
            view = self._next(left)
            parts.append(view.tobytes())  # a block may become invalid when the next one is requested
            left -= len(view)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _next(self, limit: int) -> memoryview:
        """Read 1 to `limit` bytes; the position must be before the end."""
        if self._block_end - len(self._block) != self._position or not self._block:
            self._find()
        view = self._block[:limit]
        self._block = self._block[len(view) :]
        self._position += len(view)
        return view

    def _find(self) -> None:
        """Load the block that contains the position, starting there."""
        if self._block_end != self._position:
            number = bisect_right(self._starts, self._position) - 1
            at = self._starts[number]
            self._rest = (
                iter_blocks(self._tensors[number - 1], COPY_BYTES) if number else iter([memoryview(self._header)])
            )
        else:
            at = self._position
        for block in self._rest:
            if at + len(block) > self._position:
                self._block, self._block_end = block[self._position - at :], at + len(block)
                return
            at += len(block)
        # The tensor ended, and the next one begins here (bisect skips empty ones).
        self._block_end = -1
        self._find()
