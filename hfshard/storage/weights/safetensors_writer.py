"""Write safetensors files straight from tensor memory, with their checksums in the same pass."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from hfshard._util.progress import ProgressCallback
from hfshard._util.threads import cancellable, in_threads
from hfshard.constants import FILES_AT_ONCE, FINGERPRINT_BYTES, FORMAT_VERSION, METADATA_KEY
from hfshard.errors import InvalidArgumentError
from hfshard.storage.disk.block_writer import BlockWriter
from hfshard.storage.disk.direct_io import BLOCK_BYTES, check_setting
from hfshard.storage.disk.fsops import copy_mode, sync, write_all
from hfshard.storage.format.header import build_header
from hfshard.storage.format.index import FileDigest, single_file_metadata
from hfshard.storage.format.integrity import (
    HASHERS,
    TENSOR_DIGEST_HEX,
    Hasher,
    fingerprint_positions,
    new_fingerprint,
    tensor_digest,
)
from hfshard.storage.tensors.tensor_bytes import first_bytes, iter_blocks, tensor_nbytes
from hfshard.storage.tensors.tensor_layout import TensorLike, tensor_layout

COMPLEX_AS_REAL_KEY: Final = "hfshard.complex"
"""Key of a file's `__metadata__`: JSON list of tensors that are complex, and stored as pairs of real numbers."""

WRITERS_VARIABLE: Final = "HFSHARD_WRITERS"
"""The environment variable that says how many files are written at once; with 1, one thread does everything."""


@dataclass(frozen=True, slots=True)
class WriteJob:
    """One file to write."""

    path: str
    tensors: Mapping[str, TensorLike]
    """In the order of their bytes."""
    metadata: Mapping[str, str]
    """The file's `__metadata__`."""
    hfshard_metadata: Mapping[str, Any] | None = None
    """For a single file: what it says about itself (see `index.build_hfshard_metadata`); its digests are added."""
    like: os.stat_result | None = None
    """The file that it will replace."""


def write_shards(
    jobs: Sequence[WriteJob], *, checksum: str | None, progress_callback: ProgressCallback | None = None
) -> list[FileDigest]:
    """Write files durably, several at once, in bounded memory.

    Args:
        jobs: Their paths must not exist.
        checksum: A key of `HASHERS`, or None.
        progress_callback: Called from any thread with the number of bytes of each block that was written.

    Returns:
        The digest of each file, in order.

    Raises:
        OSError: The first error of any file; the others stop. The caller removes what was written.
    """
    await_devices(jobs)
    threads = writer_threads()
    write = partial(_write_shard, checksum=checksum, progress_callback=progress_callback, background=threads > 1)
    return in_threads(write, jobs, threads)


def await_devices(jobs: Sequence[WriteJob]) -> None:
    """Wait for work on the GPUs: the threads that read the tensors use the default stream."""
    if torch.cuda.is_initialized():
        tensors = (tensor for job in jobs for tensor in job.tensors.values())
        for device in {tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.is_cuda}:
            torch.cuda.synchronize(device)


def writer_threads() -> int:
    """Files to write at once, at most."""
    check_setting()
    wanted = os.environ.get(WRITERS_VARIABLE, "")
    if not wanted:
        return FILES_AT_ONCE
    if not (wanted.isascii() and wanted.isdigit() and int(wanted) > 0):
        raise InvalidArgumentError(
            f"The variable {WRITERS_VARIABLE} must be a positive number of threads, got {wanted!r}."
        )
    return int(wanted)


def fingerprint_of(header: bytes, tensors: Sequence[TensorLike]) -> str:
    """The fingerprint that a file with this header and these tensors, in the order of their bytes, will have."""
    fingerprint = new_fingerprint()
    fingerprint.update(header)
    for position in fingerprint_positions(len(tensors)):
        for block in first_bytes(tensors[position], FINGERPRINT_BYTES):
            fingerprint.update(block)
    return fingerprint.hexdigest()


def fingerprint_of_job(job: WriteJob, checksum: str | None) -> str:
    """The fingerprint of the file that `write_shards` would write for a job; only the first bytes are read."""
    return fingerprint_of(blank_header(job, checksum), list(job.tensors.values()))


def file_order(tensors: Mapping[str, TensorLike]) -> dict[str, TensorLike]:
    """Sort tensors by the size of their elements, largest first, so that each is aligned to its own size."""
    return dict(sorted(tensors.items(), key=lambda item: -tensor_layout(item[1]).element_bytes))


def shard_header(tensors: Mapping[str, TensorLike], metadata: Mapping[str, str]) -> bytes:
    """Build the head of a file of these tensors, given in the order of their bytes."""
    layouts = ((name, tensor_layout(tensor)) for name, tensor in tensors.items())
    return build_header(((name, layout.dtype, list(layout.shape), layout.nbytes) for name, layout in layouts), metadata)


def shard_metadata(tensors: Mapping[str, TensorLike], extra: Mapping[str, str]) -> dict[str, str]:
    """Build the `__metadata__` of a shard: what other readers need, what hfshard adds, what the caller adds."""
    complex_names = [name for name, tensor in tensors.items() if tensor_layout(tensor).complex_as_real]
    own = {COMPLEX_AS_REAL_KEY: json.dumps(complex_names, ensure_ascii=False)} if complex_names else {}
    mark = {METADATA_KEY: str(FORMAT_VERSION)}
    return mark | own | dict(extra) | {"format": "pt"} | mark


def _write_shard(
    job: WriteJob,
    cancelled: threading.Event,
    *,
    checksum: str | None,
    progress_callback: ProgressCallback | None,
    background: bool,
) -> FileDigest:
    fd = os.open(job.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        blank = blank_header(job, checksum)
        size = len(blank) + sum(tensor_nbytes(tensor) for tensor in job.tensors.values())
        writer = BlockWriter(fd, size, cancelled, progress_callback, background=background)
        try:
            digest, header = _put_through(job, checksum, blank, writer.write)
            writer.finish()
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


def digest_shard(
    job: WriteJob, checksum: str | None, progress_callback: ProgressCallback | None, cancelled: threading.Event
) -> tuple[FileDigest, bytes]:
    """Compute the digest and the head of the file that `write_shards` would write for a job; nothing is written.

    Without a checksum, only the first bytes of tensors are read, for the fingerprint.

    Raises:
        InterruptedError: `cancelled` was set.
    """
    blank = blank_header(job, checksum)
    if checksum is None:
        digests = {"fingerprint": fingerprint_of(blank, list(job.tensors.values()))}
        return _digest_and_header(job, None, blank, digests)
    tell = cancellable(progress_callback, cancelled)
    return _put_through(job, checksum, blank, lambda block: tell(len(block)))


def blank_header(job: WriteJob, checksum: str | None) -> bytes:
    """Build the head that a file's digests are computed from: with zeros where it states its own digests."""
    return _headers(job, checksum, {})[1]


def _put_through(
    job: WriteJob, checksum: str | None, blank: bytes, put: Callable[[memoryview], object]
) -> tuple[FileDigest, bytes]:
    """Hash a file's bytes and pass them on; return its digest and its final header (`blank` is the one to hash)."""
    output = _Output(put, checksum)
    output.add([memoryview(blank)], fingerprint_bytes=len(blank))
    sampled = set(fingerprint_positions(len(job.tensors)))
    tensors = [
        output.add(iter_blocks(tensor, BLOCK_BYTES), FINGERPRINT_BYTES if position in sampled else 0)
        for position, tensor in enumerate(job.tensors.values())
    ]
    digests = {"fingerprint": output.fingerprint.hexdigest()}
    if checksum is not None and output.hasher is not None:
        digests |= {checksum: output.hasher.hexdigest(), "tensor_digests": "".join(tensors)}
    return _digest_and_header(job, checksum, blank, digests)


def _digest_and_header(
    job: WriteJob, checksum: str | None, blank: bytes, digests: Mapping[str, str]
) -> tuple[FileDigest, bytes]:
    header = blank if job.hfshard_metadata is None else _headers(job, checksum, digests)[0]
    size = len(header) + sum(tensor_nbytes(tensor) for tensor in job.tensors.values())
    return FileDigest(size, **digests), header


def _headers(job: WriteJob, checksum: str | None, digests: Mapping[str, str]) -> tuple[bytes, bytes]:
    """Build the header with these digests in it, and the one with zeros in their place, for computing them."""
    if job.hfshard_metadata is None:
        header = shard_header(job.tensors, job.metadata)
        return header, header
    lengths = {"fingerprint": 32}
    if checksum is not None:
        lengths |= {
            checksum: 64 if checksum == "sha256" else 32,
            "tensor_digests": TENSOR_DIGEST_HEX * len(job.tensors),
        }
    zeros = {name: "0" * length for name, length in lengths.items()}
    own = job.hfshard_metadata

    def stating(values: Mapping[str, str]) -> bytes:
        return shard_header(job.tensors, {**job.metadata, METADATA_KEY: single_file_metadata(own, values)})

    blank = stating(zeros)
    return stating(zeros | dict(digests)) if digests else blank, blank


class _Output:
    """Takes a file's blocks in order: hashes each, and passes it on while it is in the core's cache."""

    def __init__(self, put: Callable[[memoryview], object], checksum: str | None) -> None:
        self._put = put
        self.hasher: Hasher | None = HASHERS[checksum]() if checksum is not None else None
        self.fingerprint = new_fingerprint()

    def add(self, blocks: Iterable[memoryview], fingerprint_bytes: int) -> str:
        """Take the blocks of one tensor, and return its digest ("" if no checksum is wanted).

        Args:
            blocks: Each is valid until the next one is asked for.
            fingerprint_bytes: How many of the first bytes go into the file's fingerprint.
        """
        blocks = self._sampled(blocks, fingerprint_bytes)
        if self.hasher is not None:
            return tensor_digest(self._taken(blocks, self.hasher))
        for block in blocks:
            self._put(block)
        return ""

    def _sampled(self, blocks: Iterable[memoryview], fingerprint_bytes: int) -> Iterator[memoryview]:
        for block in blocks:
            if fingerprint_bytes > 0:
                self.fingerprint.update(block[:fingerprint_bytes])
                fingerprint_bytes -= len(block)
            yield block

    def _taken(self, blocks: Iterable[memoryview], hasher: Hasher) -> Iterator[memoryview]:
        for block in blocks:
            hasher.update(block)
            yield block
            self._put(block)
