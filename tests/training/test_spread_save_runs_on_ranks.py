"""Runs of models that are spread over ranks: killed and resumed to the bit, on the same ranks and on others."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hfshard
from hfshard.training import CheckpointManager
from tests.distributed.gloo import check_ranks, run_ranks
from tests.training.models import MESHES, Layout, Run

STEPS, SAVED_AT = 4, 2

MORE = ("accumulation", "scaler", "average", "frozen")


@dataclass(frozen=True, slots=True)
class Case:
    """One run, on any layout."""

    optimizer: str
    dtype: torch.dtype = torch.float32
    more: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """For directories, files and messages."""
        return "-".join([self.optimizer, str(self.dtype).removeprefix("torch."), *self.more]).replace(" ", "_")

    def run(self, layout: Layout) -> Run:
        """Build it."""
        return Run(layout, self.optimizer, self.dtype, self.more)


EVERYTHING = Case("sgd", more=MORE)
BFLOAT16 = Case("adamw foreach", torch.bfloat16)

CASES = [
    Case("adamw"),
    Case("adamw foreach"),
    Case("adamw fused"),
    Case("sgd"),
    Case("sgd foreach"),
    Case("sgd fused"),
    Case("rows and columns"),
    Case("adafactor"),
    BFLOAT16,
    Case("rows and columns", torch.bfloat16),
    *(Case("adamw", more=(one,)) for one in MORE),
    EVERYTHING,
]


def can_step(layout: Layout, case: Case) -> bool:
    """Whether torch can do the steps of a case on a layout."""
    if layout in ("pp", "whole"):
        return True
    if layout == "tp":  # some parameters are DTensors, and some are not, which torch can't do at once
        return "foreach" not in case.optimizer and "fused" not in case.optimizer and "scaler" not in case.more
    return case.optimizer not in ("sgd fused", "adafactor")


def cases_of(layout: Layout) -> list[Case]:
    """All that can be trained on a layout."""
    return [case for case in CASES if can_step(layout, case) and (layout != "tp" or case.optimizer != "adafactor")]


TABLE = {layout: cases_of(layout) for layout in ("fsdp", "2d", "hsdp", "pp", "pp_fsdp", "tp")}
OTHERS = {"fsdp": "tp", "2d": "fsdp", "hsdp": "2d", "pp": "fsdp", "pp_fsdp": "pp", "tp": "pp_fsdp"}
"""Where runs of a layout are restored, too: on as many ranks, fewer, or more."""
CHOSEN = {"fsdp": [Case("rows and columns", torch.bfloat16), EVERYTHING], "pp": [Case("adafactor"), BFLOAT16]}
"""What is run without --slow."""


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name


@contextmanager
def named(*words: str) -> Iterator[None]:
    """Say in a failure which case it was."""
    try:
        yield
    except BaseException as error:
        error.add_note(" ".join(words))
        raise


def each_run(rank: int, layout: str, cases: list[Case], work: Callable[[Run, Case], object]) -> None:
    """Do the same with a new run of each case. Ranks that have the same batch have the same random numbers."""
    replica = {"fsdp": rank, "hsdp": rank, "2d": rank // 2, "pp_fsdp": rank % 2}.get(layout, 0)
    for number, case in enumerate(cases):
        with named(layout, case.name):
            run = case.run(layout)
            torch.manual_seed(number + 100 * replica)
            work(run, case)


def everything(run: Run) -> dict[str, torch.Tensor]:
    """What this rank has, and the numbers."""
    return {**run.local(), **run.numbers()}


def train_to_save(run: Run) -> None:
    """So many steps; and where gradients accumulate, half of the next one."""
    run.train(SAVED_AT)
    for _ in range(run.passes - 1):
        run.backward()


def train_to_end(run: Run) -> None:
    """All that is left after the save."""
    run.backward()
    run.update()
    run.train(STEPS - SAVED_AT - 1)


def go_straight(rank: int, layout: str, cases: list[Case], place: Path) -> None:
    def work(run: Run, case: Case) -> None:
        train_to_save(run)
        whole = run.whole()
        torch.save(everything(run), place / f"{case.name}-saved-{rank}.pt")
        if rank == 0:
            torch.save(whole, place / f"{case.name}-saved.pt")
        train_to_end(run)
        torch.save(everything(run), place / f"{case.name}-{rank}.pt")

    each_run(rank, layout, cases, work)


def save_and_die(rank: int, layout: str, cases: list[Case], place: Path) -> None:
    def work(run: Run, case: Case) -> None:
        train_to_save(run)
        is_blocking = cases.index(case) % 2 == 0
        with CheckpointManager(place / case.name) as manager:
            manager.save(SAVED_AT, run.state, extra={"rank": rank}, blocking=is_blocking)
            run.backward()  # beside the collectives of the save
            run.update()

    each_run(rank, layout, cases, work)
    os.kill(os.getpid(), signal.SIGKILL)


def resume(rank: int, layout: str, cases: list[Case], place: Path) -> None:
    def work(run: Run, case: Case) -> None:
        torch.manual_seed(9)
        run.train(1)  # which leaves numbers of another run everywhere
        with CheckpointManager(place / case.name) as manager:
            restored = manager.restore_latest(run.state)
        assert restored == SAVED_AT and restored.extra == {"rank": 0}
        run.begin()
        assert_same(everything(run), torch.load(place / f"{case.name}-saved-{rank}.pt"))
        train_to_end(run)
        assert_same(everything(run), torch.load(place / f"{case.name}-{rank}.pt"))

    each_run(rank, layout, cases, work)


def restore_elsewhere(rank: int, layout: str, cases: list[Case], place: Path, saved_ranks: int) -> None:
    world_size = math.prod(MESHES[layout])

    def work(run: Run, case: Case) -> None:
        if can_step(layout, case):
            run.train(1)
        assert CheckpointManager(place / case.name).restore(run.state) == SAVED_AT
        assert_same(run.whole(), torch.load(place / f"{case.name}-saved.pt"))
        own = torch.load(place / f"{case.name}-saved-{rank if rank < saved_ranks else 0}.pt")
        numbers = run.numbers()
        rng = numbers.pop("rng")
        assert_same(numbers, {name: own[name] for name in numbers})
        if world_size == saved_ranks:
            assert torch.equal(rng, own["rng"])
        else:
            check_seeded(run, place / case.name, rng, own["rng"], world_size)
        if can_step(layout, case):
            run.begin()
            train_to_end(run)

    each_run(rank, layout, cases, work)


def check_seeded(run: Run, place: Path, found: torch.Tensor, saved: torch.Tensor, world_size: int) -> None:
    """Another number of ranks gets new random numbers, others on each rank, and the same ones each time."""
    assert not torch.equal(found, saved)
    if world_size > 1:
        told = [torch.empty_like(found) for _ in range(world_size)]
        dist.all_gather(told, found)
        assert not torch.equal(told[0], told[1])
    torch.manual_seed(4)
    CheckpointManager(place).restore(run.state)
    assert torch.equal(torch.get_rng_state(), found)


def go_straight_and_be_killed(rank: int, layout: str, cases: list[Case], place: Path) -> None:
    """Train all cases twice: straight to the end, and until a SIGKILL after the save."""
    go_straight(rank, layout, cases, place)
    save_and_die(rank, layout, cases, place)


def test_the_table_has_every_optimizer_on_every_layout() -> None:
    assert sum(map(len, TABLE.values())) >= 60
    for layout in ("fsdp", "2d", "hsdp", "pp"):
        kinds = {case.optimizer for case in TABLE[layout]}
        assert {"adamw", "adamw foreach", "adamw fused", "sgd", "sgd foreach", "rows and columns"} <= kinds
        assert {one for case in TABLE[layout] for one in case.more} == {"accumulation", "scaler", "average", "frozen"}


@pytest.mark.parametrize(
    ("layout", "cases"),
    [
        *(pytest.param(layout, cases, id=f"{layout} chosen") for layout, cases in CHOSEN.items()),
        *(pytest.param(layout, cases, id=layout, marks=pytest.mark.slow) for layout, cases in TABLE.items()),
    ],
)
def test_runs_whose_ranks_were_killed_go_on_to_the_bit_and_are_restored_on_other_ranks_and_by_one_process(
    layout: Layout, cases: list[Case], tmp_path: Path
) -> None:
    world_size = math.prod(MESHES[layout])
    ends = run_ranks(tmp_path / "killed", world_size, go_straight_and_be_killed, layout, cases, tmp_path)
    assert {end.status for end in ends} == {-signal.SIGKILL}, [end.words for end in ends]

    check_ranks(tmp_path / "resumed", world_size, resume, layout, cases, tmp_path)

    other = OTHERS[layout]
    args = (other, cases, tmp_path, world_size)
    check_ranks(tmp_path / "elsewhere", math.prod(MESHES[other]), restore_elsewhere, *args)

    restore_elsewhere(0, "whole", cases, tmp_path, world_size)
    for case in cases:
        check_files_of_one_process(case, tmp_path)


def check_files_of_one_process(case: Case, place: Path) -> None:
    """Restore what many ranks have saved, in this process, and save it: the files are the same."""
    run = case.run("whole")
    manager = CheckpointManager(place / case.name)
    assert manager.verify() == {SAVED_AT: []}
    manager.restore(run.state)
    with CheckpointManager(place / "alone" / case.name) as alone:
        saved = Path(alone.save(SAVED_AT, run.state))
    files = [*saved.glob("model*"), *saved.glob("optimizer*")]
    assert len(files) > 1
    for file in files:
        assert file.read_bytes() == (place / case.name / saved.name / file.name).read_bytes(), (case, file)
    assert hfshard.load_state_dict(saved).keys() == run.net.state_dict().keys()
