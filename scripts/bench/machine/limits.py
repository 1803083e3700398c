"""Limits of the machine: a plain O_DIRECT write or read of the same bytes by a few threads, and their sha256."""

from __future__ import annotations

import hashlib
import mmap
import os
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

THREADS = 4
"""More do not help on any disk that was tried."""
WRITE_BLOCK = 2**20
"""The fastest of 1 to 16 MiB here, by a fifth."""
READ_BLOCK = 2 * 2**20
"""The fastest of 1 to 8 MiB here, by a tenth."""
HASH_BYTES = 32 * 2**20
"""Bytes that each thread hashes again and again: as fast as other bytes, and 2.5 GB need not be made."""
FILL_WORDS = 2**20
SECTOR = 4096
"""O_DIRECT wants offsets, lengths and addresses to be multiples of it."""

Files = Sequence[tuple[Path, int]]
"""Files with their sizes."""


def aligned(length: int) -> int:
    """Round up to a sector."""
    return -(-length // SECTOR) * SECTOR


def anonymous(length: int) -> mmap.mmap:
    """Map page-aligned memory, in huge pages where there are some."""
    memory = mmap.mmap(-1, aligned(length), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def random_memory(files: Files) -> mmap.mmap:
    """Map memory for some files one after another, each at a sector, filled with random bytes."""
    from numpy import frombuffer, random, uint64

    memory = anonymous(sum(aligned(size) for _, size in files))
    words = frombuffer(memory, dtype=uint64)
    generator = random.Generator(random.SFC64(1))
    for at in range(0, words.size, FILL_WORDS):
        piece = words[at : at + FILL_WORDS]
        piece[:] = generator.integers(0, 2**64, size=piece.size, dtype=uint64)
    return memory


def write_files(memory: mmap.mmap, files: Files) -> None:
    """Write memory into new files one after another, durably: allocated, O_DIRECT, truncated to size, fsynced."""
    view = memoryview(memory)
    starts = _starts_of(files)
    descriptors = {path: os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600) for path, _ in files}

    def put(path: Path, at: int, length: int) -> None:
        begin = starts[path] + at
        os.pwrite(descriptors[path], view[begin : begin + aligned(length)], at)

    try:
        for path, size in files:
            os.posix_fallocate(descriptors[path], 0, aligned(size))
        _each(put, files, WRITE_BLOCK)
        for path, size in files:
            os.ftruncate(descriptors[path], size)
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(os.fsync, descriptors.values()))
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
    _sync(files[0][0].parent)


def sync_files(directory: Path) -> None:
    """Flush the files of a directory, and the directory."""
    for path in [*directory.iterdir(), directory]:
        _sync(path)


def read_files(memory: mmap.mmap | None, files: Files) -> None:
    """Read files with O_DIRECT into memory one after another, or (None) into the same few blocks again and again."""
    view = memoryview(memory) if memory is not None else None
    starts = _starts_of(files)
    descriptors = {path: os.open(path, os.O_RDONLY | os.O_DIRECT) for path, _ in files}
    buffers: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
    for _ in range(THREADS):
        buffers.put(anonymous(READ_BLOCK))

    def get(path: Path, at: int, length: int) -> None:
        if view is not None:
            begin = starts[path] + at
            os.preadv(descriptors[path], [view[begin : begin + aligned(length)]], at)
            return
        buffer = buffers.get()
        os.preadv(descriptors[path], [memoryview(buffer)[: aligned(length)]], at)
        buffers.put(buffer)

    try:
        _each(get, files, READ_BLOCK)
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


def hash_bytes(total: int, threads: int) -> Callable[[], None]:
    """Return a function that hashes so many bytes of memory by sha256, as many on each thread."""
    block = memoryview(os.urandom(HASH_BYTES))

    def hash_part(_: int) -> None:
        hasher = hashlib.sha256()
        for at in range(0, total // threads, HASH_BYTES):
            hasher.update(block[: total // threads - at])
        hasher.digest()

    def hash_all() -> None:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(hash_part, range(threads)))

    return hash_all


def _starts_of(files: Files) -> dict[Path, int]:
    """Find where each file begins in memory that holds one after another, each at a sector."""
    starts = {}
    start = 0
    for path, size in files:
        starts[path] = start
        start += aligned(size)
    return starts


def _each(action: Callable[[Path, int, int], None], files: Files, block: int) -> None:
    """Do it for each block of the files, by several threads; the last one of a file has an odd length."""
    with ThreadPoolExecutor(THREADS) as pool:
        blocks = [(path, at, min(block, size - at)) for path, size in files for at in range(0, size, block)]
        for future in [pool.submit(action, *one) for one in blocks]:
            future.result()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
