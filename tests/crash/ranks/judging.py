"""Judges a case of the table: what is left, and what each rank was told."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from tests.crash.forks import in_fork
from tests.crash.ranks.cases import HOST, LOADS, Case
from tests.crash.ranks.group import LONGEST_SECONDS, End
from tests.crash.ranks.load_calls import BEFORE, CALLS, Load

FIRST, FAULTY, AGAIN, NEXT = range(1, 5)
"""The saves, by the number that all of their tensors tell: before, with the fault, after it, and by a new process."""
UNKNOWN = "Nobody has told the outcome"
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
    call = CALLS[case.call]

    def check_save(number: int, by: str) -> None:
        litter, found = in_fork(lambda: (call.litter(directory), call.found(directory)))
        if litter or found != number:
            played.problems.append(f"after a save by {by}, there is save {found}, and litter: {litter}")

    played.found = in_fork(lambda: call.found(directory if case.is_deadly else left))
    if not case.is_deadly:
        check_save(FIRST if case.call in LOADS else AGAIN, "the same ranks")
    in_fork(lambda: call.save_alone(directory, NEXT))
    check_save(NEXT, f"a new process, of {sorted(os.listdir(directory))}")


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
