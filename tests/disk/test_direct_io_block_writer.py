"""The aligned writer: the same bytes by every path, and errors that reach the caller."""

from __future__ import annotations

import errno
import fcntl
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import hfshard
from hfshard.disk.direct_io import BLOCK_BYTES, BlockWriter
from hfshard.errors import InvalidArgumentError
from tests.helpers.threads import no_thread_is_left

SIZE = 5 * 1024 * 1024 + 4096 * 3 + 77
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
) -> bytes:
    """What stands in a file after its bytes were handed over in pieces, some of which are wiped afterwards."""
    told: list[int] = []
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        writer = BlockWriter(fd, len(raw), cancelled or threading.Event(), told.append, background=background)
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


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, SIZE])
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
    assert written(tmp_path / "x", contents(SIZE)) == contents(SIZE)


def test_a_large_file_goes_past_the_page_cache_but_for_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(monkeypatch)
    assert written(tmp_path / "x", contents(SIZE), background=False) == contents(SIZE)
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
    assert written(tmp_path / "x", contents(SIZE)) == contents(SIZE)
    if not seen[0][0]:
        pytest.skip("NO O_DIRECT HERE: the writes past the page cache are not tested")
    assert len(seen) < 7  # as many as there are without
    assert max(count for _, _, count in seen) >= 2097152
    assert seen[-1] == (False, 5255168, 77)
    assert [at for _, at, _ in seen[1:]] == [at + count for _, at, count in seen[:-1]]


@pytest.mark.parametrize(("size", "direct"), [(1024 * 1024 - 1, ""), (SIZE, "0")])
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
    assert written(tmp_path / "x", contents(SIZE)) == contents(SIZE)


@pytest.mark.parametrize("most", [4096 * 3, 100_001])
def test_short_writes_are_taken_up_where_they_ended(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    watch(monkeypatch, lambda fd, block, at: real(fd, block[:most], at))
    assert written(tmp_path / "x", contents(SIZE)) == contents(SIZE)


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("number", [0, 3, 5])
def test_an_error_of_any_write_is_raised(
    number: int, background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite

    def fails(fd: int, block: memoryview, at: int) -> int:
        if at >= number * BLOCK_BYTES:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, block, at)

    watch(monkeypatch, fails)
    with pytest.raises(OSError, match="Input/output error"):
        written(tmp_path / "x", contents(SIZE), background=background)


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
        written(tmp_path / "x", contents(SIZE), cancelled=cancelled)


def test_no_thread_is_left_behind(tmp_path: Path) -> None:
    with no_thread_is_left():
        written(tmp_path / "x", contents(SIZE))


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
