"""Starts the ranks of one save, and lets them go together."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from typing import Any

from bench.harness.inputs import written
from bench.harness.models import total_bytes
from bench.harness.question import Context
from bench.many_ranks.one_rank import RANKS, Measured

HELD = 3
"""Models' sizes of memory that are touched and given back before a save, so that no peer pays for pages that the
machine itself has to find first."""


class Ranks:
    """The processes of one save; ready when made.

    Raises:
        RuntimeError: One has ended, with its last words on stderr.
    """

    def __init__(self, context: Context, peer: str) -> None:
        self._context = context
        self._measured: list[Measured] = []
        command = [sys.executable, "-m", "bench.many_ranks.one_rank", peer, json.dumps(context.as_json())]
        port = str(free_port())
        self._processes = [
            subprocess.Popen([*command, str(rank), port], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for rank in range(RANKS)
        ]
        for process in self._processes:
            self._line(process)
        bytearray(b"\1") * (HELD * total_bytes(context.specs))

    def save(self) -> None:
        """Let all ranks save, and wait for the last one."""
        self._tell("go")
        self._measured = [json.loads(self._line(process)) for process in self._processes]

    def result(self) -> dict[str, Any]:
        """What each rank measured, by rank, and the bytes in the target; the processes end."""
        self._tell("end")
        for process in self._processes:
            process.wait()
        by_rank = {key: [one[key] for one in self._measured] for key in ("seconds", "peak", "written", "sent")}
        return {**written(self._context), **by_rank}

    def _tell(self, word: str) -> None:
        for process in self._processes:
            assert process.stdin
            process.stdin.write(f"{word}\n")
            process.stdin.flush()

    def _line(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout
        line = process.stdout.readline()
        if not line:
            for other in self._processes:
                other.kill()
            raise RuntimeError(f"rank {self._processes.index(process)} has ended")
        return line


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
