"""`TrainingState`: the parts of a training run by name."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Collection
from itertools import chain
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hfshard.errors import InvalidArgumentError
from hfshard.tensors.fsdp1 import has_flat_parameters, reshard_parameters
from hfshard.tensors.state_dict import (
    collect_state_dict,
    fully_sharded_modules,
    has_parts,
    is_dtensor,
    may_be_divided,
    parameter_names,
    parts_of_parameters,
    tied_parameter_names,
)
from hfshard.tensors.zero3 import RUN_REMEDY, is_partitioned
from hfshard.training.data.external_loader import track
from hfshard.training.state.optimizer import trained_parameters
from hfshard.training.state.reordering import order_digest
from hfshard.training.state.rng import Gradients
from hfshard.training.state.scheduler import is_scheduler
from hfshard.training.state.zero_runs import Masters, NamedOptimizer, is_of_deepspeed, named_masters, named_optimizers

PartKind = Literal["module", "optimizer", "scheduler", "loader", "stateful"]
"""The kind of a part. Each rank saves its own parts of the kind "loader" (data positions, accumulating gradients);
parts of the other kinds are the same on every rank, or have DTensors, which are spread over the ranks."""

_RESERVED: Final = re.compile(r"rng|extra|rank\d+")
"""Names that a checkpoint uses for data other than components."""


class TrainingState:
    """The parts of a run that are saved and restored together; the objects themselves, not copies.

        state = TrainingState(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, ema=ema)

    Python's, numpy's and torch's random number generators belong to it without being named.
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
            model: Any module, also in a wrapper (DataParallel, DistributedDataParallel, torch.compile).
            optimizer: One of torch's, one derived from these, or one prepared by Accelerate.
            scheduler: One of torch's, one derived from these, one prepared by Accelerate, or one with a state_dict.
            loader: A `ResumableDataLoader`, or another loader with state_dict and load_state_dict.
            scaler: A GradScaler.
            stateful: More parts under your own names: modules (an EMA), optimizers, schedulers, and other objects with
                state_dict and load_state_dict; and a `torch.Generator`.

        Raises:
            InvalidArgumentError: A part has no state_dict. (An optimizer with parameters of a module that is not part
                of the state is rejected when it is saved or restored.)
        """
        named = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader, "scaler": scaler}
        named |= stateful
        given = {name: unwrapped(part) for name, part in named.items() if part is not None}
        parts = {name: _taken(part) for name, part in given.items()}
        self.kinds: dict[str, PartKind] = {name: _part_kind(name, part) for name, part in parts.items()}
        self.components: dict[str, Any] = {
            name: track(part) if self.kinds[name] == "loader" else part for name, part in parts.items()
        }
        """The parts by name; a loader of another library is tracked from now on, by `external_loader`."""
        self.left_out: dict[str, Any] = {}
        """Parts that stay as they are: their modules still name the parameters of an optimizer."""
        self.aliases: dict[str, str] = {}
        """Names of parameters -> the names of their ties that another stage of a pipeline uses."""
        self.named_optimizers: dict[str, NamedOptimizer] = {}
        """Optimizers that DeepSpeed steps with; `components` has what they are by the model's parameters."""
        self._engines = {name: part for name, part in given.items() if part is not parts[name]}

    def without(self, names: Collection[str]) -> TrainingState:
        """Return the same parts without some of them; this state itself if there are none to leave out.

        Raises:
            InvalidArgumentError: It has no such part.

        Example:
            manager.restore(state, 1200, without=["loader"])  # which calls it
        """
        if isinstance(names, str):
            raise InvalidArgumentError(f"without must be a list of names, such as [{names!r}].")
        unknown = sorted({*names} - self.components.keys())
        if unknown:
            raise InvalidArgumentError(
                f"The state has no part '{unknown[0]}' to leave out. It has: {', '.join(self.components)}."
            )
        if not names:
            return self
        left = copy.copy(self)
        left.kinds = {name: kind for name, kind in self.kinds.items() if name not in names}
        left.components = {name: part for name, part in self.components.items() if name not in names}
        left.left_out = self.left_out | {name: self.components[name] for name in names}
        return left

    def with_named_optimizers(self) -> TrainingState:
        """Return the same parts, with optimizers that DeepSpeed steps with by the names of their parameters.

        Raises:
            InvalidArgumentError: DeepSpeed has partitioned an optimizer in another way.
        """
        if "deepspeed" not in sys.modules:
            return self
        optimizers = self.of_kind("optimizer")
        engines = {name: part for name, part in self._engines.items() if name in optimizers}
        named = named_optimizers(optimizers, engines, [*self.naming_modules().values()])
        if not named:
            return self
        found = copy.copy(self)
        found.components = self.components | {name: one.optimizer for name, one in named.items()}
        found.named_optimizers = named
        return found

    @property
    def masters(self) -> Masters:
        """What ZeRO 1 and 2 step on for the parameters."""
        return {key: one for named in self.named_optimizers.values() for key, one in named.masters.items()}

    @property
    def is_flattened(self) -> bool:
        """True if FSDP1 has put parameters of a module into flat ones."""
        return any(map(has_flat_parameters, filter(may_be_divided, self.naming_modules().values())))

    def of_kind(self, kind: PartKind) -> dict[str, Any]:
        """Return the parts of one kind, by name.

        Example:
            modules = state.of_kind("module")
        """
        return {name: part for name, part in self.components.items() if self.kinds[name] == kind}

    def order_digest(self, name: str) -> str | None:
        """Return a digest of the orders of parameters and groups that a part may have matched its state to by position.

        None for a part that has no such state.

        Example:
            assert state.order_digest("model") is None and state.order_digest("scheduler") is not None
        """
        if self.kinds[name] not in ("scheduler", "stateful"):
            return None
        modules = self.naming_modules() if self.kinds[name] == "stateful" else None
        return order_digest(self.components[name], self.parameter_names(), modules)

    def parameter_names(self) -> dict[int, str]:
        """Return the id of every parameter -> its name, which is "component:name" outside of the model."""
        names: dict[int, str] = {}
        modules = self.naming_modules()
        for component in sorted(modules, key=lambda name: (name != "model", name)):  # not as passed
            prefix = name_prefix(component)
            for key, name in parameter_names(modules[component]).items():
                names.setdefault(key, self.aliases.get(prefix + name, prefix + name))
        return names

    def naming_modules(self) -> dict[str, nn.Module]:
        """Return the modules that name the parameters of optimizers, those that are left out as well.

        Example:
            modules = state.naming_modules()
        """
        left_out = {name: part for name, part in self.left_out.items() if isinstance(part, nn.Module)}
        return self.of_kind("module") | left_out

    def tied_parameters(self) -> list[list[str]]:
        """Return the names of each parameter that has several in one module."""
        found = []
        for component, module in self.of_kind("module").items():
            found += [[name_prefix(component) + name for name in names] for names in tied_parameter_names(module)]
        return found


def name_prefix(component: str) -> str:
    """Return what a module's name adds to those of its parameters; nothing for the model."""
    return "" if component == "model" else f"{component}:"


def collect_run_tensors(module: nn.Module, masters: Masters) -> dict[str, Any]:
    """Collect the tensors of a module that a run saves: of what DeepSpeed trains, what its optimizer steps on.

    Args:
        module: With or without wrappers; not changed.
        masters: Those of the training state.

    Returns:
        What `collect_state_dict` returns, with a `FlatTensor` for each parameter that has parts on the ranks. Tied
        names share one.
    """
    found = collect_state_dict(module, "run")
    own = named_masters(module, masters) if masters else {}
    return found | {name: one for name, one in own.items() if name in found}


def checked_state(state: object) -> TrainingState:
    """Reject anything that is not a `TrainingState`, and return it with named optimizers.

    Raises:
        InvalidArgumentError: It is not one; the message says what to write instead. Or DeepSpeed has partitioned an
            optimizer in another way.
    """
    if not isinstance(state, TrainingState):
        names = [name for name in state if isinstance(name, str)] if isinstance(state, dict) else []
        parts = ", ".join(f"{name}=..." for name in names if name.isidentifier()) or "model=model, optimizer=optimizer"
        raise InvalidArgumentError(
            f"state must be a TrainingState, got a {type(state).__name__}. Write: TrainingState({parts})."
        )
    return state.with_named_optimizers()


def reject_meta(state: TrainingState) -> None:
    """Reject an optimizer of parameters on the meta device: a load creates new ones, which it would never see.

    Raises:
        InvalidArgumentError: There is such a parameter; the message names the first one.
    """
    for name, optimizer in state.of_kind("optimizer").items():
        found = next((one for one in trained_parameters(optimizer) if one.is_meta), None)
        if found is not None:
            parameter = state.parameter_names().get(id(found), "a parameter")
            raise InvalidArgumentError(
                f"'{name}' trains '{parameter}', which is on the meta device. A restore would replace that parameter, "
                "and the optimizer would keep the old one. Nothing was restored. Create the optimizer with real "
                "parameters: call model.to_empty(device=...) first."
            )


class GeneratorPart:
    """A `torch.Generator` as a part of a state."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return its state."""
        return {"state": self.generator.get_state()}

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Set its state."""
        self.generator.set_state(state_dict["state"])


def _taken(part: Any) -> Any:
    if isinstance(part, torch.Generator):
        return GeneratorPart(part)
    return getattr(part, "optimizer", part) if is_of_deepspeed(part) and not isinstance(part, Optimizer) else part


def unwrapped(part: Any) -> Any:
    """Return what Accelerate has wrapped, or the object itself, without importing Accelerate."""
    for module, name, attribute in (
        ("accelerate.optimizer", "AcceleratedOptimizer", "optimizer"),
        ("accelerate.scheduler", "AcceleratedScheduler", "scheduler"),
    ):
        loaded = sys.modules.get(module)
        if loaded is not None and isinstance(part, getattr(loaded, name)):
            return getattr(part, attribute)
    return part


def _part_kind(name: str, part: Any) -> PartKind:
    if _RESERVED.fullmatch(name):
        raise InvalidArgumentError(f"'{name}' is a reserved name. Give the part another name.")
    if isinstance(part, nn.Module):
        return "module"
    if name == "model":
        raise InvalidArgumentError(f"model must be an nn.Module, got a {type(part).__name__}.")
    if isinstance(part, Optimizer):
        return "optimizer"
    if is_scheduler(part):
        return "scheduler"
    if callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None)):
        if isinstance(part, Gradients) and part.is_spread:
            return "stateful"
        if name == "loader" or isinstance(part, DataLoader | Gradients):
            return "loader"
        return "scheduler" if name == "scheduler" else "stateful"
    is_loader = name == "loader" or isinstance(part, DataLoader)
    hint = " Use hfshard.training.ResumableDataLoader, which takes the same arguments." if is_loader else ""
    raise InvalidArgumentError(
        f"'{name}' is a {type(part).__name__}, which has no state_dict and load_state_dict to save and restore it with."
        + hint
    )


# States that are spread over ranks (FSDP2, tensor parallel), so that every rank must take part.


def is_spread_state(state: TrainingState) -> bool:
    """Return whether a parameter or buffer is a DTensor, after releasing parameters that a forward pass has gathered.

    Args:
        state: Its modules under `fully_shard` are resharded; the next pass gathers them again.

    Raises:
        InvalidArgumentError: A part is the gradients of a module under FSDP1; or DeepSpeed has partitioned a part in
            an unknown way.
    """
    _reject_deepspeed(state)
    modules = list(state.naming_modules().values())
    for module in modules:
        if may_be_divided(module):
            reshard_parameters(module)
        for one in fully_sharded_modules(module):
            with torch.no_grad():
                one.reshard()
    if state.is_flattened:
        _reject_flat_gradients(state)
    trained = map(trained_parameters, state.of_kind("optimizer").values())
    tensors = chain(*(chain(module.parameters(), module.buffers()) for module in modules), *trained)
    is_in_parts = bool(state.named_optimizers) or any(map(has_parts, modules))
    return is_in_parts or any(is_dtensor(tensor) for tensor in tensors)


def _reject_deepspeed(state: TrainingState) -> None:
    """Reject parameters of which this rank's part is unknown, and optimizers whose parts on each rank have no names.

    An optimizer that was passed to `deepspeed.initialize` has no parameters between two steps, and knows its state by
    the flat tensors in which DeepSpeed keeps them.
    """
    for name, part in state.components.items():
        if state.kinds[name] == "module":
            parts_of_parameters(part, "run")
        trained = chain(part.state, trained_parameters(part)) if isinstance(part, Optimizer) else ()
        if name in state.named_optimizers or "deepspeed" not in sys.modules:
            continue
        if is_of_deepspeed(part) or any(map(is_partitioned, trained)):
            raise InvalidArgumentError(
                f"Cannot save or restore a run with '{name}' ({type(part).__qualname__}): DeepSpeed ZeRO has "
                f"partitioned its state across the ranks. Nothing was changed. {RUN_REMEDY}"
            )


def _reject_flat_gradients(state: TrainingState) -> None:
    name = next((name for name, part in state.components.items() if isinstance(part, Gradients)), None)
    if name is not None:
        raise InvalidArgumentError(
            f"Cannot save or restore '{name}': under FullyShardedDataParallel (FSDP1) gradients have no names and "
            "shapes of their own. Save after optimizer.step(), without Gradients; or use fully_shard."
        )
