"""Small models that are spread over ranks in different ways: sharded, or in the stages of a pipeline."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

Layout = str
"""fsdp, tp, 2d, hsdp; pp: a block for each rank; pp_fsdp: each block sharded; or whole: one process, no DTensors."""

MESHES: dict[Layout, tuple[int, ...]] = {
    "whole": (1,),
    "alone": (1,),
    "fsdp": (2,),
    "tp": (2,),
    "pp": (2,),
    "2d": (2, 2),
    "hsdp": (2, 2),
    "pp_fsdp": (2, 2),
}


class Block(nn.Module):
    """Two layers of uneven sizes, and a buffer that the steps change."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6, bias=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        self.get_buffer("seen").add_(1)
        moved_BD: torch.Tensor = x_BD + self.down(torch.relu(self.up(x_BD)))
        return moved_BD


class Net(nn.Module):
    """Two blocks and a head of three rows, whose bias is frozen; or one of the blocks, by the same names.

    Args:
        stage: Which of two stages of a pipeline; None: all.
    """

    def __init__(self, stage: int | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(number): Block() for number in range(2)})
        self.head = nn.Linear(6, 3)
        self.head.bias.requires_grad_(False)
        if stage is not None:
            del self.blocks[str(1 - stage)]
        if stage == 0:
            del self.head

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        for block in self.blocks.values():
            x_BD = block(x_BD)
        return self.head(x_BD) if "head" in self._modules else x_BD


def built(layout: Layout, dtype: torch.dtype = torch.float32, **fsdp: Any) -> Net:
    """A model with the same first values on all ranks, spread as the layout says."""
    torch.manual_seed(3)
    if layout == "whole":
        return Net().to(dtype)
    mesh = init_device_mesh("cpu", MESHES[layout], mesh_dim_names=("a", "b")[: len(MESHES[layout])])
    net = Net(mesh.get_local_rank("a") if layout.startswith("pp") else None).to(dtype)
    if layout in ("tp", "2d"):
        for block in net.blocks.values():
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["b"] if layout == "2d" else mesh, plan)
    if layout not in ("tp", "pp"):
        over = {"2d": mesh["a"], "pp_fsdp": mesh["b"]}[layout] if layout in ("2d", "pp_fsdp") else mesh
        for block in net.blocks.values():
            fully_shard(block, mesh=over, **fsdp)
        fully_shard(net, mesh=over, **fsdp)
    return net
