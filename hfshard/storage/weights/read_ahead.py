"""Read mapped tensors ahead in threads, while the model that will use them is being built."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Final

import torch

from hfshard._util.threads import start_thread
from hfshard.storage.weights.populate import advise_huge, is_populated, pieces_of, populate
from hfshard.storage.weights.safetensors_file import SafetensorsFile

_THREADS: Final = 2
"""One does not keep a disk busy; more take cores away from building the model."""

_PIECE_BYTES: Final = 4 * 1024 * 1024
"""Bytes that are requested at once. With 16 MiB the first pages came late: 2.5 GB took 1.2 s instead of 1.1."""

_GAP_BYTES: Final = 128 * 1024
"""Stretches with fewer bytes between them are read as one: the kernel reads that much around a page anyway."""


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
    cold = [
        (shard.mapping, begin, end)
        for shard, names in wanted
        for begin, end in _stretches(shard, names)
        if not is_populated(shard.mapping, begin, end)
    ]
    if not cold:
        return []
    for stretch in cold:
        advise_huge(*stretch)
    pieces = _Pieces(cold)
    started = [start_thread(pieces.populate, "hfshard-read-ahead", daemon=True) for _ in range(_THREADS)]
    return [one for one in started if one is not None]


class _Pieces:
    """The pieces that are left to read, shared by the threads."""

    def __init__(self, stretches: Sequence[tuple[torch.UntypedStorage, int, int]]) -> None:
        self._pieces = _pieces_of(stretches, _available_bytes() // 2)
        self._lock = threading.Lock()

    def populate(self) -> None:
        """Read piece after piece."""
        while True:
            with self._lock:
                piece = next(self._pieces, None)
            if piece is None or not populate(*piece):
                return


def _pieces_of(
    stretches: Sequence[tuple[torch.UntypedStorage, int, int]], limit_bytes: int
) -> Iterator[tuple[torch.UntypedStorage, int, int]]:
    for mapping, begin, end in stretches:
        for first, last in pieces_of(begin, end, _PIECE_BYTES):
            limit_bytes -= last - first
            if limit_bytes < 0:
                return
            yield mapping, first, last


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
