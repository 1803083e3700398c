"""Two runs in one job, each of a process group of its own: saved at once, and each resumed to the bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, TensorDataset

from hfshard.errors import RankFailedError
from hfshard.training import CheckpointManager, ResumableDataLoader, TrainingState
from tests.distributed.gloo import check_ranks

STEPS, SAVED_AT = 5, 2


class Team:
    """One of the two runs: an actor under FSDP2 on ranks 0 and 1, or a critic under DDP on ranks 2 and 3."""

    def __init__(self, rank: int, group: dist.ProcessGroup, seed: int) -> None:
        torch.manual_seed(seed + rank // 2)
        self.net: nn.Module = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.Linear(5, 1))
        if rank < 2:
            fully_shard(self.net, mesh=DeviceMesh.from_group(group, "cpu"))
        else:
            self.net = DistributedDataParallel(self.net, process_group=group)
        torch.manual_seed(seed + 100 * rank)
        random.seed(seed + rank)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)
        data = TensorDataset(torch.arange(24.0).reshape(8, 3) / 24)
        sampler: DistributedSampler[Any] = DistributedSampler(data, 2, rank % 2, seed=1)
        self.loader = ResumableDataLoader(data, batch_size=2, sampler=sampler)
        self.state = TrainingState(model=self.net, optimizer=self.optimizer, loader=self.loader)
        self.losses: list[float] = []

    def train(self, manager: CheckpointManager | None, step: int) -> None:
        """Go on from a step to the end, and save on the way."""
        while step < STEPS:
            for [batch] in self.loader:
                loss = (self.net(batch).mean() - random.random()) ** 2
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.losses.append(loss.item())
                step += 1
                if manager is not None:
                    manager.save(step, self.state, blocking=step != SAVED_AT)
                if step == STEPS:
                    return


def train_two(rank: int, place: Path) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dist.new_group([0, 2])  # as those that send weights: rank 0 is in more groups than rank 1
    mine = groups[rank // 2]
    run = place / ("actor", "critic")[rank // 2]
    straight = Team(rank, mine, 0)
    straight.train(None, 0)
    saved = Team(rank, mine, 0)
    with CheckpointManager(run, process_group=mine) as manager:
        saved.train(manager, 0)
        assert manager.all_steps() == [1, 2, 3, 4, 5]
    assert saved.losses == straight.losses
    for step in (SAVED_AT, SAVED_AT + 1):  # one written in a thread, and one that was waited for
        resumed = Team(rank, mine, 7)
        with CheckpointManager(run, process_group=mine) as manager:
            assert manager.restore(resumed.state, step) == step
            resumed.train(None, step)
        assert resumed.losses == straight.losses[step:]
        for name, tensor in straight.net.state_dict().items():
            found: Any = resumed.net.state_dict()[name]
            expected: Any = tensor
            assert torch.equal(found.to_local() if rank < 2 else found, expected.to_local() if rank < 2 else expected)
    pushed = CheckpointManager(run, process_group=mine).push(place / f"hub {rank // 2}", "all")
    assert len(pushed) == 5

    # What one rank of a group refuses is raised on the other by the number that it has in the job; the other group
    # does not notice.
    manager = CheckpointManager(run, process_group=mine)
    if rank < 2:
        assert manager.restore(resumed.state) == STEPS
        return
    resumed.state.components["model"] = nn.Linear(3, 3) if rank == 3 else resumed.net
    expected_error: Any = Exception if rank == 3 else RankFailedError
    with pytest.raises(expected_error, match="Rank 3 failed" if rank == 2 else "") as caught:
        manager.restore(resumed.state, SAVED_AT)
    assert rank == 3 or caught.value.rank == 3


def test_an_actor_and_a_critic_are_saved_at_once_and_resumed(tmp_path: Path) -> None:
    check_ranks(tmp_path / "ranks", 4, train_two, tmp_path)
