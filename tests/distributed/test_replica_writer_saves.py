"""Replicated models among several ranks: a save is no collective, whoever calls it."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import hfshard
from tests.distributed.gloo import check_ranks, waiting


def state_of(path: Path) -> torch.Tensor:
    return hfshard.load_state_dict(path)["w"]


def save_replicas(rank: int, place: Path) -> None:
    state = {"w": torch.full((3,), float(rank))}

    # By the first rank alone, which waits a moment for the others.
    if rank == 0:
        with waiting(0.5):
            hfshard.save_state_dict(state, place / "alone")
    dist.barrier()
    assert state_of(place / "alone").tolist() == [0.0] * 3

    # By another one alone.
    if rank == 1:
        with waiting(0.1):
            hfshard.save_state_dict(state, place / "alone")
    dist.barrier()
    assert state_of(place / "alone").tolist() == [1.0] * 3

    # By all: one save, the first rank's.
    for _ in range(2):
        index = hfshard.save_state_dict(state, place / "together", max_shard_size=5000)
        assert list(index.weight_map) == ["w"]
        assert state_of(place / "together").tolist() == [0.0] * 3
        dist.barrier()

    # By all, each into a directory of its own: none waits for the others' outcome.
    with waiting(0.1):
        hfshard.save_state_dict(state, place / f"of rank {rank}")
    assert state_of(place / f"of rank {rank}").tolist() == [float(rank)] * 3
    dist.barrier()

    # By the main process, as the others say that they are not: nobody waits.
    model = nn.parallel.DistributedDataParallel(nn.BatchNorm1d(3))
    model.module.running_mean.fill_(rank)
    with waiting(1000):  # longer than a test may take
        saved = hfshard.save_model(model, place / "model", is_main_process=rank == 0)
    assert (saved is None) == (rank != 0)
    dist.barrier()
    hfshard.save_model(model, place / "buffers")
    assert hfshard.load_state_dict(place / "buffers")["running_mean"].tolist() == [0.0] * 3


def test_nobody_needs_to_call_and_all_may(tmp_path: Path) -> None:
    check_ranks(tmp_path / "ranks", 2, save_replicas, tmp_path)
