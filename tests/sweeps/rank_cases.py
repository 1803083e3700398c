"""The table of faults: who fails, in which phase of which save by several ranks, and how."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

HOST = -1
"""In the place of a rank: the process that keeps the store, where it is none of them, as under `torchrun`."""
DEADLY = ("kill", "stop")
"""Faults after which the rank is gone; after all others the same ranks save again."""
BY_STRACE = {
    ("writing", "kill"): "pwrite64,pwritev,pwritev2:signal=KILL:when=1",
    ("writing", "stop"): "pwrite64,pwritev,pwritev2:signal=STOP:when=1",
    ("writing", "int"): "pwrite64,pwritev,pwritev2:signal=INT:when=1",
    ("writing", "enospc"): "pwrite64,pwritev,pwritev2:error=ENOSPC:when=1",
    ("writing", "eio"): "pwrite64,pwritev,pwritev2:error=EIO:when=1",
    ("commit", "enospc"): "rename:error=ENOSPC:when=1",
    ("commit", "eio"): "rename:error=EIO:when=2",
    ("cleanup", "kill"): "unlink:signal=KILL:when=2",
    ("cleanup", "stop"): "unlink:signal=STOP:when=2",
    ("cleanup", "int"): "unlink:signal=INT:when=2",
    ("cleanup", "eio"): "unlink:error=EIO:when=2",
}
"""(phase, fault) -> what strace does; the other faults are those of tensors that are read, of limits, and signals."""
CALLS = (
    "state_dict",
    "pretrained",
    "manager",
    "async",
    "ddp",
    "dcp",
    "load_model",
    "load_like",
    "restore",
    "ddp_restore",
)
"""`save_state_dict`; `save_pretrained` of a model of transformers under FSDP2; `CheckpointManager.save`, blocking or
not, of such a model and its optimizer, or of those that each rank has whole; `torch.distributed.checkpoint.save`; and
loads."""
LOADS = CALLS[-4:]
STORES = ("rank0", "file", "launcher")
"""Who keeps the store of the process group."""


class Case(NamedTuple):
    """One fault."""

    world_size: int
    victim: int
    """A rank, or `HOST`."""
    phase: str
    """"planning": when tensors are listed, after all have come. "exchange": when a tensor is read for its owner.
    "writing": at the first write of a file. "written": when all files are. "commit": when the first rank renames,
    after all have confirmed that they take part. "cleanup": when it removes the old files. "after": when the rank's
    call has returned. Of loads, "opening": when a file of tensors is opened; "assigning": when all has been read, and
    an object takes in what is its own."""
    fault: str
    """"kill", "stop" (SIGSTOP), "raise", "int" (SIGINT), or an error of the file system: "efbig", "enospc", "eio"."""
    call: str = CALLS[0]
    store: str = STORES[0]

    @property
    def name(self) -> str:
        """As `--transition` takes it."""
        who = "host" if self.victim == HOST else str(self.victim)
        more = [word for word, usual in ((self.call, CALLS[0]), (self.store, STORES[0])) if word != usual]
        return "/".join([str(self.world_size), who, self.phase, self.fault, *more])

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
        return 0 if self.victim == HOST or self.phase in ("written", "commit") else self.victim

    @property
    def is_late(self) -> bool:
        """Whether it may be done: all ranks have confirmed, or only a wait for a thread is interrupted, or one that has
        everything goes on."""
        is_wait_interrupted = self.call == "async" and self.phase == "writing" and self.fault == "int"
        is_alone = self.call == "ddp" and self.fault == "stop"
        return self.phase in ("commit", "cleanup", "after") or is_wait_interrupted or is_alone


def all_cases() -> tuple[Case, ...]:
    """Every case, in the order of the table."""
    return tuple(_every_case())


def _every_case() -> Iterator[Case]:
    for world_size in (2, 4):
        for victim in range(world_size):
            yield from _cases_of(Case(world_size, victim, "", ""), _ALL_PHASES)
        for phase in ("planning", "exchange", "written", "commit"):
            for fault in DEADLY:
                yield Case(world_size, HOST, phase, fault, store="launcher")
    for victim in range(2):
        yield from _cases_of(Case(2, victim, "", "", store="file"), _ALL_PHASES, DEADLY)
        for call in ("pretrained", "manager", "async"):
            yield from _cases_of(Case(2, victim, "", "", call), _PHASES_OF_ALL, _OF_ALL)
        yield from _cases_of(Case(2, victim, "", "", "ddp"), _PHASES_OF_ALL[2 * victim :], _OF_ALL)
        yield from _cases_of(Case(2, victim, "", "", "dcp"), _PHASES_OF_ALL[: 3 - victim], _OF_DCP)
        for call in LOADS:
            phases = ("opening",) if call == "load_like" else ("opening", "assigning")
            yield from _cases_of(Case(2, victim, "", "", call), phases)


_ALL_PHASES = ("planning", "exchange", "writing", "written", "commit", "cleanup", "after")
_PHASES_OF_ALL = ("planning", "writing", "commit")
_OF_ALL = (*DEADLY, "raise", "int", "enospc", "efbig")
_OF_DCP = ("kill", "raise", "int", "enospc", "efbig")
"""A rank that is stopped is noticed by the timeout of the process group. Nor is one told of Ctrl-C while it waits in a
collective of torch, which breaks the group."""
_FAULTS = {
    "planning": ("kill stop raise int", "kill stop raise int"),
    "exchange": ("kill stop raise int", "kill stop raise int"),
    "writing": ("kill stop int enospc eio efbig", "kill stop int enospc eio efbig"),
    "written": ("kill stop raise int", "kill stop int"),
    "commit": ("kill stop raise int enospc eio", "kill stop int"),
    "cleanup": ("kill stop int eio", ""),
    "after": ("kill stop", "kill stop"),
    "opening": ("kill stop raise int", "kill stop raise int"),
    "assigning": ("kill stop raise int", "kill stop raise int"),
}
"""Phase -> the faults of the first rank, which commits, and those of the others."""


def _cases_of(one: Case, phases: tuple[str, ...], faults: tuple[str, ...] | None = None) -> Iterator[Case]:
    for phase in phases:
        for fault in _FAULTS[phase][one.victim > 0].split():
            if faults is None or fault in faults:
                yield one._replace(phase=phase, fault=fault)
