"""Optimizers of spread models, one for each kind of state that they keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate


class RowsAndColumns(torch.optim.Optimizer):
    """An optimizer whose state has a number for each row and each column, as Adafactor has for what it factors.

    torch's own Adafactor can't step DTensors.
    """

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
                if square.dim() < 2:
                    found = {"rows": square, "columns": square}
                else:
                    found = {"rows": square.mean(1, keepdim=True), "columns": square.mean(0, keepdim=True)}
                for slot, mean in found.items():
                    if isinstance(mean, DTensor):  # what is spread over the other dimension gives a partial sum
                        mean = mean.redistribute(placements=[Replicate()] * mean.device_mesh.ndim)
                    state[slot] = state[slot] + mean if slot in state else mean
                parameter.sub_(group["lr"] * parameter.grad / (state["rows"] + state["columns"] + 1))


Parameters = list[nn.Parameter]

OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=False),
    "adamw foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True, amsgrad=True),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False),
    "sgd foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "rows and columns": RowsAndColumns,
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
}
