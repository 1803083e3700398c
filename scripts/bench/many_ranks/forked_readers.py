"""The processes of one node that read one checkpoint at the same time, and what each of them measures."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import resource
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.harness.measuring import anonymous_bytes
from bench.harness.question import Context
from bench.many_ranks.loads import READERS, Load, MakeLoad
from bench.many_ranks.processes import free_port

if TYPE_CHECKING:
    from torch import Tensor

SAMPLE_SECONDS = 0.005
SECTOR = 512
"""Bytes, in /proc/diskstats."""


class Readers:
    """Forks of this process, which has imported what they need; ready when made.

    Args:
        context: Where they read.
        make: Prepares the load of each.
        is_group: Whether they are the ranks of a gloo group.
        has_sum: Whether all bytes together are those of the model, once or by each.

    Raises:
        RuntimeError: One has failed, with its last words on stderr.
    """

    def __init__(self, context: Context, make: MakeLoad, *, is_group: bool, has_sum: bool) -> None:
        self._context = context
        self._has_sum = has_sum
        self._measured: list[dict[str, Any]] = []
        self._peak = 0
        self._disk = 0
        gc.collect()
        gc.freeze()  # so that no collection writes to the pages that they share
        forks = multiprocessing.get_context("fork")
        port = free_port() if is_group else 0
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(READERS):
            ours, theirs = forks.Pipe()
            process = forks.Process(target=_read, args=(context, make, rank, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._answers()
        self._first_shares = self._shares()
        self._first = self._anonymous()

    def run(self) -> None:
        """Let all go at once, and wait until the last one has read every byte of its part."""
        disk = sectors_read(self._context.source)
        begin = time.perf_counter()
        self._tell("go")
        self._measured = self._answers(sampled=True)
        self._disk = sectors_read(self._context.source) - disk
        for one in self._measured:
            one["ready"] -= begin

    def result(self) -> dict[str, Any]:
        """What they measured, in bytes but for "ready" and "cpu"; they end.

        "read" is the sum of `read_bytes` of /proc/PID/io, and "disk" what /proc/diskstats counts; "private" the highest
        sum of their anonymous memory, and "pss" their share of all memory once all of them have loaded, each beyond
        that before.
        """
        shares = self._shares()
        self._tell("end")
        for process in self._processes:
            process.join()
        sums = [one["sum"] for one in self._measured]
        found = {
            "ready": round(max(one["ready"] for one in self._measured), 4),
            "cpu": round(sum(one["cpu"] for one in self._measured), 3),
            "read": sum(one["read"] for one in self._measured),
            "disk": self._disk * SECTOR,
            "private": self._peak,
            "pss": shares - self._first_shares,
        }
        if not self._has_sum:
            return found
        return {**found, "sum": sums[0] if len(set(sums)) == 1 else sum(sums) & (2**64 - 1)}

    def _shares(self) -> int:
        self._tell("pss")
        return sum(self._answers())

    def _tell(self, word: str) -> None:
        for pipe in self._pipes:
            pipe.send(word)

    def _answers(self, *, sampled: bool = False) -> list[Any]:
        """One answer of each; meanwhile, their memory is sampled."""
        while sampled and not all(pipe.poll() for pipe in self._pipes):
            self._peak = max(self._peak, self._anonymous() - self._first)
            time.sleep(SAMPLE_SECONDS)
        try:
            return [pipe.recv() for pipe in self._pipes]
        except EOFError as error:
            for process in self._processes:
                process.kill()
            raise RuntimeError(f"one of {READERS} processes has failed, and says why above") from error

    def _anonymous(self) -> int:
        return sum(anonymous_bytes(process.pid) for process in self._processes)


def sectors_read(path: Path) -> int:
    """What was read from the disk of a file so far, whoever did it; 0 where the system does not say."""
    device = path.stat().st_dev
    numbers = (str(os.major(device)), str(os.minor(device)))
    with suppress(OSError):
        for line in Path("/proc/diskstats").read_text().splitlines():
            fields = line.split()
            if (fields[0], fields[1]) == numbers:
                return int(fields[5])
    return 0


def _read(context: Context, make: MakeLoad, rank: int, port: int, pipe: Connection) -> None:
    """What each process does."""
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if port:
        address = f"tcp://127.0.0.1:{port}"
        torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=READERS)
    load = make(context, rank)
    pipe.send("ready")
    _tell_share(pipe)
    pipe.recv()
    measured, tensors = _measure(load)
    pipe.send(measured)
    _tell_share(pipe)
    pipe.recv()  # the one that keeps the store waits for the others, too
    del tensors
    os._exit(0)


def _tell_share(pipe: Connection) -> None:
    """Say, when asked, what this process's share of all memory is."""
    pipe.recv()
    pipe.send(_number_in("smaps_rollup", "Pss") * 1024)


def _measure(load: Load) -> tuple[dict[str, Any], Sequence[Tensor]]:
    """Load, and read every byte."""
    from bench.readers.job import sum_of

    cpu = _cpu_seconds()
    read = _number_in("io", "read_bytes")
    tensors = list(load())
    ready = time.perf_counter()
    total = sum_of(tensors)
    read = _number_in("io", "read_bytes") - read
    return {"ready": ready, "cpu": _cpu_seconds() - cpu, "read": read, "sum": total}, tensors


def _number_in(file: str, key: str) -> int:
    """A number that the kernel tells of this process."""
    found = re.search(rf"^{key}:\s+(\d+)", Path(f"/proc/self/{file}").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
