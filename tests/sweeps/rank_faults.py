"""The faults of ranks, played with real processes: a save before, the one with the fault, those after it, a verdict."""

from __future__ import annotations

import argparse
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
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed.gloo import free_port
from tests.sweeps.child import LONGEST_SECONDS, End, RankFork, call_in_fork, parallel, tell, trace_process
from tests.sweeps.engine import STOPPED, memory, prepare_process
from tests.sweeps.rank_calls import BEFORE, CALLS, Does, Harm, Load, join, keep_store, warm
from tests.sweeps.rank_cases import HOST, LOADS, Case

FIRST, FAULTY, AGAIN, NEXT = range(1, 5)
"""The saves, by the number that all of their tensors tell: before, with the fault, after it, and by a new process."""
UNKNOWN = "The outcome is unknown"
"""In the errors of those who can't know whether the new checkpoint is there."""


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
    def survivors(self) -> dict[int, End]:
        """How the save with the fault ended on the others."""
        return {rank: some[0] for rank, some in self.ends.items() if rank != self.case.victim and some}

    @property
    def seconds(self) -> float:
        """From the fault to the end of the slowest survivor's call."""
        return max(map(self.seconds_to, self.survivors.values()), default=0.0)

    def seconds_to(self, end: End) -> float:
        """From the fault to the end of a call."""
        return min(end.seconds, end.ended - self.happened)

    def __str__(self) -> str:
        ends = "\n".join(f"    rank {rank}: {end}" for rank, some in sorted(self.ends.items()) for end in some)
        return "\n".join([f"{self.case.name}: {'; '.join(self.problems) or 'as it should be'}", ends])


_END_SECONDS = 2 * LONGEST_SECONDS


def play_cases(cases: list[Case], options: argparse.Namespace) -> int:
    """Play cases, some side by side, and print what came of it; 0 when nothing failed, 1 when something did."""
    prepare_process()
    torch.set_num_threads(1)
    where = str(options.where) if options.where else memory()
    with tempfile.TemporaryDirectory(prefix="rank-faults-", dir=where) as place:
        warm(Path(place), {case.call for case in cases})
    began = time.monotonic()
    results: list[Played] = []
    for played in parallel(partial(play, where=where), cases, options.jobs):
        results.append(played)
        if played.problems:
            print(f"FAILED {played}", flush=True)
        print(f"{len(results)} of {len(cases)} played: {played.case.name}", file=sys.stderr, flush=True)
    failed = [played for played in results if played.problems]
    if options.json:
        told = {one.case.name: {"problems": one.problems, "found": one.found, "ends": str(one)} for one in results}
        options.json.write_text(json.dumps(told, indent=1))
    slowest = max(results, key=lambda one: one.seconds)
    print(
        f"rank-faults: {len(results)} cases, {len(failed)} failed, {time.monotonic() - began:.0f} s; the slowest call "
        f"of a survivor took {slowest.seconds:.1f} s, in {slowest.case.name}"
    )
    return 1 if failed else 0


def play(case: Case, where: str | None = None) -> Played:
    """Save once, save with the fault, save again, and look each time."""
    place = Path(tempfile.mkdtemp(prefix="rank-faults-", dir=where)).resolve()
    played = Played(case)
    try:
        call_in_fork(_save_alone, case, place / "out", FIRST)
        _play(played, place)
        judge(played, place / "out", place / "left")
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return played


def _play(played: Played, place: Path) -> None:
    case = played.case
    port = 0 if case.store == "file" else free_port()
    forks: dict[int, RankFork] = {}
    tracer: subprocess.Popen[bytes] | None = None
    try:
        if case.store == "launcher":
            forks[HOST] = RankFork(lambda: keep_store(port), place / "host.words")
        for rank in range(case.world_size):
            words = place / f"{rank}.words"
            forks[rank] = RankFork(partial(_be_rank, case, rank, port, place, words), words)
        (place / "pids").write_text(json.dumps({str(rank): fork.pid for rank, fork in forks.items()}))
        if case.inject is not None:
            forks[case.victim].has_stopped()
            tracer = trace_process(forks[case.victim].pid, place / "trace", case.inject)
            forks[case.victim].send(signal.SIGCONT)
        survivors = [rank for rank in range(case.world_size) if rank != case.victim or not case.is_deadly]
        deadline = time.monotonic() + _END_SECONDS
        for rank in survivors:
            played.ends[rank] = forks[rank].ends(max(0.1, deadline - time.monotonic()))
        _end_victim(played, forks, place)
    finally:
        for fork in forks.values():
            fork.end()
        if tracer is not None:
            tracer.wait(LONGEST_SECONDS)
    played.happened = _when_it_happened(case, place)


def _when_it_happened(case: Case, place: Path) -> float:
    """When the fault did: strace, or who did the harm, has last written then; 0: it did not."""
    if case.inject is None:
        return (place / "harm").stat().st_mtime if (place / "harm").exists() else 0.0
    trace = (place / "trace").read_text(errors="replace")
    return (place / "trace").stat().st_mtime if any(word in trace for word in (*STOPPED, "--- SIGSTOP")) else 0.0


def _end_victim(played: Played, forks: Mapping[int, RankFork], place: Path) -> None:
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


def judge(played: Played, directory: Path, left: Path) -> None:
    """Look at what is left, save once more by a new process, and note what is wrong.

    Args:
        played: How it went.
        directory: Into which was saved.
        left: What lay there after the fault, where nobody died, so that the same ranks have saved again.
    """
    if not played.happened:
        played.problems.append("the fault did not happen")
    if played.case.call == "dcp":  # torch raises its own errors there, and does not say who died
        _judge_ends_of_dcp(played)
    else:
        _judge_ends(played)
    try:
        _judge_values(played, directory.parent)
        _judge_directory(played, directory, left)
    except Exception as error:
        played.problems.append(f"{type(error).__name__}: {error}")
        return
    _judge_words(played)


def _judge_directory(played: Played, directory: Path, left: Path) -> None:
    """One whole checkpoint is there, and no litter after the next save."""
    case = played.case

    def check_save(number: int, by: str) -> None:
        found, litter = call_in_fork(_look, case, directory)
        if litter or found != number:
            played.problems.append(f"after a save by {by}, there is save {found}, and litter: {litter}")

    played.found = call_in_fork(_found, case, directory if case.is_deadly else left)
    if not case.is_deadly:
        check_save(FIRST if case.call in LOADS else AGAIN, "the same ranks")
    call_in_fork(_save_alone, case, directory, NEXT)
    check_save(NEXT, f"a new process, of {sorted(os.listdir(directory))}")


def _save_alone(case: Case, directory: Path, number: int) -> None:
    CALLS[case.call].save_alone(directory, number)


def _found(case: Case, directory: Path) -> int:
    return CALLS[case.call].found(directory)


def _look(case: Case, directory: Path) -> tuple[int, list[str]]:
    """Which save there is, and its litter."""
    litter = CALLS[case.call].litter(directory)
    return _found(case, directory), litter


def _judge_values(played: Played, place: Path) -> None:
    """Of a load: nothing was changed, where nothing should be."""
    call = CALLS[played.case.call]
    if not isinstance(call, Load) or (call.may_be_half and played.case.phase == "assigning"):
        return
    for rank, ends in played.ends.items():
        if ends and ends[0].status in ("saved", "raised"):
            found = json.loads((place / f"{rank}.values").read_text())
            if found != [FIRST if ends[0].status == "saved" or _waits(played.case) else BEFORE]:
                played.problems.append(f"rank {rank} holds values of {found}: {ends[0]}")


def _judge_words(played: Played) -> None:
    """Whoever has saved, or was not told that it may be otherwise, knows what is there."""
    case = played.case
    if case.call in LOADS:
        return
    for rank, end in played.survivors.items():
        if end.status == "saved" and played.found == FIRST:
            played.problems.append(f"rank {rank} was told that it has saved, and the old checkpoint is there")
        if end.status == "raised" and end.is_ours and played.found == FAULTY and UNKNOWN not in end.words:
            played.problems.append(f"rank {rank} was not told that the new checkpoint may be there: {end}")
    if played.found == FAULTY and not case.is_late:
        played.problems.append("it was committed")


def _judge_ends(played: Played) -> None:
    case = played.case
    for rank, ends in sorted(played.ends.items()):
        end = ends[0] if ends else End("hung")
        if end.status in ("hung", "died") or (end.seconds > LONGEST_SECONDS and rank != case.victim):
            played.problems.append(f"rank {rank}: {end}")
        elif end.status == "saved" and not (case.is_late or _may_go_on(case, rank) or _waits(case)):
            played.problems.append(f"rank {rank} saved")
        elif rank != case.victim and end.status == "raised" and not (end.is_ours and _names_victim(end, case)):
            played.problems.append(f"rank {rank}: {end}")
        _judge_again(played, rank)
    if len({end.status for end in played.survivors.values()}) > 1 and not (case.victim == HOST and case.is_late):
        played.problems.append("some survivors saved, and some raised")


def _judge_ends_of_dcp(played: Played) -> None:
    for rank, ends in sorted(played.ends.items()):
        end = ends[0] if ends else End("hung")
        if end.status in ("hung", "died") or (end.status == "saved" and not played.case.is_late):
            played.problems.append(f"rank {rank}: {end}")
        _judge_again(played, rank)


def _judge_again(played: Played, rank: int) -> None:
    again = played.ends[rank][1:]
    if not played.case.is_deadly and [end.status for end in again] != ["saved"]:
        played.problems.append(f"rank {rank} did not save again: {', '.join(map(str, again))}")


def _may_go_on(case: Case, rank: int) -> bool:
    """Whether it is a rank that was stopped while it loaded, when all others had done so: it has what it wants."""
    return rank == case.victim and case.phase == "assigning" and case.fault == "stop"


def _waits(case: Case) -> bool:
    """Whether Ctrl-C is raised when all is restored on all ranks: it was pressed while a restore assigned."""
    return case.phase == "assigning" and case.fault == "int" and case.call in ("restore", "ddp_restore")


def _names_victim(end: End, case: Case) -> bool:
    return "store" in end.words if case.victim == HOST else end.rank == case.victim
