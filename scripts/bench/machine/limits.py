"""The limits: a plain O_DIRECT write, read or copy of the same bytes by a few threads, and sha256 of them."""

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
"""What each thread hashes again and again: sha256 takes as long as over other bytes, and 2.5 GB need not be made."""
FILL_WORDS = 2**20
SECTOR = 4096
"""What O_DIRECT wants offsets, lengths and addresses to be multiples of."""

Range = tuple[Path, int, int]
"""A file, an offset and a length."""


def ranges_of(files: Sequence[tuple[Path, int]], block: int) -> list[Range]:
    """The blocks of files of the given sizes, the last one of each with its odd length."""
    return [(path, at, min(block, size - at)) for path, size in files for at in range(0, size, block)]


def aligned(length: int) -> int:
    """Round up to a sector."""
    return -(-length // SECTOR) * SECTOR


def starts_of(files: Sequence[tuple[Path, int]]) -> dict[Path, int]:
    """Where each file begins in memory that holds one after another, each at a sector."""
    starts = {}
    start = 0
    for path, size in files:
        starts[path] = start
        start += aligned(size)
    return starts


def anonymous(length: int) -> mmap.mmap:
    """Map page-aligned memory, in huge pages where there are some."""
    memory = mmap.mmap(-1, aligned(length), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def files_of(directory: Path, total: int, file_bytes: int) -> list[tuple[Path, int]]:
    """New files that hold so many bytes, the last one the rest."""
    return [(directory / f"{at}", min(file_bytes, total - at)) for at in range(0, total, file_bytes)]


def random_memory(files: Sequence[tuple[Path, int]]) -> mmap.mmap:
    """Memory for the bytes of some files one after another, filled with random ones."""
    from numpy import frombuffer, random, uint64

    memory = anonymous(sum(aligned(size) for _, size in files))
    words = frombuffer(memory, dtype=uint64)
    generator = random.Generator(random.SFC64(1))
    for at in range(0, words.size, FILL_WORDS):
        piece = words[at : at + FILL_WORDS]
        piece[:] = generator.integers(0, 2**64, size=piece.size, dtype=uint64)
    return memory


def write_files(memory: mmap.mmap, files: Sequence[tuple[Path, int]]) -> None:
    """Write memory into new files one after another, durably: allocated, O_DIRECT, truncated to size, fsynced."""
    view = memoryview(memory)
    starts = starts_of(files)

    def put(path: Path, at: int, length: int, descriptor: int) -> None:
        begin = starts[path] + at
        os.pwrite(descriptor, view[begin : begin + aligned(length)], at)

    _each(put, files, os.O_RDWR | os.O_CREAT | os.O_EXCL)


def sync_files(directory: Path) -> None:
    """Flush the files of a directory, and the directory."""
    for path in [*directory.iterdir(), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def read_files(memory: mmap.mmap | None, files: Sequence[tuple[Path, int]]) -> None:
    """Read files with O_DIRECT into memory one after another, or (None) into the same few blocks again and again."""
    view = memoryview(memory) if memory is not None else None
    starts = starts_of(files)
    buffers: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
    for _ in range(THREADS):
        buffers.put(anonymous(READ_BLOCK))

    def get(path: Path, at: int, length: int, descriptor: int) -> None:
        if view is not None:
            begin = starts[path] + at
            os.preadv(descriptor, [view[begin : begin + aligned(length)]], at)
            return
        buffer = buffers.get()
        os.preadv(descriptor, [memoryview(buffer)[: aligned(length)]], at)
        buffers.put(buffer)

    _each(get, files, os.O_RDONLY)


def copy_files(files: Sequence[tuple[Path, int]], targets: Sequence[tuple[Path, int]]) -> None:
    """Copy the bytes of some files into new ones of other sizes, through a block of each thread, durably."""
    sources = ranges_of(files, WRITE_BLOCK)
    descriptors = {path: os.open(path, os.O_RDONLY | os.O_DIRECT) for path, _ in files}
    buffers: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
    for _ in range(THREADS):
        buffers.put(anonymous(WRITE_BLOCK))
    order = iter(range(10**9))

    def pass_on(path: Path, at: int, length: int, descriptor: int) -> None:
        # The time does not depend on which block goes where, nor on a few shorter ones at the files' ends.
        source, source_at, _ = sources[next(order) % len(sources)]
        buffer = buffers.get()
        view = memoryview(buffer)[: aligned(length)]
        os.preadv(descriptors[source], [view], source_at)
        os.pwrite(descriptor, view, at)
        buffers.put(buffer)

    _each(pass_on, targets, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    for descriptor in descriptors.values():
        os.close(descriptor)


def hashing(total: int, threads: int = 0) -> Callable[[], None]:
    """Return what hashes so many bytes of memory by sha256, as many on each thread; 0: as many threads as cores."""
    threads = threads or len(os.sched_getaffinity(0))
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


def _each(action: Callable[[Path, int, int, int], None], files: Sequence[tuple[Path, int]], flags: int) -> None:
    writes = bool(flags & os.O_CREAT)
    block = WRITE_BLOCK if writes else READ_BLOCK
    descriptors = {path: os.open(path, flags | os.O_DIRECT, 0o600) for path, _ in files}
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            if writes:
                for path, size in files:
                    os.posix_fallocate(descriptors[path], 0, aligned(size))
            futures = [
                pool.submit(action, path, at, length, descriptors[path]) for path, at, length in ranges_of(files, block)
            ]
            for future in futures:
                future.result()
            if writes:
                for path, size in files:
                    os.ftruncate(descriptors[path], size)
                for done in [pool.submit(os.fsync, descriptor) for descriptor in descriptors.values()]:
                    done.result()
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
    if writes:
        parent = os.open(files[0][0].parent, os.O_RDONLY)
        os.fsync(parent)
        os.close(parent)
