"""Read and write past the page cache: when to do it, and the system calls that Python lacks."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from typing import Final

from hfshard.errors import InvalidArgumentError
from hfshard.storage.disk.fsops import UNSUPPORTED

LIBRARY: Final = ctypes.CDLL(None, use_errno=True)
"""The C library, for what Python lacks."""

BLOCK_BYTES: Final = 1024 * 1024
"""Bytes of one read or write: enough for any disk, and still in the core's cache when hashed and then copied."""

DIRECT_VARIABLE: Final = "HFSHARD_DIRECT"
"""The environment variable that turns O_DIRECT off (0), or on for small files too (1)."""

HUGE_PAGE_BYTES: Final = 2 * 1024 * 1024
"""Of x86 and most others; where it is another one, blocks are a little slower or take a little more memory."""

_MIN_HUGE_BYTES: Final = 512 * 1024
"""Smaller memory is not worth a huge page."""

_MIN_DIRECT_BYTES: Final = 1024 * 1024
"""Smaller files go through the page cache: a flush of one costs as much as its bytes."""


def is_direct_wanted(size: int) -> bool:
    """Whether a file of this size should bypass the page cache, if its file system can."""
    wanted = check_setting()
    return hasattr(os, "O_DIRECT") and wanted != "0" and (wanted == "1" or size >= _MIN_DIRECT_BYTES)


def check_setting() -> str:
    """The value of the environment variable: "", "0" or "1".

    Raises:
        InvalidArgumentError: It is anything else.
    """
    wanted = os.environ.get(DIRECT_VARIABLE, "")
    if wanted not in ("", "0", "1"):
        raise InvalidArgumentError(f"The variable {DIRECT_VARIABLE} must be 0 or 1, got {wanted!r}.")
    return wanted


def set_direct(fd: int, *, wanted: bool) -> bool:
    """Turn O_DIRECT of an open file on or off; False where the file system does not support it."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def aligned_block(count_bytes: int) -> memoryview:
    """Allocate memory that begins at a page, and returns to the system with the last view of it."""
    return aligned_blocks(1, count_bytes)[0]


def aligned_blocks(count: int, count_bytes: int) -> list[memoryview]:
    """Allocate several such blocks side by side, in huge pages where the system has them.

    Past the page cache, the disk gets a list of stretches of physical memory, one for each page: a list of small pages
    is longer than one request may be, and reading 2.5 GB took 2.0 s into small pages and 0.64 s into huge ones.
    """
    step = -(-count_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    room = step * count
    is_huge = room >= _MIN_HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE")
    if is_huge:
        room = -(-room // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    pages = mmap.mmap(-1, room + HUGE_PAGE_BYTES if is_huge else room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    begin = 0
    if is_huge:
        begin = -ctypes.addressof(ctypes.c_char.from_buffer(pages)) % HUGE_PAGE_BYTES
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    memory = memoryview(pages)
    return [memory[at : at + count_bytes] for at in range(begin, begin + count * step, step)]


def allocate(fd: int, size: int) -> None:
    """Reserve the space of a new file; does nothing where the file system can't.

    Not by `os.posix_fallocate`: where the file system can't, the C library would write a byte into each block.

    Raises:
        OSError: There is no space.
    """
    while LIBRARY.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)) != 0:
        number = ctypes.get_errno()
        if number in UNSUPPORTED | {errno.EINVAL}:
            return
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
