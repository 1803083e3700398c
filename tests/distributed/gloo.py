"""Ranks for the tests: processes of their own that join one gloo group, and what became of each."""

from __future__ import annotations

import os
import secrets
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch

from hfshard.distributed import rendezvous
from tests.helpers import processes

_TIMEOUT = timedelta(seconds=processes.PATIENCE_SECONDS - 20)
"""Of collectives: a machine may be busy."""
_PORTS = range(16_000, 32_000)
"""Below those that Linux gives to connections."""
DEATH_SECONDS = 12.0
"""For tests of ranks that are stopped: shorter than in life, and longer than a machine holds one up that lives."""
_FOR_ALL_SECONDS = 60.0
"""For ranks that all come, how long the first one waits for those that it does not need."""
_HEARING_SECONDS = processes.PATIENCE_SECONDS - 20
_said: list[Path] = []
"""Of the process of a rank: where the ranks of its test say things."""


def free_port() -> int:
    """A port that nobody listens on, and that no connection gets by chance before somebody does."""
    while True:
        port = secrets.choice(_PORTS)
        with suppress(OSError), socket.socket() as one:
            one.bind(("127.0.0.1", port))
            return port


def run_ranks(
    place: Path,
    world_size: int,
    work: Callable[..., object],
    *args: object,
    ports: Sequence[int] = (),
    modules: Sequence[str] = (),
) -> list[processes.End]:
    """Call a function on so many ranks of a new group, and wait until all have ended.

    Args:
        place: A directory of this call's own: for the store, and for what each rank says.
        world_size: How many.
        work: At the top of a module; called with the rank and the other arguments.
        args: To be pickled.
        ports: Of one element: that of the TCP store which rank 0 keeps; none: the store is a file.
        modules: As for `processes.end_of`.
    """
    (place / "said").mkdir(parents=True, exist_ok=True)
    for path in (place / "store", *(place / "said").iterdir()):
        path.unlink(missing_ok=True)

    def run(rank: int) -> processes.End:
        order = (place, rank, world_size, tuple(ports), work, args)
        return processes.end_of(place / f"{rank}.txt", join_and_work, *order, modules=modules)

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size)))


def check_ranks(
    place: Path, world_size: int, work: Callable[..., object], *args: object, **options: Sequence[Any]
) -> None:
    """Call a function on so many ranks, and fail with their words if one of them fails; options as for `run_ranks`."""
    ends = run_ranks(place, world_size, work, *args, **options)
    assert [end.status for end in ends] == [0] * world_size, "\n".join(end.words for end in ends)


def join_and_work(
    place: Path,
    rank: int,
    world_size: int,
    ports: tuple[int, ...],
    work: Callable[..., object],
    args: tuple[Any, ...],
) -> None:
    """What the process of one rank does."""
    torch.set_num_threads(1)
    rendezvous.WAIT_SECONDS = _FOR_ALL_SECONDS
    _said.append(place / "said")
    join(place, rank, world_size, ports)
    try:
        work(rank, *args)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # without waiting for the other ranks
    torch.distributed.barrier()  # the one that keeps the store ends last
    os._exit(0)


def join(place: Path, rank: int, world_size: int, ports: tuple[int, ...] = ()) -> None:
    """Join a gloo group whose store is a file, or kept by rank 0."""
    # torch lists both stores in its documentation only
    store: Any
    if ports:
        store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", ports[0], world_size, is_master=rank == 0, timeout=_TIMEOUT
        )
    else:
        store = torch.distributed.FileStore(str(place / "store"), world_size)  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT)


@contextmanager
def waiting(seconds: float) -> Iterator[None]:
    """Let the first rank to come wait so long for those that it does not need."""
    before, rendezvous.WAIT_SECONDS = rendezvous.WAIT_SECONDS, seconds
    try:
        yield
    finally:
        rendezvous.WAIT_SECONDS = before


def say(word: str) -> None:
    """Say something, on a rank, to the others of its test: by a file, as their store may be stopped or gone."""
    (_said[-1] / word).touch()


def hear(word: str) -> None:
    """Wait until another rank says something."""
    await_file(_said[-1] / word)


def await_file(path: Path) -> None:
    """Wait until another process, or thread, makes a file."""
    end = time.monotonic() + _HEARING_SECONDS
    while not path.exists():
        assert time.monotonic() < end, f"nobody makes {path}"
        time.sleep(0.005)


def end_with(rank: int, *survivors: int) -> NoReturn:
    """End as a success when all these ranks do: the one that keeps the store before the others would break theirs."""
    say(f"end of {rank}")
    for other in survivors:
        hear(f"end of {other}")
    os._exit(0)


def count_keys() -> int:
    """How many keys the store of the group has."""
    group: Any = torch.distributed.group.WORLD
    return int(group.get_group_store().num_keys())


def make_mesh(*shape: int) -> Any:
    """A mesh of all ranks, whose dimensions are called "a" and "b"."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
