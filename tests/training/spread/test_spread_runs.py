"""Runs of models that are spread over ranks: each rank saves and restores its part."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hfshard.training import CheckpointManager
from tests.distributed.gloo import check_ranks
from tests.training.spread.models import MESHES, Run


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]), name


def save_and_go_on(rank: int, place: Path, layout: str) -> None:
    for number, optimizer in enumerate(["adamw", "momentum"]):
        run = Run(layout, optimizer)
        torch.manual_seed(number)
        run.train(2)
        with CheckpointManager(place / optimizer) as manager:
            path = manager.save(2, run.state, extra={"rank": rank})
            at_save = run.whole()
            run.train(2)
            straight = run.local()
            torch.save(at_save, place / f"{optimizer}-whole.pt") if rank == 0 else None
            again = Run(layout, optimizer)
            again.train(1)
            restored = manager.restore_latest(again.state)
            assert restored == 2 and restored.extra == {"rank": 0} and restored.path == path
            equal(again.whole(), at_save)
            again.train(2)
            equal(again.local(), straight)
            dist.barrier()


@pytest.mark.parametrize("layout", ["fsdp", "tp", "2d", "hsdp"])
def test_a_run_goes_on_to_the_bit(tmp_path: Path, layout: str) -> None:
    check_ranks(tmp_path / "ranks", math.prod(MESHES[layout]), save_and_go_on, tmp_path, layout)
