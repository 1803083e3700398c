"""Modules that the user has parallelized are saved by every rank: the files are those of the whole module."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hfshard
from hfshard.errors import RankFailedError, UnstorableTensorError
from tests.distributed.gloo import check_ranks, waiting
from tests.distributed.test_save_on_ranks_state_dicts import contents


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 14)
        self.down = nn.Linear(14, 6)
        self.norm = nn.LayerNorm(6)


class Net(nn.Module):
    """Uneven, tied, frozen, bf16, and buffers of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.frozen = nn.Linear(6, 6, bias=False).requires_grad_(False).bfloat16()
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(5))
        self.register_buffer("mask", torch.arange(5) > 2)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


def fsdp(net: Net) -> None:
    from torch.distributed.fsdp import fully_shard

    for block in net.blocks:
        fully_shard(block)
    fully_shard(net.frozen)
    fully_shard(net)


def tensor_parallel(net: Net) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    _parallelize_blocks(net, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",)))


def _parallelize_blocks(net: Net, mesh: object) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in net.blocks:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh, plan, src_data_rank=None)  # type: ignore[arg-type]


def fsdp_over_tensor_parallel(net: Net) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    _parallelize_blocks(net, mesh["tp"])
    for block in net.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(net.frozen, mesh=mesh["dp"])
    fully_shard(net, mesh=mesh["dp"])


def hybrid(net: Net) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    fully_shard(net.frozen, mesh=mesh)
    fully_shard(net, mesh=mesh)


def pipeline(net: Net) -> None:
    """One stage of two: the other layers are gone."""
    if dist.get_rank() == 0:
        del net.blocks[1], net.frozen, net.scale
    else:
        net.blocks = nn.ModuleDict({"1": net.blocks[1]})  # type: ignore[assignment]
        del net.embed, net.head, net.count, net.mask, net.scratch


def save_net(rank: int, ways: list[Callable[[Net], None]], place: Path) -> None:
    for way in ways:
        net = Net()
        way(net)
        for name, size in (("single", "5GB"), ("sharded", 5000)):
            for again in range(2 if name == "sharded" else 1):
                index = hfshard.save_model(net, place / way.__name__ / name, rank == 0, max_shard_size=size)
                assert index is not None
                dist.barrier()
                assert contents(place / way.__name__ / name) == contents(place / name), (way, name, again)
                assert index.tied_names == {"head.weight": "embed.weight"}


@pytest.mark.parametrize(
    ("world_size", "ways"),
    [(2, [fsdp, tensor_parallel]), (4, [fsdp, fsdp_over_tensor_parallel, hybrid])],
)
def test_files_are_those_of_the_whole_module(
    tmp_path: Path, world_size: int, ways: list[Callable[[Net], None]]
) -> None:
    for name, size in (("single", "5GB"), ("sharded", 5000)):
        hfshard.save_model(Net(), tmp_path / name, max_shard_size=size)

    check_ranks(tmp_path / "ranks", world_size, save_net, ways, tmp_path)


def save_stages(rank: int, place: Path) -> None:
    net = Net()
    pipeline(net)
    for is_late in (False, False, True):
        if is_late and rank == 1:
            time.sleep(0.5)
        options: dict[str, Any] = {"is_main_process": rank == 0, "collective": True} if is_late else {}
        with waiting(0) if is_late else nullcontext():  # for ranks without parts, which is no time
            index = hfshard.save_model(net, place / "stages", max_shard_size=5000, **options)
        assert index is not None
        assert set(index.weight_map) == set(Net().state_dict()) - {"head.weight"}
    with pytest.raises(UnstorableTensorError if rank else RankFailedError, match="Cannot store 'a'"):
        hfshard.save_state_dict({"a": object() if rank else torch.zeros(1)}, place / "stages", collective=True)  # type: ignore[dict-item]


def test_pipeline_stages_of_plain_tensors_are_united(tmp_path: Path) -> None:
    check_ranks(tmp_path / "ranks", 2, save_stages, tmp_path)

    loaded = hfshard.load_state_dict(tmp_path / "stages")
    whole = Net().state_dict()
    assert loaded.keys() == whole.keys()
    assert all(torch.equal(loaded[name], whole[name]) for name in whole)
    assert hfshard.verify_checkpoint(tmp_path / "stages").ok
