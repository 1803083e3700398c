"""Ranks as forks of this process: they join one gloo group, do some work, and leave word of how it ended."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, Self

import torch.distributed as dist

LONGEST_SECONDS = 30.0
"""From the fault to the survivors' errors."""
POLL_SECONDS = 0.002
_GROUP_SECONDS = timedelta(seconds=100)


@dataclass(frozen=True, slots=True)
class End:
    """How a save ended on one rank.

    Attributes:
        status: "saved", "raised", "died", or "hung": it had to be ended.
        kind: The error's class.
        is_ours: Whether the error is an HfshardError.
        rank: The rank that the error names.
        words: Of the error.
        seconds: That the call took.
        ended: When it did, in seconds since the epoch.
    """

    status: str
    kind: str = ""
    is_ours: bool = False
    rank: int | None = None
    words: str = ""
    seconds: float = 0.0
    ended: float = 0.0

    @classmethod
    def of(cls, work: Callable[[], object]) -> Self:
        """Do something, and tell how it ended."""
        from hfshard.errors import HfshardError

        start = time.monotonic()
        try:
            work()
        except BaseException as error:
            seconds = time.monotonic() - start
            rank = getattr(error, "rank", None)
            is_ours = isinstance(error, HfshardError)
            return cls("raised", type(error).__name__, is_ours, rank, str(error), seconds, time.time())
        return cls("saved", seconds=time.monotonic() - start, ended=time.time())

    def __str__(self) -> str:
        return f"{self.status} {self.kind} (rank {self.rank}) in {self.seconds:.1f} s: {self.words[:300]}"


class Fork:
    """A rank in a fork of this process.

    Args:
        work: What it does.
        words: Where it writes what became of it: a line for each save.
    """

    def __init__(self, work: Callable[[], None], words: Path) -> None:
        self._words = words
        self._status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _be_rank(work, words)

    def is_over(self) -> bool:
        """Whether the process has ended."""
        if self._status is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self._status = status
        return self._status is not None

    def send(self, number: int) -> None:
        """Send it a signal, unless it is over."""
        if not self.is_over():
            os.kill(self.pid, number)

    def wait(self, seconds: float) -> bool:
        """Wait for its end; gives whether it came."""
        deadline = time.monotonic() + seconds
        while not self.is_over():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def ends(self, seconds: float = LONGEST_SECONDS) -> list[End]:
        """How each of its saves ended; where it hangs, it is killed."""
        is_hung = not self.wait(seconds)
        if is_hung:
            self.send(signal.SIGKILL)
            self.wait(LONGEST_SECONDS)
        found = [End(**json.loads(line)) for line in self._words.read_text().splitlines()]
        if is_hung:
            return [*found, End("hung", seconds=seconds)]
        return found if self._status == 0 else [*found, End("died", words=f"wait status {self._status}")]


def tell(words: Path, end: End) -> None:
    """Add how a save ended; a process that is killed meanwhile leaves a whole line or none."""
    with open(words, "a", buffering=1) as file:
        file.write(json.dumps(asdict(end)) + "\n")


def _be_rank(work: Callable[[], None], words: Path) -> NoReturn:
    words.touch()
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        work()
        code = 0
    except BaseException as error:
        tell(words, End("raised", type(error).__name__, words=f"outside of a save: {error}"))
    finally:
        os._exit(code)


def join(port: int, rank: int, world_size: int, *, keeps_store: bool | None = None, file: Path | None = None) -> None:
    """Join a gloo group; rank 0 keeps the store, unless told otherwise.

    The store's thread makes no calls that are counted among those of files, as libuv does.

    Args:
        port: Of the store; 0: it is a file.
        rank: This one.
        world_size: How many there are.
        keeps_store: Whether this one keeps the store; None: rank 0 does.
        file: The store, where there is no port.
    """
    is_master = rank == 0 if keeps_store is None else keeps_store
    kind: Any = dist.FileStore  # type: ignore[attr-defined]  # torch lists it in its documentation only
    store = _store(port, is_master) if port else kind(str(file), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=_GROUP_SECONDS)


def keep_store(port: int) -> None:
    """Keep the store for others, until a signal comes."""
    store = _store(port, is_master=True)
    while store is not None:
        signal.pause()


def _store(port: int, is_master: bool) -> Any:
    kind: Any = dist.TCPStore  # type: ignore[attr-defined]  # torch lists it in its documentation only
    return kind("127.0.0.1", port, is_master=is_master, timeout=_GROUP_SECONDS, wait_for_workers=False, use_libuv=False)
