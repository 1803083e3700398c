"""`TrainingState`: everything that a training run is made of, by name."""

from __future__ import annotations

import re
import sys
from typing import Any, Final, Literal

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hfshard.errors import InvalidArgumentError
from hfshard.state_dicts.state_dict import parameter_names
from hfshard.training.data.external_loader import track
from hfshard.training.parts.gradients import Gradients
from hfshard.training.parts.scheduler import is_scheduler

PartKind = Literal["module", "optimizer", "scheduler", "loader", "stateful"]
"""Of a part. In a run of several ranks each saves its own of the kind "loader" (data positions, gradients that are
accumulating); all else is the same on every rank."""

_RESERVED: Final = re.compile(r"rng|extra|rank\d+")
"""Names under which a checkpoint keeps what is no component."""


class TrainingState:
    """What is saved and restored together; the objects themselves, not copies.

        state = TrainingState(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, ema=ema)

    The state of python's, numpy's and torch's random number generators belongs to it without being named.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        scheduler: Any = None,
        loader: Any = None,
        scaler: Any = None,
        **stateful: Any,
    ) -> None:
        """Name the parts of a run.

        Args:
            model: Any module; wrappers (DataParallel, DistributedDataParallel, torch.compile) are looked through.
            optimizer: Any of torch's, or derived from one, or prepared by Accelerate.
            scheduler: Any of torch's, or derived from one, or prepared by Accelerate, or with a state_dict.
            loader: A `ResumableDataLoader`, or what has state_dict and load_state_dict.
            scaler: A GradScaler.
            stateful: More, under names of your own: modules (an EMA), optimizers, schedulers, and whatever has
                state_dict and load_state_dict.

        Raises:
            InvalidArgumentError: A part has no state_dict. (An optimizer that trains parameters of no module here is
                refused when it is saved or restored.)
        """
        given = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader, "scaler": scaler}
        given |= stateful
        parts = {name: unwrapped(part) for name, part in given.items() if part is not None}
        self.kinds: dict[str, PartKind] = {name: _kind_of(name, part) for name, part in parts.items()}
        self.components: dict[str, Any] = {
            name: track(part) if self.kinds[name] == "loader" else part for name, part in parts.items()
        }
        """By name; a loader that is not ours is followed from now on (see `foreign_loader.py`)."""

    def of_kind(self, kind: PartKind) -> dict[str, Any]:
        """The parts of one kind, by name."""
        return {name: part for name, part in self.components.items() if self.kinds[name] == kind}

    def parameter_names(self) -> dict[int, str]:
        """The id of every parameter of every module -> its name; those of others than the model: "component:name"."""
        names: dict[int, str] = {}
        modules = self.of_kind("module")
        for component in sorted(modules, key=lambda name: name != "model"):
            prefix = "" if component == "model" else f"{component}:"
            for key, name in parameter_names(modules[component]).items():
                names.setdefault(key, prefix + name)
        return names


def unwrapped(part: Any) -> Any:
    """What Accelerate has wrapped, or the object itself; Accelerate is not imported to find out."""
    for module, name, attribute in (
        ("accelerate.optimizer", "AcceleratedOptimizer", "optimizer"),
        ("accelerate.scheduler", "AcceleratedScheduler", "scheduler"),
    ):
        loaded = sys.modules.get(module)
        if loaded is not None and isinstance(part, getattr(loaded, name)):
            return getattr(part, attribute)
    return part


def _kind_of(name: str, part: Any) -> PartKind:
    if _RESERVED.fullmatch(name):
        raise InvalidArgumentError(f"'{name}' is what hfshard calls a part of its own: give yours another name.")
    if isinstance(part, nn.Module):
        return "module"
    if name == "model":
        raise InvalidArgumentError(f"model must be an nn.Module, and is a {type(part).__name__}.")
    if isinstance(part, Optimizer):
        return "optimizer"
    if is_scheduler(part):
        return "scheduler"
    if callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None)):
        if name == "loader" or isinstance(part, DataLoader | Gradients):
            return "loader"
        return "scheduler" if name == "scheduler" else "stateful"
    hint = " hfshard.training.ResumableDataLoader takes the same arguments, and has." if name == "loader" else ""
    raise InvalidArgumentError(
        f"'{name}' is a {type(part).__name__}, which has no state_dict and load_state_dict to save and restore it by."
        + hint
    )
