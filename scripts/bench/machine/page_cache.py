"""The page cache of files: dropped, filled, and asked what it holds."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

PAGE = mmap.PAGESIZE
READ_BYTES = 8 * 2**20
DROP_CACHES = Path("/proc/sys/vm/drop_caches")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]


def resident_fraction(paths: Iterable[Path]) -> float:
    """The part of the files' pages that is in the page cache, as mincore says."""
    resident = total = 0
    for path in paths:
        size = path.stat().st_size
        if not size:
            continue
        pages = -(-size // PAGE)
        with open(path, "rb") as file:
            # PROT_READ, MAP_SHARED; Python's mmap hides the address that mincore wants.
            address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        if address in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), "mmap", str(path))
        vector = ctypes.create_string_buffer(pages)
        failed = _libc.mincore(address, size, vector)
        _libc.munmap(address, size)
        if failed:
            raise OSError(ctypes.get_errno(), "mincore", str(path))
        resident += sum(byte & 1 for byte in vector.raw)
        total += pages
    return resident / total if total else 0.0


def drop(paths: Iterable[Path]) -> float:
    """Drop the files' pages; return the part that stayed, which should be 0.

    posix_fadvise drops each file's. If pages stay (a file system may ignore it), drop_caches does where it is allowed.
    """
    files = list(paths)
    for path in files:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    left = resident_fraction(files)
    if left:
        with contextlib.suppress(OSError):
            DROP_CACHES.write_text("1\n")
            left = resident_fraction(files)
    return left


def fill(paths: Iterable[Path]) -> float:
    """Drop the files' pages and read the files once; return the part of their pages that is then in the cache.

    Dropped first, as how a page came into the cache (alone by a fault, or with its neighbours in one large folio by a
    read) makes mapping it 2 to 5 times faster or slower, and each peer must find the same.
    """
    files = list(paths)
    drop(files)
    buffer = bytearray(READ_BYTES)
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return resident_fraction(files)
