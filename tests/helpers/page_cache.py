"""The page cache: files that the next read must fetch from the disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hfshard.disk.direct_io import is_cached


def drop(*paths: str | Path) -> bool:
    """Drop files from the page cache; return False where a file system keeps them, as one in memory does."""
    are_cold = True
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            are_cold = are_cold and not is_cached(fd, 0, os.fstat(fd).st_size)
        finally:
            os.close(fd)
    return are_cold


def make_cold(path: str | Path) -> None:
    """Drop a file from the page cache, or skip the test."""
    if not drop(path):
        pytest.skip("NO COLD FILES HERE: the reads past the page cache are not tested")
