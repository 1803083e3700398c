"""Saves by all ranks of a group at once, each rank a new interpreter: what each has cost, and the columns of it."""

from __future__ import annotations

import gc
import logging
import os
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.harness.figures import MEGABYTE, Data, runs_of
from bench.harness.inputs import written
from bench.harness.processes import Processes, free_port, number_in
from bench.harness.question import Context, Job

LOGGER_OF_SENT = "hfshard.distributed.exchange"

Save = Callable[[], object]
OnRank = Callable[[Connection, int, Context, str, int], None]
"""What a rank does: its pipe, its number, the context, the peer's key, and the port of the group."""


def prepare_ranks(context: Context, key: str, on_rank: OnRank) -> Job:
    """Start the ranks, each a new interpreter that ends in `save_when_told`, and give the job that lets them go."""
    ranks = Processes(on_rank, context, key, free_port(), method="spawn")
    ranks.answers()
    measured: list[dict[str, Any]] = []

    def save() -> None:
        ranks.tell("go")
        measured.extend(ranks.answers())

    def result() -> dict[str, Any]:
        ranks.end()
        by_rank = {key: [one[key] for one in measured] for key in ("seconds", "peak", "written", "sent")}
        return {**written(context), **by_rank}

    return Job([("save", save)], result)


def save_when_told(pipe: Connection, save: Save, *, flushes: bool) -> None:
    """Say that this rank is ready, wait for the word, save, and answer; ends the process."""
    gc.collect()
    pipe.send("ready")
    pipe.recv()
    pipe.send(measure(save, flushes=flushes))
    pipe.recv()  # the rank that keeps the store waits for the others, too
    os._exit(0)


def measure(save: Save, *, flushes: bool) -> dict[str, Any]:
    """Save together with the other ranks.

    Args:
        save: On every rank.
        flushes: Whether it does; else the disk is flushed in the end, which counts.

    Returns:
        Seconds, and bytes: "peak" (resident, beyond those before), "written", "sent" (tensors, to other ranks).
    """
    import torch.distributed as dist

    sent = _Sent()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    resident = number_in("status", "VmRSS")
    before = number_in("io", "write_bytes")
    begin = time.perf_counter()
    save()
    if not flushes:
        dist.barrier()
        if dist.get_rank() == 0:
            os.sync()
        dist.barrier()
    return {
        "seconds": time.perf_counter() - begin,
        "peak": (number_in("status", "VmHWM") - resident) * 1024,
        "written": number_in("io", "write_bytes") - before,
        "sent": sent.stop(),
    }


class _Sent(logging.Handler):
    """Counts the bytes that the exchange has sent to other ranks, as it logs in the end."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self._bytes = 0
        self._logger = logging.getLogger(LOGGER_OF_SENT)
        self._level = self._logger.level
        self._logger.addHandler(self)
        self._logger.setLevel(logging.DEBUG)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the count of all orders so far."""
        assert isinstance(record.args, tuple) and isinstance(record.args[0], int)
        self._bytes = record.args[0]

    def stop(self) -> int:
        """Listen no more, and return the bytes."""
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)
        return self._bytes


def shares(data: Data, name: str, field: str, *, of_all: bool = False) -> list[float]:
    """The highest figure of any rank in each run, or the sum of all, as a share of the model."""
    gather = sum if of_all else max
    return [gather(run["result"][field]) / data["bytes"] for run in runs_of(data, name)]


def show_megabytes(data: Data, name: str, field: str, *, of_all: bool = False) -> str:
    """The median of `shares`, in MB."""
    return f"{statistics.median(shares(data, name, field, of_all=of_all)) * data['bytes'] / MEGABYTE:.0f}"
