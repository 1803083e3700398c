"""Small models that are spread over ranks in different ways, and the state of a run with one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hfshard.training import TrainingState

Layout = str
"""fsdp, tp, 2d, hsdp; or whole: one process, and no DTensors."""

MESHES: dict[Layout, tuple[int, ...]] = {"alone": (1,), "fsdp": (2,), "tp": (2,), "2d": (2, 2), "hsdp": (2, 2)}


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
    """Two blocks and a head of three rows, whose bias is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 3)
        self.head.bias.requires_grad_(False)

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x_BD = block(x_BD)
        scores_BC: torch.Tensor = self.head(x_BD)
        return scores_BC


def built(layout: Layout, dtype: torch.dtype = torch.float32, **fsdp: Any) -> Net:
    """A model with the same first values on all ranks, spread as the layout says."""
    torch.manual_seed(3)
    net = Net().to(dtype)
    if layout == "whole":
        return net
    mesh = init_device_mesh("cpu", MESHES[layout], mesh_dim_names=("a", "b")[: len(MESHES[layout])])
    if layout in ("tp", "2d"):
        for block in net.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["b"] if layout == "2d" else mesh, plan)
    if layout != "tp":
        over = mesh["a"] if layout == "2d" else mesh
        for block in net.blocks:
            fully_shard(block, mesh=over, **fsdp)
        fully_shard(net, mesh=over, **fsdp)
    return net


class RowStatistics(torch.optim.Optimizer):
    """An optimizer whose state has one number for each row, as Adafactor has for those that it factors."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                square = parameter.grad.square()
                rows = square.mean(-1, keepdim=True) if square.dim() > 1 else square
                if isinstance(rows, DTensor):  # one that is spread over columns gives a partial sum
                    rows = rows.redistribute(placements=[Replicate()] * rows.device_mesh.ndim)
                state["rows"] = state["rows"] + rows if "rows" in state else rows
                parameter.sub_(group["lr"] * parameter.grad / (state["rows"] + 1))


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=False),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True, amsgrad=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "rows": RowStatistics,
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


class Run:
    """A model, its optimizer and scheduler, and the numbers of a few steps."""

    def __init__(
        self, layout: Layout, optimizer: str = "adamw", dtype: torch.dtype = torch.float32, **fsdp: Any
    ) -> None:
        self.net = built(layout, dtype, **fsdp)
        self.dtype = dtype
        trained = [one for one in self.net.parameters() if one.requires_grad]
        self.optimizer = OPTIMIZERS[optimizer](trained)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)
        self.state = TrainingState(model=self.net, optimizer=self.optimizer, scheduler=self.scheduler)

    def train(self, steps: int) -> None:
        """Steps on batches that torch's generator gives: the same on all ranks, where it is seeded so."""
        for _ in range(steps):
            self.step(self.loss())

    def loss(self) -> torch.Tensor:
        """A forward pass."""
        scores_BC: torch.Tensor = self.net(torch.randn(4, 6).to(self.dtype))
        return scores_BC.square().mean()

    def step(self, loss: torch.Tensor) -> None:
        """A backward pass, and a step."""
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def whole(self) -> dict[str, torch.Tensor]:
        """All tensors of the model and the optimizer, each whole, by name. Every rank must call."""
        found = dict(self.net.state_dict())
        names = {id(parameter): name for name, parameter in self.net.named_parameters()}
        for parameter, slots in self.optimizer.state.items():
            found |= {f"{names[id(parameter)]}/{slot}": value for slot, value in slots.items()}
        return {name: whole(tensor).clone() for name, tensor in found.items()}

    def local(self) -> dict[str, torch.Tensor]:
        """What this rank has of them."""
        found = dict(self.net.state_dict())
        for number, slots in enumerate(self.optimizer.state.values()):
            found |= {f"{number}/{slot}": value for slot, value in slots.items()}
        return {name: getattr(tensor, "_local_tensor", tensor).clone() for name, tensor in found.items()}


def whole(tensor: Any) -> torch.Tensor:
    """All of a tensor."""
    full: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach()
