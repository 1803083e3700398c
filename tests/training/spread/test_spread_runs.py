"""Runs of models that are spread over ranks: killed and resumed to the bit, on the same ranks and on others."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import hfshard
from hfshard.training import CheckpointManager
from tests.distributed.gloo import check_ranks, run_ranks
from tests.training.spread.models import MESHES, OPTIMIZERS, Run

STEPS, SAVED_AT = 4, 2

CASES = [*((name, torch.float32) for name in OPTIMIZERS), ("foreach", torch.bfloat16)]
"""Optimizers, and the dtype of parameters and slots."""


def name_of(optimizer: str, dtype: torch.dtype) -> str:
    return f"{optimizer}-{str(dtype).removeprefix('torch.')}"


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name


def each_run(rank: int, layout: str, work: Callable[[Run, str], object]) -> None:
    """Do the same with a new run of each case, whose random numbers are the rank's own, but for tensor parallelism."""
    for number, (optimizer, dtype) in enumerate(CASES):
        run = Run(layout, optimizer, dtype)
        torch.manual_seed(number + (100 * rank if layout == "fsdp" else 0))
        work(run, name_of(optimizer, dtype))


def go_straight(rank: int, layout: str, place: Path) -> None:
    def work(run: Run, name: str) -> None:
        run.train(SAVED_AT)
        whole = run.whole()
        if rank == 0:
            torch.save(whole, place / f"{name}-saved.pt")
        run.train(STEPS - SAVED_AT)
        torch.save(run.local(), place / f"{name}-{rank}.pt")

    each_run(rank, layout, work)


def save_and_die(rank: int, layout: str, place: Path) -> None:
    def work(run: Run, name: str) -> None:
        run.train(SAVED_AT)
        with CheckpointManager(place / name) as manager:
            manager.save(SAVED_AT, run.state, extra={"rank": rank})
        run.train(1)

    each_run(rank, layout, work)
    os.kill(os.getpid(), signal.SIGKILL)


def resume(rank: int, layout: str, place: Path) -> None:
    def work(run: Run, name: str) -> None:
        torch.manual_seed(9)
        run.train(1)  # which leaves numbers of another run everywhere
        with CheckpointManager(place / name) as manager:
            restored = manager.restore_latest(run.state)
            assert restored == SAVED_AT and restored.extra == {"rank": 0}
            run.train(STEPS - SAVED_AT)
            assert_same(run.local(), torch.load(place / f"{name}-{rank}.pt"))

    each_run(rank, layout, work)


def restore_elsewhere(rank: int, layout: str, places: list[Path]) -> None:
    for place in places:
        for optimizer, dtype in CASES:
            name = name_of(optimizer, dtype)
            run = Run(layout, optimizer, dtype)
            assert CheckpointManager(place / name).restore(run.state) == SAVED_AT
            assert_same(run.whole(), torch.load(place / f"{name}-saved.pt"))
            if layout != "tp" or optimizer not in (
                "foreach",
                "fused",
            ):  # torch's own can't do some parameters that are not spread
                run.train(1)


@pytest.fixture(scope="module", params=["fsdp", pytest.param("2d", marks=pytest.mark.slow)])
def killed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The checkpoints of runs whose ranks were killed, and what they would have come to."""
    layout: str = request.param
    place = tmp_path_factory.mktemp(layout)
    world_size = math.prod(MESHES[layout])
    check_ranks(place / "straight", world_size, go_straight, layout, place)
    ends = run_ranks(place / "killed", world_size, save_and_die, layout, place)
    assert {end.status for end in ends} == {-signal.SIGKILL}, [end.words for end in ends]
    return layout, place


def test_a_run_whose_ranks_were_killed_goes_on_to_the_bit(killed: tuple[str, Path], tmp_path: Path) -> None:
    layout, place = killed
    check_ranks(tmp_path, math.prod(MESHES[layout]), resume, layout, place)


@pytest.mark.parametrize("layout", ["tp", pytest.param("hsdp", marks=pytest.mark.slow)])
def test_a_run_is_restored_on_other_ranks(killed: tuple[str, Path], tmp_path: Path, layout: str) -> None:
    check_ranks(tmp_path, math.prod(MESHES[layout]), restore_elsewhere, layout, [killed[1]])


def test_one_process_restores_a_spread_run_and_saves_the_same_files(killed: tuple[str, Path], tmp_path: Path) -> None:
    place = killed[1]
    for optimizer, dtype in CASES:
        name = name_of(optimizer, dtype)
        run = Run("whole", optimizer, dtype)
        manager = CheckpointManager(place / name)
        assert manager.verify() == {SAVED_AT: []}
        manager.restore(run.state)
        assert_same(run.whole(), torch.load(place / f"{name}-saved.pt"))
        with CheckpointManager(tmp_path / name) as alone:
            saved = Path(alone.save(SAVED_AT, run.state))
        for file in ("model.safetensors", "optimizer.safetensors"):
            assert (saved / file).read_bytes() == (place / name / saved.name / file).read_bytes(), (name, file)
        assert hfshard.load_state_dict(saved).keys() == run.net.state_dict().keys()
