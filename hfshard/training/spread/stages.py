"""Stages of a pipeline, each with some of a model's tensors: which names this rank has, and which another one has."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from hfshard.errors import DamagedCheckpointError
from hfshard.tensors.state_dict import collect_state_dict
from hfshard.training.parts.gradients import Gradients
from hfshard.training.parts.nested_decoding import encoded_entries
from hfshard.training.ranks import Ranks
from hfshard.training.spread.states import stage_digest
from hfshard.training.state import TrainingState

_PARAMETERS: Final = ""
"""Stands for the names by which optimizers know parameters, beside those of the components."""

NAMES_OPTION: Final = "param_names"
"""The option of a group with an entry for each parameter, which torch sets where it is given `named_parameters()`."""

Names = Mapping[str, frozenset[str]]
"""Component -> the names in its state dict."""


@dataclass(frozen=True, slots=True)
class StageNames:
    """The names that the modules of this rank have, among those of all ranks."""

    own: Names
    everywhere: Names

    def is_here(self, component: str, name: str) -> bool:
        """Whether a name of a checkpoint concerns this rank: it has it, or none of them has."""
        return name in self.own.get(component, ()) or name not in self.everywhere.get(component, ())

    def of_this_rank(self, saved: Mapping[str, dict[str, Any]], path: str) -> dict[str, dict[str, Any]]:
        """What of the saved components this rank restores: of modules, optimizers and gradients its own stage.

        Args:
            saved: As they were read; not changed.
            path: Of their file, for messages.

        Raises:
            DamagedCheckpointError: They are not what hfshard writes.
        """
        try:
            return {name: {**entry, "state": self._part(name, entry)} for name, entry in saved.items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedCheckpointError(
                f"'{path}' is damaged: the state of a component is not what hfshard writes ({error!r:.200}). "
                "Restore another checkpoint, or download it again.",
                path=path,
            ) from error

    def _part(self, component: str, entry: Mapping[str, Any]) -> Any:
        state = entry["state"]
        if entry.get("kind") == "optimizer":
            return self._optimizer_part(state)
        if component in self.own:
            return {name: value for name, value in encoded_entries(state).items() if self.is_here(component, name)}
        return state

    def _optimizer_part(self, state: Mapping[str, Any]) -> dict[str, Any]:
        groups = []
        for group in state["groups"]:
            here = [number for number, name in enumerate(group["params"]) if self.is_here(_PARAMETERS, name)]
            if here or not group["params"]:
                groups.append(group_part(group, here))
        slots = {name: value for name, value in state["state"].items() if self.is_here(_PARAMETERS, name)}
        return {**state, "groups": groups, "state": slots}


@dataclass(frozen=True, slots=True)
class Stage:
    """The modules of this rank, where other ranks have others."""

    state: TrainingState
    """The same parts, whose parameters have the names that they have in the whole model."""
    names: StageNames


def find_stage(state: TrainingState, ranks: Ranks) -> Stage | None:
    """Ask the other ranks which modules they have. Every rank must call.

    Returns:
        None where the modules of all ranks have the same names, as in everything but a pipeline.

    Raises:
        HfshardError: Another rank can't tell.
    """
    if ranks.world_size == 1:
        return None
    digest, ties, own = ranks.on_each(lambda: (stage_digest(state), state.tied_parameters(), _names_of(state)))
    digests = ranks.all_of(digest)
    if len(set(digests)) == 1:
        return None
    is_speaker = digests.index(digest) == ranks.rank
    names_to_tell = {key: sorted(names) for key, names in own.items()} if is_speaker else {}
    told = ranks.all_of((ties if is_speaker else [], names_to_tell))
    stage = with_aliases(state, chain.from_iterable(ties for ties, _ in told))
    everywhere = {
        key: frozenset(name for _, names in told for name in _renamed(stage, key, names.get(key, ())))
        for key in dict.fromkeys(key for _, names in told for key in names)
    }
    return Stage(stage, StageNames({key: _renamed(stage, key, names) for key, names in own.items()}, everywhere))


def with_aliases(state: TrainingState, ties: Iterable[Sequence[str]]) -> TrainingState:
    """The same parts, whose parameters have the names that they have in the whole model.

    Args:
        state: Of this rank; not changed.
        ties: Of all ranks: the names of each parameter that has several.
    """
    groups: list[set[str]] = []
    for names in ties:
        joined = set(names).union(*(group for group in groups if group & set(names)))
        groups = [*(group for group in groups if not group & joined), joined]
    found = copy.copy(state)
    found.aliases = {name: min(group) for group in groups for name in group}
    return found


def with_whole_gradients(state: TrainingState) -> TrainingState:
    """The same parts, of which `Gradients` are those of the model, in parts on the ranks, and not a rank's own.

    So it is where each stage is on one rank only: ranks that share one may have gradients that are not reduced yet.
    """
    found = copy.copy(state)
    gradients = {name: "stateful" for name, part in state.components.items() if isinstance(part, Gradients)}
    found.kinds = {**state.kinds, **gradients}  # type: ignore[dict-item]
    return found


def group_part(group: Mapping[str, Any], numbers: Sequence[int]) -> dict[str, Any]:
    """Some of the parameters of an encoded group of an optimizer, with all its options."""
    found = {**group, "params": [group["params"][number] for number in numbers]}
    listed = group["options"].get(NAMES_OPTION)
    if listed is not None:
        found["options"] = {**group["options"], NAMES_OPTION: [listed[number] for number in numbers]}
    return found


def _renamed(stage: TrainingState, key: str, names: Iterable[str]) -> frozenset[str]:
    return frozenset(stage.aliases.get(name, name) if key == _PARAMETERS else name for name in names)


def _names_of(state: TrainingState) -> Names:
    found = {_PARAMETERS: frozenset(state.parameter_names().values())}
    for name, part in state.components.items():
        if state.kinds[name] == "module":
            found[name] = frozenset(collect_state_dict(part))
        elif isinstance(part, Gradients):
            found[name] = frozenset(part.names)
    return found
