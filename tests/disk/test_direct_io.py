"""Memory for direct I/O: at a page, apart from each other, in huge pages where the system has them."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import mmap
import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import hfshard
from hfshard.disk import direct_io
from hfshard.disk.direct_io import (
    BLOCK_BYTES,
    HUGE_PAGE_BYTES,
    BlockWriter,
    FileRange,
    aligned_block,
    aligned_blocks,
    is_cached,
    is_networked,
    open_direct,
    read_blocks,
    read_ranges,
    read_spots,
)
from hfshard.errors import InvalidArgumentError
from tests.helpers.page_cache import make_cold
from tests.helpers.threads import no_thread_is_left


def address(block: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(block))


@pytest.mark.parametrize("count_bytes", [1, 4096, 5000, 1024 * 1024, 2 * 1024 * 1024 + 8192])
@pytest.mark.parametrize("count", [1, 3, 4])
def test_blocks_begin_at_a_page_and_do_not_overlap(count: int, count_bytes: int) -> None:
    blocks = aligned_blocks(count, count_bytes)
    for number, block in enumerate(blocks):
        assert len(block) == count_bytes and address(block) % mmap.PAGESIZE == 0
        block[:] = bytes([number + 1]) * count_bytes
    assert [set(block) for block in blocks] == [{number + 1} for number in range(count)]


def test_large_blocks_share_huge_pages_and_begin_at_one() -> None:
    blocks = aligned_blocks(4, HUGE_PAGE_BYTES // 2)
    begin = address(blocks[0])
    assert begin % HUGE_PAGE_BYTES == 0
    assert [address(block) - begin for block in blocks] == [0, 1_048_576, 2_097_152, 3_145_728]


def test_a_block_keeps_its_memory() -> None:
    block = aligned_block(HUGE_PAGE_BYTES)
    block[-3:] = b"end"
    for _ in range(4):  # would take the memory that the first one gave back
        aligned_block(HUGE_PAGE_BYTES)[:] = bytes(HUGE_PAGE_BYTES)
    assert bytes(block[-3:]) == b"end"


class _RefusesAdvice(mmap.mmap):
    def madvise(self, *_arguments: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


@pytest.mark.parametrize("lacks", ["kernel", "python"])
def test_without_huge_pages_there_is_memory_too(
    lacks: str, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    if lacks == "kernel":
        monkeypatch.setattr(mmap, "mmap", _RefusesAdvice)
    else:
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    block = aligned_block(3 * 1024 * 1024)
    block[:] = bytes([7]) * len(block)
    assert address(block) % mmap.PAGESIZE == 0 and set(block) == {7}
    assert not recwarn.list


def test_a_local_disk_is_not_taken_for_a_remote_one(tmp_path: Path) -> None:
    assert not is_networked(tmp_path.stat().st_dev)
    assert not is_networked(os.makedev(4095, 1))


# Reading block by block: the same bytes from the page cache and past it, wherever a stretch begins and ends.

SIZE = 9 * 1024 * 1024 + 4096 + 77
RAW = (bytes(range(251)) * (SIZE // 251 + 1))[:SIZE]

STRETCHES = [
    (0, SIZE),
    (4096, SIZE - 4096),
    (4097, SIZE - 4097),
    (1, 6 * BLOCK_BYTES),
    (8 * 1024 * 1024 + 5, 4096),
    (SIZE - 77, 77),
    (100, 0),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "x"
    path.write_bytes(RAW)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return path


@contextmanager
def opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


@pytest.mark.parametrize(("start", "count"), STRETCHES)
@pytest.mark.parametrize("block_bytes", [2048, 4096, 10240, BLOCK_BYTES, 3 * BLOCK_BYTES + 1])
@pytest.mark.parametrize("is_cold", [True, False])
def test_a_stretch_comes_in_blocks_of_one_size_and_a_last_one(
    is_cold: bool, block_bytes: int, start: int, count: int, path: Path
) -> None:
    with opened(path) as fd:
        if is_cold:
            make_cold(path)
        blocks = [bytes(block) for block in read_blocks(fd, start, count, block_bytes)]
    assert b"".join(blocks) == RAW[start : start + count]
    assert [len(block) for block in blocks[:-1]] == [block_bytes] * (len(blocks) - 1)
    assert 0 < len(blocks[-1]) <= block_bytes if count else blocks == []


@pytest.mark.parametrize("is_cold", [True, False])
def test_ranges_of_several_files_come_one_after_the_other(is_cold: bool, path: Path) -> None:
    other = path.with_name("y")
    other.write_bytes(RAW[::-1])
    with open(other, "rb") as file:
        os.fsync(file.fileno())
    if is_cold:
        make_cold(path)
        make_cold(other)
    places = [(path, 0, 77), (other, 4097, 5 * BLOCK_BYTES), (path, BLOCK_BYTES + 1, BLOCK_BYTES), (other, SIZE - 5, 5)]
    ranges = [FileRange(partial(opened, file), start, count) for file, start, count in places]
    files = len(os.listdir("/proc/self/fd"))

    with no_thread_is_left():
        blocks = [bytes(block) for block in read_ranges(ranges)]

    assert [len(block) for block in blocks] == [77, *[BLOCK_BYTES] * 6, 5]
    assert b"".join(blocks) == b"".join(
        (RAW if file == path else RAW[::-1])[start : start + count] for file, start, count in places
    )
    assert len(os.listdir("/proc/self/fd")) == files


def test_a_file_that_ends_early_ends_the_ranges(path: Path) -> None:
    make_cold(path)
    os.truncate(path, 3 * BLOCK_BYTES)
    ranges = [FileRange(partial(opened, path), start, 2 * BLOCK_BYTES) for start in (2 * BLOCK_BYTES, 0)]

    assert b"".join(map(bytes, read_ranges(ranges))) == RAW[2 * BLOCK_BYTES : 3 * BLOCK_BYTES]


def test_a_cold_file_is_read_past_the_page_cache_and_stays_cold(path: Path) -> None:
    with opened(path) as fd:
        make_cold(path)
        assert b"".join(bytes(block) for block in read_blocks(fd, 0, SIZE)) == RAW
        assert not is_cached(fd, 0, SIZE)


def test_a_file_that_will_be_mapped_is_brought_into_the_page_cache(path: Path) -> None:
    with opened(path) as fd:
        make_cold(path)
        assert b"".join(bytes(block) for block in read_blocks(fd, 0, SIZE, keep_cached=True)) == RAW
        assert is_cached(fd, 0, SIZE)


def test_with_o_direct_turned_off_all_goes_through_the_page_cache(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HFSHARD_DIRECT", "0")
    with opened(path) as fd:
        make_cold(path)
        assert b"".join(bytes(block) for block in read_blocks(fd, 0, SIZE)) == RAW
        assert is_cached(fd, 0, SIZE)


def test_a_file_that_was_cut_short_gives_the_bytes_that_there_are(path: Path) -> None:
    with opened(path) as fd:
        make_cold(path)
        os.truncate(path, 5_000_000)
        assert b"".join(bytes(block) for block in read_blocks(fd, 4096, SIZE - 4096)) == RAW[4096:5_000_000]


def test_where_direct_reads_are_refused_the_page_cache_serves(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, refused = os.preadv, []
    with opened(path) as fd:
        make_cold(path)

        def refuses(at: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
            if at != fd:
                refused.append(offset)
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return real(at, buffers, offset, flags)

        monkeypatch.setattr(os, "preadv", refuses)
        assert b"".join(bytes(block) for block in read_blocks(fd, 5, SIZE - 5)) == RAW[5:]
    assert refused


def test_an_error_of_the_disk_is_raised(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(path) as fd:
        make_cold(path)

        def fails(*_arguments: object) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(direct_io, "is_cached", lambda *_arguments: False)
        monkeypatch.setattr(os, "preadv", fails)
        with pytest.raises(OSError, match="Input/output error"):
            list(read_blocks(fd, 0, SIZE))


PLACES = [(0, 4096), (4096, 4096), (5_000_000, 77), (4097, 1), (SIZE - 77, 77), (8192, 4096), (SIZE - 10, 4096)]


@pytest.mark.parametrize("direct", ["", "0", "refused"])
@pytest.mark.parametrize("is_cold", [True, False])
def test_small_places_are_read_in_their_order(
    is_cold: bool, direct: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if direct == "refused":
        monkeypatch.setattr(direct_io, "open_direct", lambda _fd: -1)
    else:
        monkeypatch.setenv("HFSHARD_DIRECT", direct)
    with opened(path) as fd:
        if is_cold:
            make_cold(path)
        assert list(read_spots(fd, 0, SIZE, PLACES)) == [RAW[at : at + count] for at, count in PLACES]
        assert list(read_spots(fd, 0, SIZE, [])) == []


def test_small_places_of_a_cold_file_leave_it_cold(path: Path) -> None:
    # Small pages in the cache would keep the file from coming into it in huge ones.
    places = [(at, 4096) for at in range(0, SIZE - 4096, SIZE // 8)]
    files = len(os.listdir("/proc/self/fd"))
    with opened(path) as fd:
        make_cold(path)
        assert len(list(read_spots(fd, 0, SIZE, places))) == 8
        assert not any(is_cached(fd, at, 4096) for at, _ in places)
    assert len(os.listdir("/proc/self/fd")) == files


def test_many_small_places_of_a_cold_file_are_read_once_for_all_that_read_it(path: Path) -> None:
    places = [(at, 4096) for at in range(0, SIZE - 4096, SIZE // 16)]
    with opened(path) as fd:
        make_cold(path)
        assert len(list(read_spots(fd, 0, SIZE, places))) == 16
        assert all(is_cached(fd, at, 4096) for at, _ in places)


@pytest.mark.parametrize("stretch", [(0, SIZE), (5_000_000, SIZE - 5_000_000), (4097, 1), (SIZE - 1, 1), (0, 0)])
def test_a_stretch_is_cached_once_it_was_read(stretch: tuple[int, int], path: Path) -> None:
    with opened(path) as fd:
        make_cold(path)
        assert not is_cached(fd, *stretch)
        assert len(os.pread(fd, SIZE, 0)) == SIZE
        assert is_cached(fd, *stretch)


@pytest.mark.parametrize("call", ["_MMAP", "mincore"])
def test_where_the_system_does_not_say_a_file_counts_as_cached(
    call: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(path) as fd:
        make_cold(path)
        if call == "mincore":
            monkeypatch.setattr(direct_io, "LIBRARY", SimpleNamespace(mincore=lambda *_: -1))
        else:
            monkeypatch.setattr(direct_io, call, lambda *_: direct_io._MAP_FAILED)
        assert is_cached(fd, 0, SIZE)
        assert b"".join(bytes(block) for block in read_blocks(fd, 0, SIZE)) == RAW


def test_a_reader_that_stops_early_leaves_no_thread_and_no_file_open(path: Path) -> None:
    with opened(path) as fd:
        make_cold(path)
        files = len(os.listdir("/proc/self/fd"))
        with no_thread_is_left():
            blocks = read_blocks(fd, 0, SIZE)
            next(blocks)
            blocks.close()  # type: ignore[attr-defined]
        assert len(os.listdir("/proc/self/fd")) == files


def test_a_file_is_opened_again_though_its_name_is_gone(path: Path) -> None:
    with opened(path) as fd:
        direct = open_direct(fd)
        if direct < 0:
            pytest.skip("NO O_DIRECT HERE")
        os.close(direct)
        os.unlink(path)
        path.write_bytes(b"another file by that name")
        direct, block = open_direct(fd), aligned_block(8192)
        assert os.preadv(direct, [block], 4096) == 8192
        assert bytes(block) == RAW[4096:12288]
        os.close(direct)


def test_a_reading_that_nobody_ends_does_not_keep_the_process(path: Path) -> None:
    # As one that a traceback holds: `raise` in a function that was given the blocks.
    with opened(path) as fd:
        make_cold(path)
        blocks = read_blocks(fd, 0, SIZE)
        next(blocks)
        reading = [one.daemon for one in threading.enumerate() if one.name == "hfshard-read"]
        next(blocks, None)
        blocks.close()  # type: ignore[attr-defined]
    assert reading == [True]


# The aligned writer: the same bytes by every path, and errors that reach the caller.

WRITTEN_BYTES = 5 * 1024 * 1024 + 4096 * 3 + 77
"""More than the blocks that are under way at once, with an end that is not a multiple of anything."""

PIECES = (1, 4095, 77, BLOCK_BYTES, 3 * BLOCK_BYTES + 13, 511)
"""Views of these sizes in turn: smaller and larger than a block, and across its end."""

Pwrite = Callable[[int, memoryview, int], int]


def contents(size: int) -> bytes:
    return bytes(range(251)) * (size // 251) + bytes(range(size % 251))


def written(
    path: Path,
    raw: bytes,
    *,
    background: bool = True,
    cancelled: threading.Event | None = None,
    hash_block: Callable[[memoryview], object] | None = None,
) -> bytes:
    """What stands in a file after its bytes were handed over in pieces, some of which are wiped afterwards."""
    told: list[int] = []
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        writer = BlockWriter(
            fd, len(raw), cancelled or threading.Event(), told.append, background=background, hash_block=hash_block
        )
        try:
            at = number = 0
            while at < len(raw):
                count = PIECES[number % len(PIECES)]
                piece = bytearray(raw[at : at + count]) if number % 2 else raw[at : at + count]
                writer.write(memoryview(piece))
                if isinstance(piece, bytearray):
                    piece[:] = bytes(len(piece))
                at, number = at + count, number + 1
            writer.finish()
        finally:
            writer.close()
    finally:
        os.close(fd)
    assert sum(told) == len(raw)
    return path.read_bytes()


def watch(monkeypatch: pytest.MonkeyPatch, instead: Pwrite | None = None) -> list[tuple[bool, int, int]]:
    """Of each write: whether it goes past the page cache, where it begins, how long it is.

    Args:
        monkeypatch: Of the test.
        instead: What is done instead; of several blocks with the first one, as if no more had been written.
    """
    real, real_of_several, seen = os.pwrite, os.pwritev, []

    def watched(fd: int, block: memoryview, at: int) -> int:
        seen.append((bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT), at, len(block)))
        return instead(fd, block, at) if instead is not None else real(fd, block, at)

    def watched_several(fd: int, blocks: list[memoryview], at: int) -> int:
        if instead is not None:
            return watched(fd, blocks[0], at)
        seen.append((bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT), at, sum(map(len, blocks))))
        return real_of_several(fd, blocks, at)

    monkeypatch.setattr(os, "pwrite", watched)
    monkeypatch.setattr(os, "pwritev", watched_several)
    return seen


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, WRITTEN_BYTES])
@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("direct", ["0", "1"])
def test_every_path_writes_the_same_bytes(
    direct: str, background: bool, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HFSHARD_DIRECT", direct)
    assert written(tmp_path / "x", contents(size), background=background) == contents(size)


def test_where_no_thread_can_be_started_the_caller_does_its_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert written(tmp_path / "x", contents(WRITTEN_BYTES)) == contents(WRITTEN_BYTES)


@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES, BLOCK_BYTES + 1, WRITTEN_BYTES])
@pytest.mark.parametrize("threads", [0, 1, 2])
def test_each_block_is_hashed_before_it_is_written(
    threads: int, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start
    names: list[str] = []
    found = hashlib.sha256()
    hashed_bytes = 0

    def start_few(thread: threading.Thread) -> None:
        if len(names) == threads:
            raise RuntimeError("can't start new thread")
        names.append(thread.name)
        start(thread)

    def hash_block(block: memoryview) -> None:
        nonlocal hashed_bytes
        found.update(block)
        hashed_bytes += len(block)

    def write(fd: int, block: memoryview, at: int) -> int:
        assert at + len(block) <= hashed_bytes
        return real(fd, block, at)

    real = os.pwrite
    monkeypatch.setattr(threading.Thread, "start", start_few)
    watch(monkeypatch, write)
    assert written(tmp_path / "x", contents(size), hash_block=hash_block) == contents(size)
    assert found.hexdigest() == hashlib.sha256(contents(size)).hexdigest()
    assert names == (["hfshard-disk", "hfshard-hash"][:threads] if size > BLOCK_BYTES else [])


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("number", [0, 3, 8])
def test_an_error_of_the_hash_is_raised(number: int, background: bool, tmp_path: Path) -> None:
    numbers = iter(range(9))

    def fail(_block: memoryview) -> None:
        if next(numbers) == number:
            raise MemoryError("no room for a digest")

    with no_thread_is_left(), pytest.raises(MemoryError, match="no room for a digest"):
        written(tmp_path / "x", contents(9 * BLOCK_BYTES), background=background, hash_block=fail)


def test_a_large_file_goes_past_the_page_cache_but_for_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(monkeypatch)
    assert written(tmp_path / "x", contents(WRITTEN_BYTES), background=False) == contents(WRITTEN_BYTES)
    if not seen[0][0]:
        pytest.skip("NO O_DIRECT HERE: the writes past the page cache are not tested")
    assert seen == [
        *((True, number * 1048576, 1048576) for number in range(5)),
        (True, 5242880, 12288),
        (False, 5255168, 77),
    ]


def test_blocks_that_are_full_are_written_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(monkeypatch)
    watched, are_filled = os.pwrite, threading.Event()

    class Queue(queue.SimpleQueue[object]):
        count = 0

        def put(self, item: object, block: bool = True, timeout: float | None = None) -> None:
            super().put(item, block, timeout)
            self.count += 1
            if self.count == 4:  # of full blocks: of the others, three are put before the first is written
                are_filled.set()

    def late(fd: int, block: memoryview, at: int) -> int:
        assert at or are_filled.wait(60)
        return watched(fd, block, at)

    monkeypatch.setattr(queue, "SimpleQueue", Queue)
    monkeypatch.setattr(os, "pwrite", late)
    assert written(tmp_path / "x", contents(WRITTEN_BYTES)) == contents(WRITTEN_BYTES)
    if not seen[0][0]:
        pytest.skip("NO O_DIRECT HERE: the writes past the page cache are not tested")
    assert len(seen) < 7  # as many as there are without
    assert max(count for _, _, count in seen) >= 2097152
    assert seen[-1] == (False, 5255168, 77)
    assert [at for _, at, _ in seen[1:]] == [at + count for _, at, count in seen[:-1]]


@pytest.mark.parametrize(("size", "direct"), [(1024 * 1024 - 1, ""), (WRITTEN_BYTES, "0")])
def test_a_small_file_goes_through_the_page_cache_and_so_does_any_where_it_is_turned_off(
    size: int, direct: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HFSHARD_DIRECT", direct)
    seen = watch(monkeypatch)
    written(tmp_path / "x", contents(size))
    assert not any(is_direct for is_direct, _, _ in seen)


def test_where_the_file_system_wants_another_alignment_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite

    def refuses(fd: int, block: memoryview, at: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, block, at)

    watch(monkeypatch, refuses)
    assert written(tmp_path / "x", contents(WRITTEN_BYTES)) == contents(WRITTEN_BYTES)


@pytest.mark.parametrize("most", [4096 * 3, 100_001])
def test_short_writes_are_taken_up_where_they_ended(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    watch(monkeypatch, lambda fd, block, at: real(fd, block[:most], at))
    assert written(tmp_path / "x", contents(WRITTEN_BYTES)) == contents(WRITTEN_BYTES)


@pytest.mark.parametrize("hash_block", [None, hashlib.sha256().update])
@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("number", [0, 3, 5])
def test_an_error_of_any_write_is_raised(
    number: int,
    background: bool,
    hash_block: Callable[[memoryview], object] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = os.pwrite

    def fails(fd: int, block: memoryview, at: int) -> int:
        if at >= number * BLOCK_BYTES:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, block, at)

    watch(monkeypatch, fails)
    with no_thread_is_left(), pytest.raises(OSError, match="Input/output error"):
        written(tmp_path / "x", contents(WRITTEN_BYTES), background=background, hash_block=hash_block)


def test_no_space_is_told_before_the_first_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(monkeypatch)
    fd = os.open(tmp_path / "x", os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        with pytest.raises(OSError, match=r"No space left|File too large"):
            BlockWriter(fd, 2**50, threading.Event(), None, background=True)
    finally:
        os.close(fd)
    assert seen == []


def test_a_stopped_save_writes_no_further_block(tmp_path: Path) -> None:
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(InterruptedError, match="another file"):
        written(tmp_path / "x", contents(WRITTEN_BYTES), cancelled=cancelled)


def test_no_thread_is_left_behind(tmp_path: Path) -> None:
    with no_thread_is_left():
        written(tmp_path / "x", contents(WRITTEN_BYTES), hash_block=hashlib.sha256().update)


@pytest.mark.parametrize("limit", ["2MB", "1GB"])
def test_a_save_has_the_same_bytes_past_the_page_cache_through_it_and_by_one_thread(
    limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(1_000_003, generator=generator)
    tensors = {
        "flat.a": base[:400_001],
        "flat.b": base[400_001:],
        "turned": torch.randn(700, 801, generator=generator).t(),
        "odd": torch.arange(1_234_567, dtype=torch.int16),
        "bytes": torch.arange(77, dtype=torch.uint8),
    }
    for name, writers, direct in (("direct", "", "1"), ("buffered", "", "0"), ("alone", "1", "1")):
        monkeypatch.setenv("HFSHARD_WRITERS", writers)
        monkeypatch.setenv("HFSHARD_DIRECT", direct)
        hfshard.save_state_dict(tensors, tmp_path / name, max_shard_size=limit)
    files = {path.name: path.read_bytes() for path in (tmp_path / "direct").iterdir() if path.is_file()}
    assert len(files) == (5 if limit == "2MB" else 1)
    for name in ("buffered", "alone"):
        assert {path.name: path.read_bytes() for path in (tmp_path / name).iterdir() if path.is_file()} == files


def test_a_variable_that_means_nothing_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HFSHARD_DIRECT", "yes")
    with pytest.raises(InvalidArgumentError, match="HFSHARD_DIRECT"):
        hfshard.save_state_dict({"a": torch.ones(1)}, tmp_path / "x")
    assert not list(tmp_path.rglob("*.safetensors"))
