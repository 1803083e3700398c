"""Memory that this process holds while a child prepares, and frees when it lets it go: no peer waits for the host.

A virtual machine may give freed memory back to its host some seconds later (free page reporting). Where it does, the
first touch of 2.5 GB takes 6 s, and that of memory which was in use a moment ago 0.1 s: whether a peer finds the one or
the other depends on what ran before it, and can be most of its time.
"""

from __future__ import annotations

import mmap
from pathlib import Path

from bench.machine.limits import SECTOR, anonymous

LEFT_FREE = 2 * 2**30
"""The reserve leaves as much to everything else."""


class Reserve:
    """So many bytes, at most what the machine can spare: held from `take` to `free`."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._memory: mmap.mmap | None = None

    def take(self) -> None:
        """Hold memory and touch each page of it, unless that is so already."""
        if self._memory is None and (length := min(self.length, _available() - LEFT_FREE)) > 0:
            self._memory = anonymous(length)
            self._memory[::SECTOR] = bytes(len(self._memory) // SECTOR)

    def free(self) -> None:
        """Give it to whoever asks next."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def __enter__(self) -> Reserve:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()


def _available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    return 0
