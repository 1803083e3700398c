"""The runs that are killed and resumed: layouts of the model, optimizers, and what else is in the state."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.training.spread.models import Layout, Run

MORE = ("accumulation", "scaler", "average", "frozen")


@dataclass(frozen=True, slots=True)
class Case:
    """One run, on any layout."""

    optimizer: str
    dtype: torch.dtype = torch.float32
    more: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """For directories, files and messages."""
        return "-".join([self.optimizer, str(self.dtype).removeprefix("torch."), *self.more]).replace(" ", "_")

    def run(self, layout: Layout) -> Run:
        """Build it."""
        return Run(layout, self.optimizer, self.dtype, self.more)


EVERYTHING = Case("sgd", more=MORE)
BFLOAT16 = Case("adamw foreach", torch.bfloat16)

CASES = [
    Case("adamw"),
    Case("adamw foreach"),
    Case("adamw fused"),
    Case("sgd"),
    Case("sgd foreach"),
    Case("sgd fused"),
    Case("rows and columns"),
    Case("adafactor"),
    BFLOAT16,
    Case("rows and columns", torch.bfloat16),
    *(Case("adamw", more=(one,)) for one in MORE),
    EVERYTHING,
]


def can_step(layout: Layout, case: Case) -> bool:
    """Whether torch can do the steps of a case on a layout."""
    if layout in ("pp", "whole"):
        return True
    if layout == "tp":  # some parameters are DTensors, and some are not, which torch can't do at once
        return "foreach" not in case.optimizer and "fused" not in case.optimizer and "scaler" not in case.more
    return case.optimizer not in ("sgd fused", "adafactor")


def cases_of(layout: Layout) -> list[Case]:
    """All that can be trained on a layout."""
    return [case for case in CASES if can_step(layout, case) and (layout != "tp" or case.optimizer != "adafactor")]


TABLE = {layout: cases_of(layout) for layout in ("fsdp", "2d", "hsdp", "pp", "pp_fsdp", "tp")}
OTHERS = {"fsdp": "tp", "2d": "fsdp", "hsdp": "2d", "pp": "fsdp", "pp_fsdp": "pp", "tp": "pp_fsdp"}
"""Where runs of a layout are restored, too: on as many ranks, fewer, or more."""
CHOSEN = {"fsdp": [Case("rows and columns"), BFLOAT16, EVERYTHING], "pp": [Case("adafactor"), BFLOAT16, EVERYTHING]}
"""What is run without --slow."""
