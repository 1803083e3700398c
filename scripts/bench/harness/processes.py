"""Processes that load or save one checkpoint together: they start, wait for a word, and answer their parent."""

from __future__ import annotations

import multiprocessing
import re
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

COUNT = 4
SAMPLE_SECONDS = 0.005

Body = Callable[..., None]
"""The work of one process: it gets a pipe to its parent, its rank, and arguments."""


class Processes:
    """Processes that work side by side.

    Args:
        body: The work of each; "spawn" needs a function of a module.
        arguments: Its last arguments.
        method: "spawn" for new interpreters, "fork" for copies of this process.
    """

    def __init__(self, body: Body, *arguments: Any, method: str) -> None:
        kind: Any = multiprocessing.get_context(method)
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(COUNT):
            ours, theirs = kind.Pipe()
            process = kind.Process(target=body, args=(theirs, rank, *arguments), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        """Their process numbers."""
        return [process.pid for process in self._processes]

    def tell(self, word: str) -> None:
        """Send a word to each."""
        for pipe in self._pipes:
            pipe.send(word)

    def answers(self, meanwhile: Callable[[], object] | None = None) -> list[Any]:
        """Wait for an answer of each; meanwhile, call a function again and again.

        Raises:
            RuntimeError: One has ended, with its last words on stderr.
        """
        while meanwhile is not None and not all(pipe.poll() for pipe in self._pipes):
            meanwhile()
            time.sleep(SAMPLE_SECONDS)
        try:
            return [pipe.recv() for pipe in self._pipes]
        except EOFError as error:
            for process in self._processes:
                process.kill()
            raise RuntimeError(f"one of {COUNT} processes has failed, and says why above") from error

    def end(self) -> None:
        """Tell all to end, and wait for them."""
        self.tell("end")
        for process in self._processes:
            process.join()


def join_group(rank: int, port: int) -> None:
    """Make this process a rank of a gloo group, with one thread."""
    import torch

    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=COUNT)


def number_in(file: str, key: str) -> int:
    """Read a number that the kernel keeps of this process, from a file below /proc/self."""
    found = re.search(rf"^{key}:\s+(\d+)", Path(f"/proc/self/{file}").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def free_port() -> int:
    """Find a port without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
