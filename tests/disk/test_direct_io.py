"""Memory for direct I/O: at a page, apart from each other, in huge pages where the system has them."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

import pytest

from hfshard.disk.direct_io import HUGE_PAGE_BYTES, aligned_block, aligned_blocks, is_networked


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
