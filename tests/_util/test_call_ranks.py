"""Two process groups of one job save and load at once, each its own model; who is in neither is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import hfshard
from hfshard.errors import InvalidArgumentError, RankFailedError
from tests.distributed.gloo import check_ranks
from tests.helpers.tiny_bert import Bert, bert

NAMES = ("actor", "critic")


def net_of(group: dist.ProcessGroup, first: float) -> nn.Linear:
    """A layer of 5 x 2, whose numbers count from the first one, spread over two ranks: three rows, and two."""
    net = nn.Linear(2, 5, bias=False)
    with torch.no_grad():
        net.weight.copy_(torch.arange(10.0).reshape(5, 2) + first)
    fully_shard(net, mesh=DeviceMesh.from_group(group, "cpu"))
    return net


def use_two_groups(rank: int, place: Path) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dist.new_group([0, 2])  # as those that send weights: rank 0 is in more groups than rank 1
    team = rank // 2
    mine = groups[team]
    path = place / NAMES[team]
    net = net_of(mine, 100.0 * team)

    # Both at once, whole files of each.
    index = hfshard.save_model(net, path, process_group=mine)
    assert index is not None and list(index.weight_map) == ["weight"]
    assert hfshard.load_state_dict(path)["weight"][:, 0].tolist() == [100.0 * team + row for row in (0, 2, 4, 6, 8)]
    again = net_of(mine, -1.0)
    hfshard.load_model(again, path, process_group=mine, verify="full")
    like = hfshard.load_state_dict(path, like=net.state_dict(), process_group=mine)
    for found in (again.weight, like["weight"]):
        assert torch.equal(found.to_local(), net.weight.to_local())  # type: ignore[attr-defined]

    # One group alone, as the other does something else; and stages, whose tensors are plain.
    if team == 1:
        stage = {f"layer.{rank}": torch.full((3,), float(rank))}
        hfshard.save_state_dict(stage, place / "stages", collective=True, process_group=mine)
        assert sorted(hfshard.load_state_dict(place / "stages")) == ["layer.2", "layer.3"]

        # A rank that fails is named as torch.distributed numbers it.
        state = {"w": net.weight, "more": torch.ones(2).to_sparse() if rank == 3 else torch.ones(2)}
        expected: type[Exception] = hfshard.errors.UnstorableTensorError if rank == 3 else RankFailedError
        with pytest.raises(expected, match="Rank 3 failed" if rank == 2 else "more"):
            hfshard.save_state_dict(state, place / "failing", process_group=mine)

    # Models of transformers, by their own methods.
    def spread(model: nn.Module) -> Any:
        return fully_shard(model, mesh=DeviceMesh.from_group(mine, "cpu"))

    spread(bert(team + 1.0)).save_pretrained(path / "bert", process_group=mine)
    built = Bert.from_pretrained(path / "bert", parallelize=spread, process_group=mine)
    assert len(built.state_dict()) == 23
    assert all((tensor.to_local() == team + 1.0).all() for tensor in built.state_dict().values())


def test_two_groups_save_and_load_at_once(tmp_path: Path) -> None:
    check_ranks(tmp_path / "ranks", 4, use_two_groups, tmp_path)


def be_refused(rank: int, place: Path) -> None:
    alone = [dist.new_group([0]), dist.new_group([1])]
    state = {"w": torch.full((2,), float(rank))}
    not_in_it = rf"Rank {rank} is not in the process group that was passed"
    for call in (
        lambda group: hfshard.save_state_dict(state, place / "never", process_group=group),
        lambda group: hfshard.save_model(nn.Linear(2, 2), place / "never", process_group=group),
        lambda group: hfshard.load_state_dict(place / "never", process_group=group),
        lambda group: hfshard.load_model(nn.Linear(2, 2), place / "never", process_group=group),
        lambda group: hfshard.CheckpointManager(place / "never", process_group=group),
    ):
        with pytest.raises(InvalidArgumentError, match=not_in_it):
            call(alone[1 - rank])
    with pytest.raises(InvalidArgumentError, match=r"got a DeviceMesh.*mesh\.get_group\(\)"):
        hfshard.save_state_dict(state, place / "never", process_group=DeviceMesh("cpu", [0, 1]))  # type: ignore[arg-type]
    assert not (place / "never").exists()

    # A group of one rank saves for itself, and waits for nobody.
    hfshard.save_state_dict(state, place / str(rank), process_group=alone[rank])
    assert hfshard.load_state_dict(place / str(rank))["w"].tolist() == [float(rank)] * 2
    dist.destroy_process_group(alone[rank])
    with pytest.raises(InvalidArgumentError, match="it was destroyed"):
        hfshard.save_state_dict(state, place / "never", process_group=alone[rank])


def test_what_is_no_group_of_this_rank_is_refused(tmp_path: Path) -> None:
    check_ranks(tmp_path / "ranks", 2, be_refused, tmp_path)


def test_a_group_needs_torch_distributed(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="init_process_group first"):
        hfshard.save_state_dict({}, tmp_path / "never", process_group=object())  # type: ignore[arg-type]
