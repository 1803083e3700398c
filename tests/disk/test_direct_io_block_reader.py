"""Reading block by block: the same bytes from the page cache and past it, wherever a stretch begins and ends."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from hfshard.disk import direct_io
from hfshard.disk.direct_io import BLOCK_BYTES, aligned_block, is_cached, open_direct, read_blocks, read_spots
from tests.helpers.threads import no_thread_is_left

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


def make_cold(fd: int) -> None:
    """Drop the file from the page cache; where that can't be (a file system in memory), nothing is to be seen."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    if is_cached(fd, 0, SIZE):
        pytest.skip("NO COLD FILES HERE: the reads past the page cache are not tested")


@pytest.mark.parametrize(("start", "count"), STRETCHES)
@pytest.mark.parametrize("block_bytes", [4096, BLOCK_BYTES, 3 * BLOCK_BYTES + 1])
@pytest.mark.parametrize("is_cold", [True, False])
def test_a_stretch_comes_in_blocks_of_one_size_and_a_last_one(
    is_cold: bool, block_bytes: int, start: int, count: int, path: Path
) -> None:
    with opened(path) as fd:
        if is_cold:
            make_cold(fd)
        blocks = [bytes(block) for block in read_blocks(fd, start, count, block_bytes)]
    assert b"".join(blocks) == RAW[start : start + count]
    assert [len(block) for block in blocks[:-1]] == [block_bytes] * (len(blocks) - 1)
    assert 0 < len(blocks[-1]) <= block_bytes if count else blocks == []


def test_a_cold_file_is_read_past_the_page_cache_and_stays_cold(path: Path) -> None:
    with opened(path) as fd:
        make_cold(fd)
        assert b"".join(bytes(block) for block in read_blocks(fd, 0, SIZE)) == RAW
        assert not is_cached(fd, 0, SIZE)


def test_a_file_that_will_be_mapped_is_brought_into_the_page_cache(path: Path) -> None:
    with opened(path) as fd:
        make_cold(fd)
        assert b"".join(bytes(block) for block in read_blocks(fd, 0, SIZE, keep_cached=True)) == RAW
        assert is_cached(fd, 0, SIZE)


def test_with_o_direct_turned_off_all_goes_through_the_page_cache(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HFSHARD_DIRECT", "0")
    with opened(path) as fd:
        make_cold(fd)
        assert b"".join(bytes(block) for block in read_blocks(fd, 0, SIZE)) == RAW
        assert is_cached(fd, 0, SIZE)


def test_a_file_that_was_cut_short_gives_the_bytes_that_there_are(path: Path) -> None:
    with opened(path) as fd:
        make_cold(fd)
        os.truncate(path, 5_000_000)
        assert b"".join(bytes(block) for block in read_blocks(fd, 4096, SIZE - 4096)) == RAW[4096:5_000_000]


def test_where_direct_reads_are_refused_the_page_cache_serves(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, refused = os.preadv, []
    with opened(path) as fd:
        make_cold(fd)

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
        make_cold(fd)

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
            make_cold(fd)
        assert list(read_spots(fd, 0, SIZE, PLACES)) == [RAW[at : at + count] for at, count in PLACES]
        assert list(read_spots(fd, 0, SIZE, [])) == []


def test_small_places_of_a_cold_file_leave_it_cold(path: Path) -> None:
    # Small pages in the cache would keep the file from coming into it in huge ones.
    places = [(at, 4096) for at in range(0, SIZE - 4096, SIZE // 8)]
    files = len(os.listdir("/proc/self/fd"))
    with opened(path) as fd:
        make_cold(fd)
        assert len(list(read_spots(fd, 0, SIZE, places))) == 8
        assert not any(is_cached(fd, at, 4096) for at, _ in places)
    assert len(os.listdir("/proc/self/fd")) == files


def test_many_small_places_of_a_cold_file_are_read_once_for_all_that_read_it(path: Path) -> None:
    places = [(at, 4096) for at in range(0, SIZE - 4096, SIZE // 16)]
    with opened(path) as fd:
        make_cold(fd)
        assert len(list(read_spots(fd, 0, SIZE, places))) == 16
        assert all(is_cached(fd, at, 4096) for at, _ in places)


@pytest.mark.parametrize("stretch", [(0, SIZE), (5_000_000, SIZE - 5_000_000), (4097, 1), (SIZE - 1, 1), (0, 0)])
def test_a_stretch_is_cached_once_it_was_read(stretch: tuple[int, int], path: Path) -> None:
    with opened(path) as fd:
        make_cold(fd)
        assert not is_cached(fd, *stretch)
        assert len(os.pread(fd, SIZE, 0)) == SIZE
        assert is_cached(fd, *stretch)


@pytest.mark.parametrize("call", ["_MMAP", "mincore"])
def test_where_the_system_does_not_say_a_file_counts_as_cached(
    call: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(path) as fd:
        make_cold(fd)
        if call == "mincore":
            monkeypatch.setattr(direct_io, "LIBRARY", SimpleNamespace(mincore=lambda *_: -1))
        else:
            monkeypatch.setattr(direct_io, call, lambda *_: direct_io._MAP_FAILED)
        assert is_cached(fd, 0, SIZE)
        assert b"".join(bytes(block) for block in read_blocks(fd, 0, SIZE)) == RAW


def test_a_reader_that_stops_early_leaves_no_thread_and_no_file_open(path: Path) -> None:
    with opened(path) as fd:
        make_cold(fd)
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
        make_cold(fd)
        blocks = read_blocks(fd, 0, SIZE)
        next(blocks)
        reading = [one.daemon for one in threading.enumerate() if one.name == "hfshard-read"]
        next(blocks, None)
        blocks.close()  # type: ignore[attr-defined]
    assert reading == [True]
