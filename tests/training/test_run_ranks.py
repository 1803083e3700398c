"""Runs of several processes with the same model (DDP over gloo): saved by all, resumed by all, to the bit."""

from __future__ import annotations

import json
import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, TensorDataset

from hfshard.errors import RankMissingError
from hfshard.training import CheckpointManager, ResumableDataLoader, TrainingState
from hfshard.training.run_ranks import Replicas
from tests.distributed.gloo import check_ranks, join
from tests.helpers import processes
from tests.training.ingredients import Keeps

STEPS, SAVED_AT, WORLD_SIZE = 6, 3, 2


def train(
    place: Path, run: Path, name: str, rank: int, world_size: int, kill_at: int | None, *, blocking: bool
) -> None:
    """Some steps of a model whose dropout, noise and data are others on each rank; what came out goes into a file."""
    if world_size > 1:
        join(place, rank, world_size)
    random.seed(rank), np.random.seed(rank), torch.manual_seed(0 if kill_at is not None or name == "straight" else 9)
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    model = DistributedDataParallel(model) if world_size > 1 else model
    torch.manual_seed(100 * rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = TensorDataset(torch.arange(48.0).reshape(12, 4))
    sampler: DistributedSampler[Any] = DistributedSampler(data, world_size, rank, seed=1)
    loader = ResumableDataLoader(data, batch_size=1, sampler=sampler)
    state = TrainingState(model=model, optimizer=optimizer, loader=loader)
    manager = CheckpointManager(run)
    step = int(manager.restore_latest(state, strict=world_size > 1) or 0)
    losses: list[float] = []
    batches = iter(loader)
    while step < STEPS:
        [batch] = next(batches)
        loss = (model(batch).mean() - random.random() - float(np.random.rand())) ** 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        step += 1
        if step == SAVED_AT and name != "straight":
            manager.save(step, state, extra={"losses": losses}, blocking=blocking)
            manager.wait_until_finished()
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
    weights = {key: value.tolist() for key, value in model.state_dict().items()}
    found = {
        "losses": losses,
        "weights": weights,
        "next": [random.random(), float(np.random.rand()), *torch.rand(2).tolist()],
    }
    (place / f"{name}-{rank}.json").write_text(json.dumps(found))


def run_ranks(place: Path, run: Path, name: str, world_size: int, *args: Any, **options: Any) -> list[processes.End]:
    (place / "store").unlink(missing_ok=True)
    with ThreadPoolExecutor(world_size) as pool:
        ends = [
            pool.submit(
                processes.end_of,
                place / f"{name}-{rank}.txt",
                _train,
                place,
                run,
                name,
                rank,
                world_size,
                args,
                options,
            )
            for rank in range(world_size)
        ]
        return [end.result() for end in ends]


def _train(
    place: Path, run: Path, name: str, rank: int, world_size: int, args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    torch.set_num_threads(1)
    train(place, run, name, rank, world_size, *args, **options)


def results(place: Path, name: str, world_size: int) -> list[dict[str, Any]]:
    return [json.loads((place / f"{name}-{rank}.json").read_text()) for rank in range(world_size)]


@dataclass(frozen=True, slots=True)
class Resumption:
    """The same run three times: straight to its end, killed after a save, and resumed from that."""

    place: Path
    straight: list[processes.End]
    killed: list[processes.End]
    resumed: list[processes.End]

    @property
    def run(self) -> Path:
        """The directory of the checkpoints."""
        return self.place / "run"


@pytest.fixture(scope="module", params=[True, False], ids=["blocking", "in the background"])
def resumption(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Resumption:
    """Train on two ranks, with either kind of save."""
    place = tmp_path_factory.mktemp("resumption")
    run = place / "run"
    return Resumption(
        place,
        straight=run_ranks(place, run, "straight", WORLD_SIZE, None, blocking=request.param),
        killed=run_ranks(place, run, "killed", WORLD_SIZE, SAVED_AT + 1, blocking=request.param),
        resumed=run_ranks(place, run, "resumed", WORLD_SIZE, None, blocking=request.param),
    )


def test_two_ranks_end_well_unless_they_are_killed(resumption: Resumption) -> None:
    assert [end.status for end in resumption.straight] == [0, 0], resumption.straight
    # The one that dies second may die of the death of the other, in the middle of a collective.
    statuses = [end.status for end in resumption.killed]
    assert -signal.SIGKILL in statuses and 0 not in statuses and None not in statuses, resumption.killed
    assert [end.status for end in resumption.resumed] == [0, 0], resumption.resumed


def test_two_ranks_resume_each_with_its_own_random_state_and_data(resumption: Resumption) -> None:
    expected = results(resumption.place, "straight", WORLD_SIZE)
    assert expected[0]["losses"] != expected[1]["losses"]
    left = [{**one, "losses": one["losses"][SAVED_AT:]} for one in expected]
    assert results(resumption.place, "resumed", WORLD_SIZE) == left


def test_two_ranks_save_one_checkpoint_and_leave_nothing_beside_it(resumption: Resumption) -> None:
    assert [path.name for path in resumption.run.iterdir()] == ["checkpoint-00000003"]


def test_another_number_of_ranks_is_seeded_anew_the_same_way_each_time(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_ranks(tmp_path, run, "killed", WORLD_SIZE, SAVED_AT + 1, blocking=True)
    for name in ("once", "again"):
        [end] = run_ranks(tmp_path, run, name, 1, None, blocking=True)
        assert end.status == 0, end
        words = "was saved by 2 ranks, but there are 1 here: their random number generators are seeded from it"
        assert words in end.words
    [once], [again] = results(tmp_path, "once", 1), results(tmp_path, "again", 1)
    assert once == again


def fail_on_one(rank: int, place: Path, run: Path) -> None:
    model = nn.Linear(2, 2)
    extra = {"strange": object()} if rank == 0 else None
    try:
        CheckpointManager(run).save(1, TrainingState(model=model), extra=extra)
    except Exception as error:
        (place / f"error-{rank}.txt").write_text(f"{type(error).__name__}: {error}")


def test_an_error_of_the_first_rank_is_raised_on_all(tmp_path: Path) -> None:
    run = tmp_path / "run"
    check_ranks(tmp_path / "ranks", WORLD_SIZE, fail_on_one, tmp_path, run)
    first, second = ((tmp_path / f"error-{rank}.txt").read_text() for rank in range(2))
    assert first.startswith("UnstorableTensorError: 'extra/strange' is a object: it cannot be stored")
    assert second.startswith(
        "RankFailedError: Rank 0 failed, so the other ranks gave up: UnstorableTensorError: 'extra/strange'"
    )
    assert not run.exists()


def save_on_the_first_alone(rank: int, run: Path) -> None:
    if rank == 0:
        group: Any = dist.group.WORLD
        group.set_timeout(timedelta(seconds=1))
        with pytest.raises(RankMissingError, match=r"needs every rank. Make it on every rank, outside `if rank == 0:`"):
            CheckpointManager(run).save(1, TrainingState(model=nn.Linear(2, 2)))
        group.set_timeout(timedelta(seconds=processes.PATIENCE_SECONDS))
    dist.barrier()


def test_a_save_to_which_only_the_first_rank_comes_is_told_that_it_needs_all(tmp_path: Path) -> None:
    run = tmp_path / "run"
    check_ranks(tmp_path / "ranks", WORLD_SIZE, save_on_the_first_alone, run)
    assert not run.exists()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_two_changed_signs_are_noticed_wherever_they_are(dtype: torch.dtype) -> None:
    # The top bit of a word moves a sum of products by the same amount at any place.
    generator = random.Random(1)
    tensor = torch.ones(1000, dtype=dtype)
    state = TrainingState(model=nn.Linear(2, 2), own=Keeps(tensor))
    expected = Replicas.of(state, 2).objects["own"]
    for _ in range(200):
        places = generator.sample(range(1, 1000), 2)
        tensor[places] = -1

        assert Replicas.of(state, 2).objects["own"] != expected, places

        tensor[places] = 1
    assert Replicas.of(state, 2).objects["own"] == expected
