"""Checkpoints of a pipeline whose stages differ in more than their layers, and states that do not fit one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from hfshard.errors import HfshardError, InvalidArgumentError, StateDictMismatchError
from hfshard.training import CheckpointManager, TrainingState
from tests.distributed.gloo import check_ranks
from tests.training.ingredients import Keeps
from tests.training.models import Net
from tests.training.test_spread_save_runs_on_ranks import assert_same


def build(rank: int | None, *, seed: int = 0, lr: float = 0.1, **parts: Any) -> TrainingState:
    """A stage, or the whole, after a step; its weights and its biases are groups of their own."""
    torch.manual_seed(seed)
    net = Net(rank)
    weights = [one for one in net.parameters() if one.dim() > 1]
    biases = [one for one in net.parameters() if one.dim() == 1 and one.requires_grad]
    groups: list[dict[str, Any]] = [{"params": weights}, {"params": biases, "weight_decay": 0.5}]
    optimizer = torch.optim.AdamW(groups, lr=lr, foreach=False)
    for parameter in net.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    return TrainingState(model=net, optimizer=optimizer, scheduler=scheduler, **parts)


def tensors(state: TrainingState) -> dict[str, torch.Tensor]:
    """Of the model and the optimizer, and its options."""
    net, optimizer = state.components["model"], state.components["optimizer"]
    found = {name: getattr(one, "_local_tensor", one).clone() for name, one in net.state_dict().items()}
    for name, parameter in net.named_parameters():
        found |= {f"{name}/{slot}": one.clone() for slot, one in optimizer.state.get(parameter, {}).items()}
    options = [[group["lr"], group["weight_decay"]] for group in optimizer.param_groups]
    return found | {"options": torch.tensor(options)}


def keep_what_differs(rank: int, place: Path) -> None:
    """Each stage has its own learning rate, and so its own scheduler; and an object with another tensor."""
    state = build(rank, lr=0.1 * (rank + 1), own=Keeps(torch.tensor(float(rank))), same=Keeps(torch.tensor(5.0)))
    with CheckpointManager(place) as manager:
        manager.save(1, state)
        again = build(rank, seed=1, lr=0.7, own=Keeps(torch.tensor(9.0)), same=Keeps(torch.tensor(9.0)))
        manager.restore(again)
    assert_same(tensors(again), tensors(state))
    assert again.components["scheduler"].base_lrs == [0.1 * (rank + 1)] * 2
    assert (again.components["own"].tensor.item(), again.components["same"].tensor.item()) == (rank, 5)


def keep_own_buffers(rank: int, place: Path) -> None:
    """Each stage has a buffer of the same name; restored also where the second one has it no more."""

    def stage(count: float) -> TrainingState:
        state = build(rank)
        state.components["model"].register_buffer("count", torch.tensor(count))
        return state

    state, again, without = stage(rank + 5.0), stage(0.0), build(rank) if rank else stage(0.0)
    with CheckpointManager(place) as manager:
        manager.save(1, state)
        manager.restore(again)
        manager.restore(without)

    assert_same(tensors(again), tensors(state))
    assert_same(tensors(without), tensors(state if rank == 0 else build(rank)))


def save_plain_beside_sharded(rank: int, place: Path) -> None:
    own_mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"]

    def stage(seed: int) -> TrainingState:
        torch.manual_seed(seed)
        net = Net(rank)
        if rank == 1:
            fully_shard(net, mesh=own_mesh)
        return TrainingState(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))

    state = stage(0)
    with CheckpointManager(place) as manager:
        manager.save(1, state, blocking=False)
        again = stage(1)
        manager.restore(again)
    assert_same(tensors(again), tensors(state))


def refuse_what_does_not_fit(rank: int, place: Path) -> None:
    manager = CheckpointManager(place)
    manager.save(1, build(rank))
    parts: dict[str, Any] = {"more": Keeps(torch.ones(1))} if rank else {}
    with pytest.raises(HfshardError, match="Give the states of all ranks the same parts"):
        manager.save(2, build(rank, **parts))
    lbfgs = build(rank)
    lbfgs = TrainingState(
        model=lbfgs.components["model"], optimizer=torch.optim.LBFGS(lbfgs.components["model"].parameters())
    )
    with pytest.raises(HfshardError, match=r"LBFGS, whose state covers all parameters together"):
        manager.save(2, lbfgs)
    spread = Keeps(distribute_tensor(torch.ones(2), init_device_mesh("cpu", (2,))))
    with pytest.raises(HfshardError, match=r"Cannot merge 'own' of all ranks .* has its own DTensors"):
        manager.save(2, build(rank, own=spread))
    other = build(rank)
    if rank == 1:
        del other.components["model"].head
    before = tensors(other)
    with pytest.raises(HfshardError, match=r"head\.bias"):
        manager.restore(other)
    assert_same(tensors(other), before)
    assert manager.all_steps() == [1]


def refuse_parts_that_one_rank_has(rank: int, place: Path) -> None:
    """Only those of the first rank would be stored, and no rank could restore what was saved."""
    manager = CheckpointManager(place)
    torch.manual_seed(0)
    copies = nn.Linear(2, 2)
    halves = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (2,)))
    nets: list[Any] = [copies, halves]
    for net in nets:
        for owner in (0, 1):
            parts: dict[str, Any] = {"more": Keeps(torch.ones(1))} if rank == owner else {}
            with pytest.raises(InvalidArgumentError, match=r"state of rank 1 has the parts .* but that of rank 0 has"):
                manager.save(1, TrainingState(model=net, **parts))
    assert manager.all_steps() == []


def refuse_stages_with_the_same_names(rank: int, place: Path) -> None:
    torch.manual_seed(rank)
    for more in (0, rank):
        net = nn.Sequential(nn.Linear(2, 2), *(nn.Linear(2, 2) for _ in range(more)))
        with pytest.raises(InvalidArgumentError, match="give pipeline stages the whole model's names"):
            CheckpointManager(place).save(1, TrainingState(model=net))
    assert not place.exists()


def work_of_two_ranks(rank: int, place: Path) -> None:
    refuse_stages_with_the_same_names(rank, place / "same names")
    keep_what_differs(rank, place / "differs")
    keep_own_buffers(rank, place / "buffers")
    save_plain_beside_sharded(rank, place / "mixed")
    refuse_what_does_not_fit(rank, place / "refusals")
    refuse_parts_that_one_rank_has(rank, place / "parts")


def test_stages_that_differ_are_restored_each_with_its_own(tmp_path: Path) -> None:
    check_ranks(tmp_path / "ranks", 2, work_of_two_ranks, tmp_path)

    manager = CheckpointManager(tmp_path / "differs")
    alone = build(None, own=Keeps(torch.tensor(3.0)), same=Keeps(torch.tensor(3.0)))
    with pytest.raises(StateDictMismatchError, match=r"Each rank saved its own 'scheduler'"):
        manager.restore(alone)
    groups = [[one["lr"], one["weight_decay"]] for one in alone.components["optimizer"].param_groups]
    assert groups == [[0.1, 0.01], [0.1, 0.5]]
    restored = manager.restore(alone, strict=False)
    assert [words.split("'")[1] for words in restored.differences] == ["scheduler", "own", "optimizer"]
    assert (alone.components["own"].tensor.item(), alone.components["same"].tensor.item()) == (3, 5)

    whole = build(None, seed=3)
    assert CheckpointManager(tmp_path / "refusals").restore(whole) == 1
    assert nn.functional.relu(whole.components["model"].head.weight).sum() > 0
    gradients = [one.grad for group in whole.components["optimizer"].param_groups for one in group["params"]]
    assert all(one is not None and not one.any() for one in gradients)  # each stage notes which ones it had
