"""The table of faults: who fails, in which phase of a save by several ranks, and how."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

HOST = -1
"""In the place of a rank: the process that keeps the store, where it is none of them, as under `torchrun`."""
DEADLY = ("kill", "stop")
"""Faults after which the rank is gone; after all others the same ranks save again."""
BY_STRACE = {
    ("writing", "kill"): "pwrite64:signal=KILL:when=2",
    ("writing", "stop"): "pwrite64:signal=STOP:when=2",
    ("writing", "int"): "pwrite64:signal=INT:when=2",
    ("writing", "enospc"): "pwrite64:error=ENOSPC:when=2",
    ("writing", "eio"): "pwrite64:error=EIO:when=2",
    ("commit", "enospc"): "rename:error=ENOSPC:when=2",
    ("cleanup", "kill"): "unlink:signal=KILL:when=2",
    ("cleanup", "stop"): "unlink:signal=STOP:when=2",
    ("cleanup", "int"): "unlink:signal=INT:when=2",
    ("cleanup", "eio"): "unlink:error=EIO:when=2",
}
"""(phase, fault) -> what strace does; the other faults are those of tensors that are read, of limits, and signals."""


class Case(NamedTuple):
    """One fault."""

    world_size: int
    victim: int
    """A rank, or `HOST`."""
    phase: str
    """"planning": when tensors are listed, after all have come. "exchange": when a tensor is read for its owner.
    "writing": at the second write of a file. "commit": just before the first rank renames. "cleanup": when it removes
    the old files. "after": when the rank's call has returned."""
    fault: str
    """"kill", "stop" (SIGSTOP), "raise", "int" (SIGINT), or an error of the file system: "efbig", "enospc", "eio"."""

    @property
    def name(self) -> str:
        """As `--transition` takes it."""
        who = "host" if self.victim == HOST else str(self.victim)
        return f"{self.world_size}/{who}/{self.phase}/{self.fault}"

    @property
    def is_deadly(self) -> bool:
        """Whether the process is gone."""
        return self.fault in DEADLY

    @property
    def inject(self) -> str | None:
        """What strace does to the victim."""
        return BY_STRACE.get((self.phase, self.fault))

    @property
    def signaller(self) -> int:
        """The rank that causes it: where another one waits, the first rank does, when it is in the phase."""
        return 0 if self.victim == HOST or self.phase == "commit" else self.victim

    @property
    def is_late(self) -> bool:
        """Whether all files may be written already, so that the others may succeed."""
        return self.phase in ("commit", "cleanup", "after")


def all_cases() -> tuple[Case, ...]:
    """Every case, in the order of the table."""
    return tuple(case for world_size in (2, 4) for case in _cases_of(world_size))


def _cases_of(world_size: int) -> Iterator[Case]:
    for victim in range(world_size):
        faults = {
            "planning": "kill stop raise int",
            "exchange": "kill stop raise int",
            "writing": "kill stop int enospc eio efbig",
            "commit": "kill stop int" if victim else "kill stop raise int enospc",
            "cleanup": "" if victim else "kill stop int eio",
            "after": "kill stop",
        }
        for phase, words in faults.items():
            for fault in words.split():
                yield Case(world_size, victim, phase, fault)
    for phase in ("planning", "exchange", "commit"):
        for fault in DEADLY:
            yield Case(world_size, HOST, phase, fault)
