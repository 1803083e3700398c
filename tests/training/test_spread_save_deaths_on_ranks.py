"""A rank of a spread run is killed in the middle of a save or a restore: the others raise, and nothing is lost."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hfshard.errors import RankFailedError
from hfshard.training import CheckpointManager, TrainingState
from tests.distributed.gloo import check_ranks, free_port, run_ranks
from tests.training.models import Run
from tests.training.test_spread_save_runs_on_ranks import assert_same


class Dying:
    """A part that ends its process when it is saved, or restored."""

    def __init__(self, at: str) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        self._die("save")
        return {"value": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._die("restore")

    def _die(self, at: str) -> None:
        if self.at == at:
            os.kill(os.getpid(), signal.SIGKILL)


def lose_one(rank: int, place: Path, dying_rank: int, at: str) -> None:
    run = Run("fsdp")
    run.train(1)
    part = Dying("")
    state = TrainingState(model=run.net, optimizer=run.optimizer, part=part)
    manager = CheckpointManager(place)
    manager.save(1, state)
    before = run.local()
    part.at = at if rank == dying_rank else ""
    with pytest.raises(RankFailedError, match=f"[Rr]ank {dying_rank}"):
        if at == "restore":
            manager.restore(state)
        else:
            manager.save(2, state)
    assert_same(run.local(), before)
    os._exit(0)  # the ranks can't meet at the end


def die_in_the_middle_of_a_save(rank: int, place: Path, ends: Path, layout: str) -> None:
    """Save, and be killed while the next save is written beside the training; note what either has saved."""
    run = Run(layout)
    torch.manual_seed(0)
    manager = CheckpointManager(place)
    for step in (1, 2):
        run.train(1)
        torch.save({**run.local(), **run.numbers()}, ends / f"{layout}-{step}-{rank}.pt")
        manager.save(step, run.state, blocking=step == 1)
    while not [name for name in os.listdir(place) if name.startswith(".tmp-2-") or name.endswith("2")]:
        time.sleep(0.0005)
    os.kill(os.getpid(), signal.SIGKILL)


def resume_from_either(rank: int, place: Path, ends: Path, layout: str) -> None:
    run = Run(layout)
    run.train(1)
    with CheckpointManager(place) as manager:
        step = manager.restore_latest(run.state)
        assert step in (1, 2)
        assert_same({**run.local(), **run.numbers()}, torch.load(ends / f"{layout}-{step}-{rank}.pt"))
        run.begin()
        run.train(1)
        manager.save(3, run.state)
    names = sorted(path.name for path in place.iterdir())
    assert names == [f"checkpoint-0000000{number}" for number in range(1, step + 1)] + ["checkpoint-00000003"]


@pytest.mark.parametrize("layout", ["fsdp", "pp"])
def test_all_ranks_die_while_a_checkpoint_is_written_beside_the_training(tmp_path: Path, layout: str) -> None:
    args = (tmp_path / "run", tmp_path, layout)
    ends = run_ranks(tmp_path / "ranks", 2, die_in_the_middle_of_a_save, *args)
    assert [end.status for end in ends] == [-signal.SIGKILL] * 2, ends
    check_ranks(tmp_path / "again", 2, resume_from_either, *args)


def save_again(rank: int, place: Path) -> None:
    run = Run("fsdp")
    state = TrainingState(model=run.net, optimizer=run.optimizer, part=Dying(""))
    with CheckpointManager(place) as manager:
        assert manager.restore_latest(state) == 1
        manager.save(2, state)
    assert sorted(path.name for path in place.iterdir()) == ["checkpoint-00000001", "checkpoint-00000002"]


@pytest.mark.parametrize(
    ("dying_rank", "at"), [(0, "save"), (0, "restore"), pytest.param(1, "save", marks=pytest.mark.slow)]
)
def test_the_others_name_the_rank_that_died_and_keep_the_checkpoint(tmp_path: Path, dying_rank: int, at: str) -> None:
    ends = run_ranks(tmp_path / "ranks", 2, lose_one, tmp_path / "run", dying_rank, at, ports=(free_port(),))

    assert [end.status for end in ends] == [-signal.SIGKILL if rank == dying_rank else 0 for rank in range(2)], ends
    check_ranks(tmp_path / "again", 2, save_again, tmp_path / "run")
