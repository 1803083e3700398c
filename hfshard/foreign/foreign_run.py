"""A run that another framework has saved in parts: tensors by name as tables, and everything else as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from hfshard.disk.safe_open import Identity
from hfshard.foreign.byte_runs import ForeignTable

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class ForeignGroup(NamedTuple):
    """A group of an optimizer's parameters."""

    parameters: tuple[str, ...]
    """Names in the model, as the table of weights has them."""
    options: Mapping[str, Any]
    """Plain values: everything of the group but its parameters."""


@dataclass(frozen=True, slots=True)
class ForeignOptimizer:
    """An optimizer's state by the names of parameters."""

    table: ForeignTable
    """Tensors of the state, named "PARAMETER/SLOT", such as "up.weight/exp_avg"."""
    groups: tuple[ForeignGroup, ...]
    slots: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: _NOTHING)
    """Parameter -> slot -> plain value, of what is not in the table: a count of steps."""
    has_groups: bool = True
    """False: only parameters have options. A group has those with equal ones, and may have been several groups."""


@dataclass(frozen=True, slots=True)
class ForeignRun:
    """A run by name. No byte of the tables was read."""

    weights: ForeignTable
    optimizer: ForeignOptimizer | None
    """None: there is none, and the directory has the weights of a model alone."""
    files: Mapping[str, Identity]
    """Path of each file that was read, or has tensors -> its identity."""
    step: int | None = None
    """None if the directory has none."""
    parts: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    """Other parts of a run, by their names in a `TrainingState`: "scheduler" -> its state dict, as plain values."""
    extra: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    """Everything else that the user has saved."""
