"""Two ranks restore (over gloo): either both restore all of a checkpoint, or neither of them changes anything."""

from __future__ import annotations

import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from hfshard.training import CheckpointManager, TrainingState
from tests.crash.runs.content import Counter, seed_all
from tests.training import fingerprint, processes
from tests.training.test_run_ranks import WORLD_SIZE, join


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
        found = {**dict(fingerprint.of_model(self.model)), **dict(fingerprint.of_rngs())}
        found |= fingerprint.of_optimizer(self.optimizer, self.model, "optimizer")
        found |= fingerprint.of_scheduler(self.scheduler)
        found |= fingerprint.flatten([one.grad for one in self.model.parameters()], "grad")
        return found | dict(fingerprint.flatten(self.counter.values, "counter"))


class Replacing(nn.Sequential):
    """While it is compared, on the second rank, another process replaces the checkpoint."""

    replacement: Path
    run: Path

    @property
    def _keys_to_ignore_on_save(self) -> None:
        if self.replacement.exists():
            time.sleep(0.2)  # the first rank has read everything
            os.rename(self.run / "checkpoint-00000001", self.run / "was-replaced")
            os.rename(self.replacement, self.run / "checkpoint-00000001")


class Rotating(nn.Sequential):
    """While it is compared, on the second rank, another process saves a newer checkpoint and removes this one."""

    newer: Path
    run: Path

    @property
    def _keys_to_ignore_on_save(self) -> None:
        if self.newer.exists():
            time.sleep(0.2)  # the first rank has read everything
            os.rename(self.newer, self.run / self.newer.name)
            shutil.rmtree(self.run / "checkpoint-00000001")


def refuse_weights(module: nn.Module, *_: object) -> None:
    raise ValueError("these weights are not for me")


def own_run(of_rank: Path) -> str:
    """One path on both ranks, as of a disk of each machine, that leads each to a run of its own."""
    return f"/proc/self/fd/{os.dup2(os.open(of_rank, os.O_RDONLY), 100)}"


def restore(case: str, build: Build, run: Path, rank: int) -> int | None:
    """What one rank calls."""
    other = run.parent / "other-run"
    seen_by = {
        "another run": (run, other),
        "no checkpoint on the first": (run.parent / "empty", run),
        "no checkpoint but a damaged one": (run.parent / "empty", run.parent / "damaged"),
    }
    manager = CheckpointManager(own_run(seen_by[case][rank]) if case in seen_by else run)
    if case == "a run of its own":
        manager = CheckpointManager(other if rank else run)
    if case == "a checkpoint of its own":
        return manager.restore(build.state(), (other if rank else run) / "checkpoint-00000001")
    if case == "old files, each its own":
        os.chdir(run.parent / f"machine{rank}")
        return manager.restore(build.state(), "/proc/self/cwd/old.pt")
    if case.startswith("old"):
        return manager.restore(build.state(), run.parent / "machine0" / "old.pt")
    if case == "no place":
        return manager.restore(build.state(), 1 if rank == 0 else "")
    if case == "another method" and rank == 1:
        return manager.restore(build.state())
    if case == "another step":
        return manager.restore(build.state(), rank + 1)
    if case == "the newest on one rank":
        return manager.restore(build.state(), None if rank == 0 else 1)
    return manager.restore_latest(build.state(), strict=case != "not strict")


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
    "no checkpoint on the first": "CheckpointNotFoundError: Rank 1 finds the checkpoint '/proc/self/fd/100/checkpoint-",
    "no checkpoint but a damaged one": "CheckpointNotFoundError: Rank 1 finds the checkpoint '/proc/self/fd/100",
    "a run of its own": "InvalidArgumentError: Rank 1 restores from '",
    "a checkpoint of its own": "InvalidArgumentError: Rank 1 restores from '",
    "no place": "InvalidPathError: ",
    "another method": "RankFailedError: Rank 1 is at 'restore' where rank 0 is at 'restore_latest'",
    "another step": "InvalidArgumentError: All ranks must restore the same step, got [1, 2].",
    "old file, another model": "StateDictMismatchError: 'model' does not fit the checkpoint",
    "old files, each its own": "CheckpointChangedError: The ranks see different files",
    "the newest on one rank": "InvalidArgumentError: All ranks must restore the same step, got [None, 1].",
}
"""What is wrong on the second rank -> what it says."""


class Outcome(NamedTuple):
    """What a rank found."""

    error: str
    differences: list[str]
    """What was changed."""


def restore_everything(place: Path, rank: int) -> None:
    torch.set_num_threads(1)
    join(place, rank, WORLD_SIZE)
    found: dict[str, Outcome] = {}
    for case in (*CASES, "nothing", "old file"):
        build = build_for(case, rank)
        before = build.everything()
        error = ""
        try:
            restore(case, build, place / "run", rank)
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        after = build.everything()
        found[case] = Outcome(error, [key for key in {**before, **after} if before.get(key) != after.get(key)])
    (place / f"{rank}.json").write_text(json.dumps(found))
    build = Build(3)
    if rank == 1:
        build.model.__class__ = Replacing
        vars(build.model)["run"] = place / "other-run"
        vars(build.model)["replacement"] = place / "replacement" / "checkpoint-00000001"
    CheckpointManager(place / "other-run").restore(build.state(), 1)
    (place / f"replaced-{rank}.json").write_text(json.dumps(build.everything()))
    build = Build(3)
    if rank == 1:
        build.model.__class__ = Rotating
        vars(build.model).update(run=place / "rotated", newer=place / "newer" / "checkpoint-00000002")
    step = CheckpointManager(place / "rotated").restore_latest(build.state())
    (place / f"rotated-{rank}.json").write_text(json.dumps([step, build.everything()]))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks have left what they found."""
    place = tmp_path_factory.mktemp("ranks")
    saved = Build(1)
    saved.counter.values = {"count": 7, "mean": torch.ones(2)}
    with CheckpointManager(place / "run") as manager:
        manager.save(1, saved.state())
        shutil.copytree(place / "run", place / "other-run")
        shutil.copytree(place / "run", place / "rotated")
        manager.save(2, saved.state())
    for number in range(2):
        parts = saved.state().components.items()
        (place / f"machine{number}").mkdir()
        old = {name: part.state_dict() for name, part in parts} | {"step": number}
        torch.save(old, place / f"machine{number}" / "old.pt")
    (place / "empty").mkdir()
    shutil.copytree(place / "other-run", place / "damaged")
    (place / "damaged" / "checkpoint-00000001" / "checkpoint.json").write_text("{}")
    with CheckpointManager(place / "replacement") as manager:
        manager.save(1, Build(2).state())
    with CheckpointManager(place / "newer") as manager:
        manager.save(2, Build(2).state())
    with ThreadPoolExecutor(WORLD_SIZE) as pool:
        ends = list(
            pool.map(lambda rank: processes.run(place / f"{rank}.txt", restore_everything, place, rank), range(2))
        )
    assert [end.status for end in ends] == [0, 0], ends
    return place


@pytest.fixture(scope="module")
def outcomes(place: Path) -> list[dict[str, Outcome]]:
    """What each of two ranks found in each case."""
    found = [json.loads((place / f"{rank}.json").read_text()) for rank in range(WORLD_SIZE)]
    return [{case: Outcome(*one) for case, one in of_rank.items()} for of_rank in found]


@pytest.mark.parametrize("case", CASES)
def test_what_one_rank_refuses_changes_nothing_on_any(case: str, outcomes: list[dict[str, Outcome]]) -> None:
    first, second = (of_rank[case] for of_rank in outcomes)

    assert second.error.startswith(CASES[case])
    assert CASES[case] in first.error
    assert (first.differences, second.differences) == ([], [])


def test_what_no_rank_refuses_is_restored_on_all(outcomes: list[dict[str, Outcome]]) -> None:
    for of_rank in outcomes:
        assert of_rank["nothing"].error == ""
        assert {"counter/'count'", "counter/'mean'"} <= set(of_rank["nothing"].differences)
        assert of_rank["old file"].error == ""
        assert {"counter/'count'", "model/1.running_mean"} <= set(of_rank["old file"].differences)


def test_a_checkpoint_that_is_replaced_while_a_rank_reads_it_is_read_again(place: Path) -> None:
    for rank in range(WORLD_SIZE):
        assert_second(json.loads((place / f"replaced-{rank}.json").read_text()))


def test_where_a_checkpoint_is_removed_while_a_rank_reads_it_all_restore_a_newer_one(place: Path) -> None:
    for rank in range(WORLD_SIZE):
        step, restored = json.loads((place / f"rotated-{rank}.json").read_text())
        assert step == 2
        assert_second(restored)


def assert_second(restored: dict[str, str]) -> None:
    expected = Build(2).everything()
    parts = [key for key in expected if key.startswith(("model", "optimizer", "scheduler", "counter"))]
    assert len(parts) > 10, sorted(expected)
    assert {key for key in parts if restored[key] != expected[key]} == set()
