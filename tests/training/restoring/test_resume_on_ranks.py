"""Two ranks restore (over gloo): either both restore all of a checkpoint, or neither of them changes anything."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from hfshard.training import CheckpointManager, TrainingState
from tests.distributed.gloo import check_ranks
from tests.flows.resume_runs import everything_of
from tests.sweeps.run_states import Counter, seed_all
from tests.training.test_run_ranks import WORLD_SIZE


class RefusingCounter(Counter):
    """It refuses its state when it has taken half of it over."""

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.values = {**self.values, "count": values["count"]}
        if self.values["count"] > 0:
            raise KeyError("mean")


class Build:
    """What a rank restores into; its seed tells the ranks, and what was saved, apart."""

    def __init__(self, seed: int, *, width: int = 3, counter: Counter | None = None) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.scheduler = StepLR(self.optimizer, 1)
        self.counter = counter or Counter()
        for _ in range(seed):
            self.model(torch.randn(4, 2)).sum().backward()
            self.optimizer.step()
            self.scheduler.step()
        seed_all(seed)

    def state(self) -> TrainingState:
        return TrainingState(self.model, self.optimizer, self.scheduler, counter=self.counter)

    def everything(self) -> dict[str, str]:
        gradients = [one.grad for one in self.model.parameters()]
        return everything_of(self.model, self.optimizer, self.scheduler, grad=gradients, counter=self.counter.values)


class Replacing(nn.Sequential):
    """While it is compared, on the second rank, another process replaces the checkpoint, or saves a newer one."""

    replacement: Path
    run: Path

    @property
    def _keys_to_ignore_on_save(self) -> None:
        if self.replacement.exists():
            time.sleep(0.2)  # the first rank has read everything
            os.rename(self.run / "checkpoint-00000001", self.run / "was-replaced")
            os.rename(self.replacement, self.run / self.replacement.name)


def refuse_weights(module: nn.Module, *_: object) -> None:
    raise ValueError("these weights are not for me")


def restore(case: str, build: Build, run: Path, rank: int) -> int | None:
    """What one rank calls."""
    other = run.parent / "other-run"
    seen_by = {
        "another run": (run, other),
        "no checkpoint on the first": (run.parent / "empty", run),
        "no checkpoint but a damaged one": (run.parent / "empty", run.parent / "damaged"),
    }
    place: Path | str = other if case == "a run of its own" and rank else run
    if case in seen_by:  # one path on both ranks, as of a disk of each machine, that leads each to a run of its own
        place = f"/proc/self/fd/{os.dup2(os.open(seen_by[case][rank], os.O_RDONLY), 100)}"
    if case == "old files, each its own":
        os.chdir(run.parent / f"machine{rank}")
    steps: dict[str, Any] = {
        "a checkpoint of its own": (other if rank else run) / "checkpoint-00000001",
        "old files, each its own": "/proc/self/cwd/old.pt",
        "old file": run.parent / "machine0" / "old.pt",
        "old file, another model": run.parent / "machine0" / "old.pt",
        "no place": 1 if rank == 0 else "",
        "another step": rank + 1,
        "the newest on one rank": None if rank == 0 else 1,
    }
    if case in steps or (case == "another method" and rank == 1):
        return CheckpointManager(place).restore(build.state(), steps.get(case))
    return CheckpointManager(place).restore_latest(build.state(), strict=case != "not strict")


def build_for(case: str, rank: int) -> Build:
    if rank == 0:
        return Build(3)
    build = Build(4, width=5 if "another model" in case else 3)
    if case in ("a refusing object", "not strict"):
        build = Build(4, counter=RefusingCounter())
    if case == "refused weights":
        build.model[1].register_load_state_dict_post_hook(refuse_weights)
    return build


CASES = {
    "another model": "StateDictMismatchError: 'model' does not fit the checkpoint",
    "a refusing object": "StateDictMismatchError: 'counter' (RefusingCounter) refused its state",
    "not strict": "StateDictMismatchError: 'counter' (RefusingCounter) refused its state",
    "refused weights": "StateDictMismatchError: 'model' refused its state",
    "another run": "CheckpointChangedError: The first rank restores",
    "no checkpoint on the first": "CheckpointNotFoundError: Rank 1 found the checkpoint '/proc/self/fd/100/checkpoint-",
    "no checkpoint but a damaged one": "CheckpointNotFoundError: Rank 1 found the checkpoint '/proc/self/fd/100",
    "a run of its own": "InvalidArgumentError: Rank 1 restores from '",
    "a checkpoint of its own": "InvalidArgumentError: Rank 1 restores from '",
    "no place": "InvalidPathError: ",
    "another method": "RankFailedError: Rank 1 is at 'restore', but rank 0 is at 'restore_latest'",
    "another step": "InvalidArgumentError: All ranks must restore the same step, got [1, 2].",
    "old file, another model": "StateDictMismatchError: 'model' does not fit the checkpoint",
    "old files, each its own": "CheckpointChangedError: The ranks see different files",
    "the newest on one rank": "InvalidArgumentError: All ranks must restore the same step, got [None, 1].",
}
"""What is wrong on the second rank -> what it says."""


def restore_everything(rank: int, place: Path) -> None:
    found: dict[str, tuple[str, list[str]]] = {}
    for case in (*CASES, "nothing", "old file"):
        build = build_for(case, rank)
        before = build.everything()
        error = ""
        try:
            restore(case, build, place / "run", rank)
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        after = build.everything()
        found[case] = error, [key for key in {**before, **after} if before.get(key) != after.get(key)]
    changed = {}
    for run, replacement in (
        ("other-run", "replacement/checkpoint-00000001"),
        ("rotated", "newer/checkpoint-00000002"),
    ):
        build, manager = Build(3), CheckpointManager(place / run)
        if rank == 1:
            build.model.__class__ = Replacing
            vars(build.model).update(run=place / run, replacement=place / replacement)
        step = manager.restore(build.state(), 1) if run == "other-run" else manager.restore_latest(build.state())
        changed[run] = step, build.everything()
    (place / f"{rank}.json").write_text(json.dumps([found, changed]))


@pytest.mark.parametrize("case", CASES)
def test_what_one_rank_refuses_changes_nothing_on_any(case: str, found: list[Any]) -> None:
    (first_error, *first), (second_error, *second) = (of_rank[case] for of_rank, _ in found)

    assert second_error.startswith(CASES[case])
    assert CASES[case] in first_error
    assert (first, second) == ([[]], [[]])


def test_what_no_rank_refuses_is_restored_on_all(found: list[Any]) -> None:
    for of_rank, _ in found:
        for case, changes in (("nothing", {"own/'counter'/'mean'"}), ("old file", {"model/1.running_mean"})):
            error, differences = of_rank[case]
            assert error == ""
            assert {"own/'counter'/'count'"} | changes <= set(differences)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each of two ranks found: in each case the error, and what was changed; then what it restored at last."""
    place = tmp_path_factory.mktemp("ranks")
    saved = Build(1)
    saved.counter.values = {"count": 7, "mean": torch.ones(2)}
    with CheckpointManager(place / "run") as manager:
        manager.save(1, saved.state())
        shutil.copytree(place / "run", place / "other-run")
        shutil.copytree(place / "run", place / "rotated")
        manager.save(2, saved.state())
    old = {name: part.state_dict() for name, part in saved.state().components.items()}
    for number in range(2):
        (place / f"machine{number}").mkdir()
        torch.save({**old, "step": number}, place / f"machine{number}" / "old.pt")
    (place / "empty").mkdir()
    shutil.copytree(place / "other-run", place / "damaged")
    (place / "damaged" / "checkpoint-00000001" / "checkpoint.json").write_text("{}")
    for name, step in (("replacement", 1), ("newer", 2)):
        with CheckpointManager(place / name) as manager:
            manager.save(step, Build(2).state())
    check_ranks(place / "ranks", WORLD_SIZE, restore_everything, place)
    return [json.loads((place / f"{rank}.json").read_text()) for rank in range(WORLD_SIZE)]


@pytest.mark.parametrize(("run", "step"), [("other-run", 1), ("rotated", 2)], ids=["replaced", "removed"])
def test_a_checkpoint_that_is_replaced_or_removed_while_a_rank_reads_it_is_read_anew(
    run: str, step: int, found: list[Any]
) -> None:
    expected = Build(2).everything()
    parts = [key for key in expected if key.startswith(("model", "optimizer", "scheduler", "own/'counter'"))]
    assert len(parts) > 10, sorted(expected)
    for _, changed in found:
        restored_step, restored = changed[run]
        assert restored_step == step
        assert {key for key in parts if restored[key] != expected[key]} == set()
