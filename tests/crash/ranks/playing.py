"""Plays one case of the table with real processes: a save before, the one with the fault, and those after it."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.crash.forks import in_fork
from tests.crash.ranks.cases import HOST, Case
from tests.crash.ranks.group import LONGEST_SECONDS, End, Fork, join, keep_store, tell
from tests.crash.ranks.judging import AGAIN, FAULTY, FIRST, Played, judge
from tests.crash.ranks.load_calls import CALLS, Load
from tests.crash.ranks.models import Does, Harm
from tests.crash.tracer import trace_process
from tests.distributed.gloo import free_port

_END_SECONDS = 2 * LONGEST_SECONDS
_STOPPED = ("killed by SIGKILL", "--- SIGINT", "--- SIGSTOP", "(INJECTED)")
"""One of these is in a trace where strace has done its harm."""


def play(case: Case, where: str | None = None) -> Played:
    """Save once, save with the fault, save again, and look each time."""
    place = Path(tempfile.mkdtemp(prefix="rank-faults-", dir=where)).resolve()
    played = Played(case)
    try:
        in_fork(lambda: CALLS[case.call].save_alone(place / "out", FIRST))
        _play(played, place)
        judge(played, place / "out", place / "left")
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return played


def _play(played: Played, place: Path) -> None:
    case = played.case
    port = 0 if case.store == "file" else free_port()
    forks: dict[int, Fork] = {}
    tracer: subprocess.Popen[bytes] | None = None
    try:
        if case.store == "launcher":
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
        _end_victim(played, forks, place)
    finally:
        for fork in forks.values():
            fork.send(signal.SIGKILL)
            fork.wait(LONGEST_SECONDS)
        if tracer is not None:
            tracer.wait(LONGEST_SECONDS)
    played.happened = _when_it_happened(case, place)


def _when_it_happened(case: Case, place: Path) -> float:
    """When the fault did: strace, or who did the harm, has last written then; 0: it did not."""
    if case.inject is None:
        return (place / "harm").stat().st_mtime if (place / "harm").exists() else 0.0
    trace = (place / "trace").read_text(errors="replace")
    return (place / "trace").stat().st_mtime if any(word in trace for word in _STOPPED) else 0.0


def _end_victim(played: Played, forks: Mapping[int, Fork], place: Path) -> None:
    """See that the victim is gone, or let one that was stopped go on to its end."""
    case = played.case
    victim = forks[case.victim]
    if not case.is_deadly:
        return
    if case.phase == "after":
        while not (place / "harm").exists() and not victim.wait(0.01):
            pass
    has_come = (case.call, case.phase) != ("pretrained", "planning")  # else it waits long for those who have ended
    if case.fault == "stop" and case.phase != "after" and case.victim != HOST and has_come:
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
    if case.store == "launcher":
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # as torchrun says
    join(port, rank, case.world_size, keeps_store=case.store == "rank0" and rank == 0, file=place / "store")
    if rank == case.victim and case.inject is not None:
        os.kill(os.getpid(), signal.SIGSTOP)  # until strace is there
    directory = place / "out"
    call = CALLS[case.call]
    with _faulty_save(case, rank, place) as save:
        tell(words, End.of(save))
    if isinstance(call, Load):
        words.with_suffix(".values").write_text(json.dumps(sorted(call.values())))
    if rank == case.victim and case.phase == "after":
        _harm(case, place)
    if case.is_deadly:
        return
    if rank == case.victim and case.inject is not None:
        _leave_tracer()
    dist.barrier()
    if rank == 0:  # files are replaced, never changed
        shutil.copytree(directory, place / "left", symlinks=True, copy_function=os.link)
    dist.barrier()
    tell(words, End.of(call.ready(directory, AGAIN, Harm())))


def _leave_tracer() -> None:
    """Let strace detach: it counts the calls of each new thread from one again."""
    status = Path("/proc/self/status").read_text()
    os.kill(int(status.split("TracerPid:")[1].split()[0]), signal.SIGTERM)
    while "TracerPid:\t0\n" not in Path("/proc/self/status").read_text():
        time.sleep(0.002)


@contextmanager
def _faulty_save(case: Case, rank: int, place: Path) -> Iterator[Does]:
    """The save of a rank, which is the one that causes the fault or not."""
    harm = Harm()
    if rank == case.signaller and case.inject is None:
        if case.phase in ("planning", "exchange", "written", "assigning"):
            harm = Harm(**{case.phase: lambda: _harm(case, place)})
        elif case.phase == "commit":
            _at_first("os.rename", 1, r"(model|checkpoint-).*", lambda: _harm(case, place))
        elif case.phase == "opening":
            _at_first("open", 0, r"model.*\.safetensors", lambda: _harm(case, place))
    save = CALLS[case.call].ready(place / "out", FAULTY, harm)
    if rank == case.victim and case.fault == "efbig":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        (place / "harm").touch()
    yield save
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _at_first(event: str, place: int, pattern: str, does: Does) -> None:
    """Have something done the first time that Python is about to rename or open a file that is called so.

    Args:
        event: Of Python's audit.
        place: Of the path among the arguments of the event.
        pattern: Of the file's name.
        does: Raises, or not.
    """
    once = iter([does])

    def hook(happened: str, arguments: tuple[Any, ...]) -> None:
        if happened != event or isinstance(arguments[place], int):
            return
        if re.fullmatch(pattern, Path(os.fsdecode(arguments[place])).name):
            for one in once:
                one()

    sys.addaudithook(hook)


def _harm(case: Case, place: Path) -> None:
    """Let the fault happen to the victim, which is this process or another one."""
    (place / "harm").touch()
    if case.fault == "raise":
        raise ZeroDivisionError("a fault")
    number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "int": signal.SIGINT}[case.fault]
    os.kill(json.loads((place / "pids").read_text())[str(case.victim)], number)
    if case.signaller != case.victim:
        time.sleep(0.05)  # until it has come
