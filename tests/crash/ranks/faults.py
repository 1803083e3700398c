"""Plays one case of the table with real processes, and judges what is left and what each rank was told."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.crash.forks import in_fork
from tests.crash.ranks.cases import HOST, Case
from tests.crash.ranks.group import LONGEST_SECONDS, End, Fork, join, keep_store, tell
from tests.crash.tracer import trace_process
from tests.distributed.gloo import free_port

ROWS = 1 << 17
"""Of 8 bytes, in each of the tensors: several files for each rank."""
TENSORS = 8
LIMIT = 2_200_000
"""Bytes of a file."""
FIRST, FAULTY, AGAIN, NEXT = range(1, 5)
"""The saves, by the number that all of their tensors tell: before, with the fault, after it, and by a new process."""
_END_SECONDS = 2 * LONGEST_SECONDS


@dataclass(slots=True)
class Played:
    """What came of a case.

    Attributes:
        problems: A sentence for each thing that is wrong.
        ends: Rank -> how each of its saves ended.
        found: Which save the directory held after the fault.
        happened: When the fault did, in seconds since the epoch.
    """

    case: Case
    problems: list[str] = field(default_factory=list)
    ends: dict[int, list[End]] = field(default_factory=dict)
    found: int = 0
    happened: float = 0.0

    @property
    def seconds(self) -> float:
        """From the fault to the end of the slowest survivor's call."""
        ends = [some[0] for rank, some in self.ends.items() if rank != self.case.victim and some]
        return max((self.seconds_to(end) for end in ends), default=0.0)

    def seconds_to(self, end: End) -> float:
        """From the fault to the end of a call."""
        return min(end.seconds, end.ended - self.happened)

    def __str__(self) -> str:
        ends = "\n".join(f"    rank {rank}: {end}" for rank, some in sorted(self.ends.items()) for end in some)
        return "\n".join([f"{self.case.name}: {'; '.join(self.problems) or 'as it should be'}", ends])


def play(case: Case, where: str | None = None) -> Played:
    """Save once, save with the fault, save again, and look each time."""
    place = Path(tempfile.mkdtemp(prefix="rank-faults-", dir=where)).resolve()
    played = Played(case)
    try:
        in_fork(lambda: _save_alone(place / "out", FIRST))
        _play(played, place)
        _judge(played, place / "out")
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return played


def whole_save(directory: Path) -> int:
    """The number of the save that a directory holds, as stock safetensors reads the files of its index.

    Raises:
        ValueError: Its tensors are of several saves, or some are missing.
    """
    from safetensors import safe_open

    weight_map = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    if missing := _names() - weight_map.keys():
        raise ValueError(f"missing: {missing}")
    found = set()
    for name in sorted(_names()):
        with safe_open(directory / weight_map[name], "pt") as file:
            tensor = file.get_tensor(name)
        number = int(tensor[0]) // ROWS
        if not tensor.equal(_rows(number)):
            raise ValueError(f"{name} is of several saves")
        found.add(number)
    if len(found) > 1:
        raise ValueError(f"of several saves: {found}")
    return found.pop()


def litter(directory: Path) -> list[str]:
    """What lies in a directory and does not belong to its checkpoint."""
    index = "model.safetensors.index.json"
    ours = {index, *json.loads((directory / index).read_text())["weight_map"].values()}
    return sorted(set(os.listdir(directory)) - ours)


def _names() -> set[str]:
    return {f"rows{number}" for number in range(TENSORS)}


def _rows(number: int) -> torch.Tensor:
    return torch.arange(ROWS, dtype=torch.int64) + number * ROWS


def _save_alone(directory: Path, number: int) -> None:
    import hfshard

    hfshard.save_state_dict({name: _rows(number) for name in sorted(_names())}, directory, max_shard_size=LIMIT)


def _play(played: Played, place: Path) -> None:
    case = played.case
    port = free_port()
    forks: dict[int, Fork] = {}
    tracer: subprocess.Popen[bytes] | None = None
    try:
        if case.victim == HOST:
            forks[HOST] = Fork(lambda: keep_store(port), place / "host.words")
        for rank in range(case.world_size):
            words = place / f"{rank}.words"
            forks[rank] = Fork(partial(_be_rank, case, rank, port, place, words), words)
        (place / "pids").write_text(json.dumps({str(rank): fork.pid for rank, fork in forks.items()}))
        if case.inject is not None:
            os.waitpid(forks[case.victim].pid, os.WUNTRACED)
            tracer = trace_process(forks[case.victim].pid, place / "trace", case.inject)
            forks[case.victim].send(signal.SIGCONT)
        survivors = [rank for rank in range(case.world_size) if rank != case.victim or not case.is_deadly]
        deadline = time.monotonic() + _END_SECONDS
        for rank in survivors:
            played.ends[rank] = forks[rank].ends(max(0.1, deadline - time.monotonic()))
        played.happened = _when_it_happened(place)
        _end_victim(played, forks)
    finally:
        for fork in forks.values():
            fork.send(signal.SIGKILL)
            fork.wait(LONGEST_SECONDS)
        if tracer is not None:
            tracer.wait(LONGEST_SECONDS)


def _when_it_happened(place: Path) -> float:
    """When the fault did: strace, or who did the harm, has last written then; 0 where neither had to do with it."""
    files = [place / name for name in ("trace", "harm") if (place / name).exists()]
    return max((file.stat().st_mtime for file in files), default=0.0)


def _end_victim(played: Played, forks: Mapping[int, Fork]) -> None:
    """See that the victim is gone, or let one that was stopped go on to its end."""
    case = played.case
    victim = forks[case.victim]
    if not case.is_deadly:
        return
    if case.fault == "stop" and case.phase != "after" and case.victim != HOST:
        if victim.is_over():
            played.problems.append("it was not stopped")
            return
        deadline = time.monotonic() + _END_SECONDS
        while not victim.wait(0.5) and time.monotonic() < deadline:
            victim.send(signal.SIGCONT)  # each thread of it may be stopped anew
        played.ends[case.victim] = victim.ends(0)
        if played.ends[case.victim][-1].status == "hung":
            played.problems.append("the stopped rank went on, and did not come to an end")
    elif case.fault == "kill" and not victim.wait(LONGEST_SECONDS):
        played.problems.append("it was not killed")


def _be_rank(case: Case, rank: int, port: int, place: Path, words: Path) -> None:
    """What a rank does: save with the fault, and where nobody died, look at what is left and save again."""
    if case.victim == HOST:
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # as torchrun says
    join(port, rank, case.world_size, keeps_store=case.victim != HOST and rank == 0)
    if rank == case.victim and case.inject is not None:
        os.kill(os.getpid(), signal.SIGSTOP)  # until strace is there
    directory = place / "out"
    with _faulty_save(case, rank, place) as save:
        tell(words, End.of(lambda: save(directory)))
    if rank == case.victim and case.phase == "after":
        _harm(case, place)
    if case.is_deadly:
        return
    if rank == case.victim and case.inject is not None:
        _leave_tracer()
    dist.barrier()
    if rank == 0:
        (place / "found").write_text(str(_found_by(directory)))
    dist.barrier()
    tell(words, End.of(lambda: _save(directory, _spread_tensors(AGAIN))))


def _leave_tracer() -> None:
    """Let strace detach: it counts the calls of each new thread from one again."""
    status = Path("/proc/self/status").read_text()
    os.kill(int(status.split("TracerPid:")[1].split()[0]), signal.SIGTERM)
    while "TracerPid:\t0\n" not in Path("/proc/self/status").read_text():
        time.sleep(0.002)


def _found_by(directory: Path) -> int | str:
    try:
        return whole_save(directory)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _spread_tensors(number: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = _rows(number)
    return {name: distribute_tensor(rows, mesh, [Shard(0)], src_data_rank=None) for name in sorted(_names())}


def _save(directory: Path, tensors: Mapping[str, Any], check: Callable[[], None] = lambda: None) -> None:
    from hfshard.distributed.saving import save_anywhere
    from hfshard.saving.options import SaveOptions
    from hfshard.saving.request import SaveRequest

    save_anywhere(SaveRequest(tensors=tensors, options=SaveOptions(max_shard_size=LIMIT)), directory, check)


class _HarmfulMapping(dict[str, Any]):
    """Does something when its items are listed for the first time."""

    def __init__(self, tensors: Mapping[str, Any], does: Callable[[], object]) -> None:
        super().__init__(tensors)
        self._harm = iter([does])

    def items(self) -> Any:
        for does in self._harm:
            does()
        return super().items()


@contextmanager
def _faulty_save(case: Case, rank: int, place: Path) -> Iterator[Callable[[Path], None]]:
    """The save of a rank, which is the one that causes the fault or not."""
    tensors: dict[str, Any] = _spread_tensors(FAULTY)
    check: Callable[[], None] = lambda: None  # noqa: E731
    if rank == case.signaller and case.inject is None:
        if case.phase == "planning":
            tensors = _HarmfulMapping(tensors, lambda: _harm(case, place))
        elif case.phase == "exchange":
            tensors |= {"fault": _tensor_that(lambda: _harm(case, place))}
        elif case.phase == "commit":
            check = _second_time(lambda: _harm(case, place))
    if rank == case.victim and case.fault == "efbig":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    yield lambda directory: _save(directory, tensors, check)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _harm(case: Case, place: Path) -> None:
    """Let the fault happen to the victim, which is this process or another one."""
    (place / "harm").touch()
    if case.fault == "raise":
        raise ZeroDivisionError("a fault")
    number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "int": signal.SIGINT}[case.fault]
    os.kill(json.loads((place / "pids").read_text())[str(case.victim)], number)
    if case.signaller != case.victim:
        time.sleep(0.05)  # until it has come


def _tensor_that(does: Callable[[], object]) -> Any:
    """A tensor that does something when its bytes are read."""
    from hfshard.storage.tensors.tensor_layout import RawTensor, TensorLayout

    def blocks(_: int) -> Iterator[memoryview]:
        does()
        yield memoryview(b"12345678")

    return RawTensor(TensorLayout("U8", (8,), 8), blocks)


def _second_time(does: Callable[[], object]) -> Callable[[], None]:
    """A check of a save: first it is called when the directory is locked, and then just before the commit."""
    calls = iter((lambda: None, does))

    def check() -> None:
        next(calls, lambda: None)()

    return check


def _judge(played: Played, directory: Path) -> None:
    case = played.case
    _judge_ends(played)
    found_file = directory.parent / "found"
    try:
        if case.is_deadly:
            played.found = in_fork(lambda: whole_save(directory))
        else:
            played.found = int(found_file.read_text())
            if (last := in_fork(lambda: whole_save(directory))) != AGAIN:
                played.problems.append(f"the same ranks saved again, and left save {last}")
            if left := litter(directory):
                played.problems.append(f"litter after the same ranks saved again: {left}")
        in_fork(lambda: _save_alone(directory, NEXT))
        if in_fork(lambda: whole_save(directory)) != NEXT or litter(directory):
            played.problems.append(f"after the next save: {sorted(os.listdir(directory))}")
    except Exception as error:
        told = found_file.read_text() if found_file.exists() else ""
        played.problems.append(f"{type(error).__name__}: {error} {told}")
        return
    has_saved = any(ends and ends[0].status == "saved" for ends in played.ends.values())
    if played.found == FIRST and has_saved:
        played.problems.append("a rank was told that it has saved, and the old checkpoint is there")
    # a leader that was stopped may go on when all files are written: it holds the lock, and nobody could tell it
    went_on = any(end.status == "saved" for end in played.ends.get(case.victim, ())) and case.fault == "stop"
    if played.found == FAULTY and not case.is_late and not went_on:
        played.problems.append("it was committed")


def _judge_ends(played: Played) -> None:
    case = played.case
    for rank, ends in sorted(played.ends.items()):
        end = ends[0] if ends else End("hung")
        if end.status in ("hung", "died") or (end.seconds > LONGEST_SECONDS and rank != case.victim):
            played.problems.append(f"rank {rank}: {end}")
        elif rank != case.victim and end.status == "saved" and not case.is_late:
            played.problems.append(f"rank {rank} saved")
        elif rank != case.victim and end.status == "raised" and not (end.is_ours and _names_victim(end, case)):
            played.problems.append(f"rank {rank}: {end}")
        if not case.is_deadly and [one.status for one in ends[1:]] != ["saved"]:
            played.problems.append(f"rank {rank} did not save again: {', '.join(map(str, ends[1:]))}")
    others = {ends[0].status for rank, ends in played.ends.items() if rank != case.victim and ends}
    if len(others) > 1 and not (case.victim == HOST and case.is_late):
        played.problems.append("some survivors saved, and some raised")


def _names_victim(end: End, case: Case) -> bool:
    if case.victim == HOST:
        return (end.rank is None and "store" in end.words) or (end.rank is not None and "store" in end.words)
    return end.rank == case.victim
