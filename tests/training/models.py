"""Small models that are spread over ranks in different ways, or stages of one, and the state of a run with one."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torch.utils.data import TensorDataset

from hfshard.training import Gradients, ResumableDataLoader, TrainingState
from tests.training.optimizers import OPTIMIZERS

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

BATCH = 4


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


class Run:
    """The state of a run, and its steps.

    Args:
        layout: How the model is spread.
        optimizer: Which of `OPTIMIZERS`.
        dtype: Of the parameters, and so of most optimizers' state.
        more: Of "accumulation" (two passes for each step), "scaler", "average" and "frozen" (half of the weights).
        fsdp: For `fully_shard`.
    """

    def __init__(
        self,
        layout: Layout,
        optimizer: str = "adamw",
        dtype: torch.dtype = torch.float32,
        more: Collection[str] = (),
        **fsdp: Any,
    ) -> None:
        self.net = built(layout, dtype, **fsdp)
        self.dtype = dtype
        if "frozen" in more:
            for block in self.net.blocks.values():
                block.get_parameter("up.weight").requires_grad_(False)
        trained = [one for one in self.net.parameters() if one.requires_grad]
        self.optimizer = OPTIMIZERS[optimizer](trained)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)
        rows = torch.arange(24.0).reshape(12, 2) / 24
        self.loader = ResumableDataLoader(TensorDataset(rows), batch_size=BATCH, shuffle=True, seed=7)
        self.passes = 2 if "accumulation" in more else 1
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1) if "scaler" in more else None
        self.average: AveragedModel | None = None
        parts: dict[str, Any] = {}
        if "average" in more:
            self.average = AveragedModel(nn.Identity(), avg_fn=get_ema_avg_fn(0.5))
            self.average.module = built(layout, dtype, **fsdp)  # what is sharded can't be copied
            parts["average"] = self.average
        if "accumulation" in more:
            parts["gradients"] = Gradients(self.net)
        self.state = TrainingState(
            model=self.net,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            loader=self.loader,
            scaler=self.scaler,
            **parts,
        )
        self._batches: Any = None
        self._schedule = _schedule(self.net, layout, self._scaled) if layout.startswith("pp") else None

    def train(self, steps: int) -> None:
        """Steps on batches and noise: the same on all ranks, where torch's generator is seeded so."""
        for _ in range(steps):
            for _ in range(self.passes):
                self.backward()
            self.update()

    def begin(self) -> None:
        """Take the batches from where the loader stands: after a restore."""
        self._batches = None

    def inputs(self) -> torch.Tensor:
        """The next batch."""
        self._batches = self._batches or iter(self.loader)
        batch = next(self._batches, None)
        if batch is None:
            self._batches = iter(self.loader)
            batch = next(self._batches)
        x_BD: torch.Tensor = torch.randn(BATCH, 6) + batch[0].repeat(1, 3)
        return x_BD.to(self.dtype)

    def loss(self) -> torch.Tensor:
        """A forward pass; not of a pipeline."""
        return self._scaled(self.net(self.inputs()))

    def backward(self) -> None:
        """A forward and a backward pass."""
        if self._schedule is None:
            self.loss().backward()
        else:
            self._scaled(torch.zeros(1))  # a scaler that has scaled nothing, as that of the first stage, makes no step
            self._schedule(self.inputs())

    def update(self) -> None:
        """A step."""
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update_parameters(self.net)

    def whole(self) -> dict[str, torch.Tensor]:
        """All tensors of the model, its gradients, the optimizer and the average, by name. Every rank must call."""
        own = {name: whole(tensor).clone() for name, tensor in self._tensors().items()}
        if self._schedule is None:
            return own
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, own)
        return {name: tensor for part in reversed(parts) for name, tensor in part.items()}

    def local(self) -> dict[str, torch.Tensor]:
        """What this rank has of them."""
        return {name: getattr(tensor, "_local_tensor", tensor).clone() for name, tensor in self._tensors().items()}

    def numbers(self) -> dict[str, torch.Tensor]:
        """Everything else, as tensors: of the loader, the groups, the scaler, and the random numbers."""
        position = self.loader.state_dict()
        scale = self.scaler.state_dict() if self.scaler is not None else {}
        return {
            "position": torch.tensor([position["epoch"], position["batch"]]),
            "lr": torch.tensor([group["lr"] for group in self.optimizer.param_groups], dtype=torch.float64),
            "rng": torch.get_rng_state(),
            **{f"scaler {key}": torch.tensor(value) for key, value in scale.items()},
        }

    def _scaled(self, scores_BC: torch.Tensor) -> torch.Tensor:
        loss = scores_BC.square().mean()
        return loss if self.scaler is None else self.scaler.scale(loss)

    def _tensors(self) -> dict[str, Any]:
        found = dict(self.net.state_dict())
        names = {id(parameter): name for name, parameter in self.net.named_parameters()}
        found |= {f"{name} grad": one.grad for name, one in self.net.named_parameters() if one.grad is not None}
        for parameter, slots in self.optimizer.state.items():
            found |= {f"{names[id(parameter)]}/{slot}": value for slot, value in slots.items()}
        if self.average is not None:
            found |= {f"average {name}": one for name, one in self.average.state_dict().items()}
        return found


def whole(tensor: Any) -> torch.Tensor:
    """All of a tensor."""
    full: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach()


def _schedule(net: nn.Module, layout: Layout, loss_of: Any) -> Any:
    """One forward and backward pass of a pipeline by torch.distributed.pipelining."""
    shape = (dist.get_world_size(),) if layout == "pp" else (2, dist.get_world_size() // 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
    number = mesh.get_local_rank("a")
    stage = PipelineStage(net, number, 2, torch.device("cpu"), group=mesh.get_group("a"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda scores, _: loss_of(scores))

    def run(x_BD: torch.Tensor) -> None:
        if number == 0:
            schedule.step(x_BD)
        else:
            schedule.step(target=x_BD)

    return run
