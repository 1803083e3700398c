"""Read mapped tensors ahead in threads, while the model that will use them is being built."""

from __future__ import annotations

import ctypes
import errno
import mmap
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Final

import torch

from hfshard._util.threads import start_thread
from hfshard.storage.disk.block_reader import is_cached
from hfshard.storage.disk.direct_io import LIBRARY
from hfshard.storage.weights.safetensors_file import SafetensorsFile

_THREADS: Final = 2
"""One does not keep a disk busy; more take cores away from building the model."""

_PIECE_BYTES: Final = 4 * 1024 * 1024
"""Bytes that are requested at once. With 16 MiB the first pages came late: 2.5 GB took 1.2 s instead of 1.1."""

_GAP_BYTES: Final = 128 * 1024
"""Stretches with fewer bytes between them are read as one: the kernel reads that much around a page anyway."""

_POPULATE_READ: Final = 22
"""`madvise`: read the pages and map them, without a page fault for each (Linux 5.14)."""

_WILL_NEED: Final = 3
"""`madvise`: read the pages; for older kernels."""


def read_ahead(wanted: Sequence[tuple[SafetensorsFile, Sequence[str]]]) -> list[Future[None]]:
    """Let threads read what the page cache lacks of some mapped tensors, in the order of the files.

    They fill at most half of the available memory. A file that is truncated meanwhile is not an error here: `madvise`
    reports it, where a page fault would end the process.

    Args:
        wanted: Files, each with the names of its tensors.

    Returns:
        What the threads do, nothing if everything is cached or none can be started; they end by themselves, and keep
        the files mapped until then.
    """
    cold: list[tuple[torch.UntypedStorage, int, int]] = []
    for shard, names in wanted:
        with shard.opened() as fd:
            cold += [
                (shard.mapping, begin, end)
                for begin, end in _stretches(shard, names)
                if not is_cached(fd, begin, end - begin)
            ]
    if not cold:
        return []
    pieces = _Pieces(cold)
    started = [start_thread(pieces.populate, "hfshard-read-ahead", daemon=True) for _ in range(_THREADS)]
    return [one for one in started if one is not None]


class _Pieces:
    """The pieces that are left to read, shared by the threads."""

    def __init__(self, stretches: Sequence[tuple[torch.UntypedStorage, int, int]]) -> None:
        self._pieces = _pieces_of(stretches, _available_bytes() // 2)
        self._advice = _POPULATE_READ
        self._lock = threading.Lock()

    def populate(self) -> None:
        """Read piece after piece."""
        while True:
            with self._lock:
                piece = next(self._pieces, None)
            if piece is None or not self._advise(*piece):
                return

    def _advise(self, mapping: torch.UntypedStorage, begin: int, end: int) -> bool:
        address, size = ctypes.c_void_p(mapping.data_ptr() + begin), ctypes.c_size_t(end - begin)
        advice = self._advice
        if LIBRARY.madvise(address, size, advice) == 0:
            return True
        if ctypes.get_errno() == errno.EINVAL and advice == _POPULATE_READ:
            self._advice = _WILL_NEED
            return bool(LIBRARY.madvise(address, size, _WILL_NEED) == 0)
        return False


def _pieces_of(
    stretches: Sequence[tuple[torch.UntypedStorage, int, int]], limit_bytes: int
) -> Iterator[tuple[torch.UntypedStorage, int, int]]:
    for mapping, begin, end in stretches:
        begin -= begin % mmap.PAGESIZE
        for at in range(begin, end, _PIECE_BYTES):
            limit_bytes -= _PIECE_BYTES
            if limit_bytes < 0:
                return
            yield mapping, at, min(at + _PIECE_BYTES, end)


def _stretches(shard: SafetensorsFile, names: Sequence[str]) -> Iterator[tuple[int, int]]:
    """The stretches of a file that hold some tensors; those that nearly touch are one."""
    begin = end = -1
    for info in sorted((shard.header.tensors[name] for name in names), key=lambda info: info.begin):
        if info.begin - end > _GAP_BYTES or begin < 0:
            if end > begin:
                yield shard.header.data_start + begin, shard.header.data_start + end
            begin = info.begin
        end = max(end, info.end)
    if end > begin:
        yield shard.header.data_start + begin, shard.header.data_start + end


def _available_bytes() -> int:
    """Memory that is available without swapping; 0 where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except OSError:
        return 0
