"""Compares another program's checkpoint with a training state, by the checks that one of ours has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hfshard.errors import DamagedCheckpointError, HfshardError, StateDictMismatchError
from hfshard.tensors.parameter_names import match_prefixes
from hfshard.tensors.state_dict import collect_state_dict
from hfshard.training.data.external_loader import LoaderTracker
from hfshard.training.foreign.checkpoint import ForeignCheckpoint
from hfshard.training.foreign.optimizers import named_optimizer_state
from hfshard.training.parts.gradients import Gradients
from hfshard.training.parts.nested_types import NotStored
from hfshard.training.parts.positions.ordered_state import find_in
from hfshard.training.parts.rng import check_rng_state, set_rng_state
from hfshard.training.restoring.components import check_components, never_held
from hfshard.training.restoring.part_planner import PART_ORDER, PartPlanner, Restoration
from hfshard.training.state import TrainingState


def plan_foreign(state: TrainingState, foreign: ForeignCheckpoint, *, strict: bool) -> Restoration:
    """Compare another program's checkpoint with a training state, which is not changed.

    What such a file never holds is no difference: random number generators, a loader's position, gradients.

    Args:
        state: Built as for the run that was saved.
        foreign: What a reader has made of its checkpoint.
        strict: Refuse any difference; else what differs stays as it was built, and is reported.

    Raises:
        StateDictMismatchError: strict, and something differs.
        DamagedCheckpointError: The state of a part is not what such a part saves.
    """
    absent = never_held(state) - foreign.components.keys()
    restoration = Restoration(
        directory=foreign.path,
        extra=foreign.extra,
        differences=list(foreign.differences),
        lacking=foreign.lacking + tuple(f"the state of '{name}'" for name in state.components if name in absent),
    )
    kinds: dict[str, Any] = dict(state.kinds)
    saved = {name: {"kind": kinds.get(name), "state": value} for name, value in foreign.components.items()}
    check_components(state, saved, foreign.path, restoration.differences, (), strict=strict, may_lack=never_held(state))
    planner = PartPlanner(state, saved, foreign.path, restoration, strict=strict)
    common = [name for name in state.components if name in saved]
    for name in sorted(common, key=lambda name: PART_ORDER[state.kinds[name]]):
        _plan(planner, name, foreign)
    restoration.trackers = [one for name in common if isinstance(one := state.components[name], LoaderTracker)]
    if not any(isinstance(part, Gradients) for part in state.components.values()):
        modules = [state.components[name] for name in common if state.kinds[name] == "module"]
        restoration.without_gradients = [parameter for module in modules for parameter in module.parameters()]
    if foreign.rng is not None:
        rng = foreign.rng
        check_rng_state(rng, foreign.path)
        restoration.set_rng = lambda: set_rng_state(rng)
    return restoration


def _plan(planner: PartPlanner, name: str, foreign: ForeignCheckpoint) -> None:
    """Bring the state of one part into the form that ours has, and plan it."""
    part = planner.state.components[name]
    kind = planner.state.kinds[name]
    value = foreign.components[name]
    try:
        if kind != "scheduler" and (place := find_in(value, lambda one: isinstance(one, NotStored))) is not None:
            raise StateDictMismatchError(
                f"'{name}' stays as it was built: '{place}' in its state in '{foreign.path}' was not read.",
                path=foreign.path,
            )
        if kind == "optimizer":
            kept_of = _kept_names(planner.state)
            in_file = list(dict.fromkeys(_names_in_file(planner.state, foreign, kept_of))) if foreign.has_order else []
            value = named_optimizer_state(part, value, planner.parameter_names, kept_of, in_file, name, foreign.path)
        elif kind == "scheduler":
            value = {"class": None, "state": dict(value)}
        planner.saved[name]["state"] = value
        planner.plan(name, value)
    except HfshardError as error:
        if planner.strict or not isinstance(error, StateDictMismatchError):
            raise
        planner.restoration.differences.append(error.message)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise DamagedCheckpointError(
            f"'{foreign.path}' is damaged: its '{name}' is not what a {type(part).__name__} saves ({error!r:.200}). "
            "Use another checkpoint, or leave this part out of the TrainingState.",
            path=foreign.path,
        ) from error


def _kept_names(state: TrainingState) -> dict[str, str]:
    """Each name of a tied parameter -> the one by which optimizers know it."""
    known = set(state.parameter_names().values())
    return {name: kept for names in state.tied_parameters() for kept in known.intersection(names) for name in names}


def _names_in_file(state: TrainingState, foreign: ForeignCheckpoint, kept_of: Mapping[str, str]) -> Iterator[str]:
    """The names of parameters, as optimizers know them, in the order in which the file has the weights."""
    known = set(state.parameter_names().values())
    for component, module in state.of_kind("module").items():
        tensors = foreign.components.get(component)
        if not isinstance(tensors, Mapping):
            continue
        names = [name for name, value in tensors.items() if isinstance(value, torch.Tensor)]
        matched = match_prefixes(names, collect_state_dict(module).keys())
        prefix = "" if component == "model" else f"{component}:"
        for name in names:
            own = kept_of.get(f"{prefix}{matched[name]}", f"{prefix}{matched[name]}")
            if own in known:
                yield own
