"""Stages of a pipeline: the names that each rank has, and how their parts are merged into those of one model."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, Self

import torch
from torch.optim import LBFGS

from hfshard._util.call_ranks import Session
from hfshard.errors import DamagedCheckpointError, InvalidArgumentError
from hfshard.format.index import sha256_of
from hfshard.tensors.state_dict import collect_state_dict, is_dtensor
from hfshard.tensors.stored_tensor import iter_blocks
from hfshard.training.run_ranks import reject_other_parts, stage_digest
from hfshard.training.state.collect_state import Components
from hfshard.training.state.nested import encoded_entries, tensor_names
from hfshard.training.state.rng import Gradients
from hfshard.training.state.training_state import TrainingState

_PARAMETERS: Final = ""
"""Represents the names by which optimizers know parameters, next to those of the components."""

NAMES_OPTION: Final = "param_names"
"""The option of a group with an entry for each parameter, which torch sets if it is given `named_parameters()`."""

Names = Mapping[str, frozenset[str]]
"""Component -> the names in its state dict."""


@dataclass(frozen=True, slots=True)
class StageNames:
    """The names in this rank's modules, and those in all ranks' modules."""

    own: Names
    everywhere: Names

    def is_here(self, component: str, name: str) -> bool:
        """Return whether a name of a checkpoint concerns this rank: this rank has it, or no rank does."""
        return name in self.own.get(component, ()) or name not in self.everywhere.get(component, ())

    def of_this_rank(self, saved: Mapping[str, dict[str, Any]], path: str) -> dict[str, dict[str, Any]]:
        """Select what this rank restores of the saved components: its own stage of modules, optimizers and gradients.

        Args:
            saved: The components as they were read; not changed.
            path: Their file's path, for messages.

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
    """The modules of this rank, if other ranks have other modules."""

    state: TrainingState
    """The same parts, whose parameters have their names in the full model."""
    names: StageNames


def find_stage(state: TrainingState, session: Session) -> Stage | None:
    """Exchange with the other ranks which modules they have. Every rank must call.

    Returns:
        None if the modules of all ranks have the same names, as in everything but a pipeline.

    Raises:
        HfshardError: Another rank could not list its modules.
    """
    digest, ties, own = session.each(lambda: (stage_digest(state), state.tied_parameters(), _names_of(state)))
    digests = session.all_of(digest)
    if len(set(digests)) == 1:
        return None
    is_speaker = digests.index(digest) == session.position
    own_names = {key: sorted(names) for key, names in own.items()} if is_speaker else {}
    stages = session.all_of((ties if is_speaker else [], own_names))
    stage = with_aliases(state, chain.from_iterable(ties for ties, _ in stages))
    everywhere = {
        key: frozenset(name for _, names in stages for name in _renamed(stage, key, names.get(key, ())))
        for key in dict.fromkeys(key for _, names in stages for key in names)
    }
    return Stage(stage, StageNames({key: _renamed(stage, key, names) for key, names in own.items()}, everywhere))


def with_aliases(state: TrainingState, ties: Iterable[Sequence[str]]) -> TrainingState:
    """Return a copy of the state, whose parameters have their names in the full model.

    Args:
        state: This rank's; not changed.
        ties: Those of all ranks: the names of each parameter that has several.
    """
    groups: list[set[str]] = []
    for names in ties:
        joined = set(names).union(*(group for group in groups if group & set(names)))
        groups = [*(group for group in groups if not group & joined), joined]
    found = copy.copy(state)
    found.aliases = {name: min(group) for group in groups for name in group}
    return found


def with_whole_gradients(state: TrainingState) -> TrainingState:
    """Return a copy of the state, in which `Gradients` belong to the model, spread over the ranks, not to one rank.

    This is so if each stage is on one rank only: ranks that share one may have gradients that are not reduced yet.
    """
    found = copy.copy(state)
    gradients = {name: "stateful" for name, part in state.components.items() if isinstance(part, Gradients)}
    found.kinds = {**state.kinds, **gradients}  # type: ignore[dict-item]
    return found


def group_part(group: Mapping[str, Any], numbers: Sequence[int]) -> dict[str, Any]:
    """Select some parameters of an optimizer's encoded group, with all its options."""
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


# One save of the stages of a pipeline: the parts that the ranks report are merged into those of one model.


_BLOCK_BYTES: Final = 1024 * 1024

_SPREAD: Final = "spread"
"""Represents the bytes of a tensor of which each rank has a part."""


@dataclass(frozen=True, slots=True)
class StageState:
    """A report of one pipeline rank about the parts of its state."""

    kinds: dict[str, str]
    """The kinds of all parts."""
    by_name: dict[str, Any]
    """Encoded, the parts with an entry for each parameter: modules, optimizers, gradients that are spread."""
    values: dict[str, dict[str, str]]
    """Optimizer -> digests of its tensors that belong to no parameter, by name; spread ones have "spread"."""

    @classmethod
    def of(cls, state: TrainingState, components: Components, *, is_first: bool) -> Self:
        """List the parts of this rank.

        Args:
            state: This rank's.
            components: The same, encoded.
            is_first: Whether it is the first rank with these modules, which reports them.

        Raises:
            InvalidArgumentError: An optimizer's state covers all parameters together; or a part has DTensors, which may
                differ, and which ranks cannot store alone.
        """
        parts = cls({name: entry["kind"] for name, entry in components.encoded.items()}, {}, {})
        for name, entry in components.encoded.items():
            part = state.components[name]
            if entry["kind"] == "optimizer":
                if isinstance(part, LBFGS):
                    raise _refusal(name, "is an LBFGS, whose state covers all parameters together")
                loose = {key: value for key, value in entry["state"].items() if key != "state"}
                tensors = components.optimizer_tensors if name == "optimizer" else components.tensors
                parts.values[name] = {key: _digest(tensors[key]) for key in tensor_names(loose)}
            elif entry["kind"] != "module" and not isinstance(part, Gradients):
                if any(is_dtensor(components.tensors[key]) for key in tensor_names(entry["state"])):
                    raise _refusal(name, "has its own DTensors")
                continue
            if is_first:
                parts.by_name[name] = entry
        return parts

    def to_json(self) -> bytes:
        """Encode the report."""
        return json.dumps([self.kinds, self.by_name, self.values]).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> Self:
        """Decode the report of another rank."""
        return cls(*json.loads(raw))


@dataclass(frozen=True, slots=True)
class MergedState:
    """The parts of all stages."""

    encoded: dict[str, dict[str, Any]]
    """Like `Components.encoded`."""
    of_a_rank: list[str]
    """Parts that differ on another rank: each rank saves its own."""


def merge_parts(own: Components, reports: Mapping[int, StageState], different: Collection[str]) -> MergedState:
    """Merge the parts of all stages into those of one model.

    The entries of modules and optimizers are merged by name; if several ranks have a name, the first one's entry
    counts. An optimizer's groups with equal options become one. Everything else is stored once if it is the same on all
    ranks, and for each rank otherwise.

    Args:
        own: The first rank's components; not changed.
        reports: Rank -> its report, in the order of the ranks.
        different: Other parts that are not the same on all ranks.

    Raises:
        InvalidArgumentError: Two ranks have optimizers that cannot be those of one model.
    """
    reject_other_parts({rank: parts.kinds for rank, parts in reports.items()})
    merged = MergedState({}, [])
    keeps_groups = True
    for name, entry in own.encoded.items():
        states = [(rank, parts.by_name[name]["state"]) for rank, parts in reports.items() if name in parts.by_name]
        if entry["kind"] == "optimizer":
            _check_values(name, {rank: parts.values[name] for rank, parts in reports.items()})
            union = _OptimizerUnion(name, entry["state"])
            for rank, state in states:
                union.add(rank, state)
            keeps_groups = keeps_groups and union.keeps_groups
            merged.encoded[name] = {"kind": entry["kind"], "state": union.state}
        elif states:
            united = _first_of_each(encoded_entries(state) for _, state in states)
            merged.encoded[name] = {"kind": entry["kind"], "state": united}
    for name, entry in own.encoded.items():
        if name in merged.encoded:
            continue
        if name in different or (entry["kind"] == "scheduler" and not keeps_groups):
            merged.of_a_rank.append(name)
        else:
            merged.encoded[name] = {"kind": entry["kind"], "state": entry["state"]}  # which is in no rank's order
    return merged


class _OptimizerUnion:
    """The optimizers of stages as one: `state` is what `encode_optimizer` would return for the full model."""

    def __init__(self, name: str, first: Mapping[str, Any]) -> None:
        self._name = name
        self._homes: dict[str, int] = {}
        self._taken: list[list[int]] = []
        self.state: dict[str, Any] = {**first, "groups": [], "state": {}}

    @property
    def keeps_groups(self) -> bool:
        """True if each rank's groups are those of all ranks, in this order."""
        return all(taken == list(range(len(self.state["groups"]))) for taken in self._taken)

    def add(self, rank: int, state: Mapping[str, Any]) -> None:
        """Add the optimizer of a rank; refuse one that does not fit those added before."""
        for key in self.state.keys() - {"groups", "state", "gradients"}:
            if state[key] != self.state[key]:
                raise _refusal(self._name, f"has another {key!r} on rank {rank}")
        groups = self.state["groups"]
        taken: list[int] = []
        for number, group in enumerate(state["groups"]):
            at = _place(groups, taken, number, group)
            if at == len(groups):
                groups.append(group_part(group, ()))
            taken.append(at)
            self._add_group(rank, at, group)
        self._taken.append(taken)
        for key in ("state", "gradients"):
            self.state[key] = _first_of_each([self.state[key], state[key]])

    def _add_group(self, rank: int, at: int, group: Mapping[str, Any]) -> None:
        new = []
        for number, parameter in enumerate(group["params"]):
            if parameter not in self._homes:
                new.append(number)
            if self._homes.setdefault(parameter, at) != at:
                raise _refusal(self._name, f"has '{parameter}' in another group on rank {rank}")
        added = group_part(group, new)
        whole = self.state["groups"][at]
        whole["params"] = whole["params"] + added["params"]
        if NAMES_OPTION in added["options"]:
            names = whole["options"][NAMES_OPTION] + added["options"][NAMES_OPTION]
            whole["options"] = {**whole["options"], NAMES_OPTION: names}


def _place(groups: Sequence[Mapping[str, Any]], taken: Sequence[int], number: int, group: Mapping[str, Any]) -> int:
    """Find the group of which a rank's group is a part: one of equal options, preferably of the same number."""
    in_order = sorted(range(len(groups)), key=lambda at: at != number)
    free = (at for at in in_order if at not in taken and _options(groups[at]) == _options(group))
    return next(free, len(groups))


def _options(group: Mapping[str, Any]) -> list[Any]:
    options = {key: value for key, value in group["options"].items() if key != NAMES_OPTION}
    return [options, NAMES_OPTION in group["options"]]


def _first_of_each(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for state in states:
        for name, value in state.items():
            found.setdefault(name, value)
    return found


def _digest(tensor: torch.Tensor) -> str:
    if is_dtensor(tensor):
        return _SPREAD
    kind = f"{tensor.dtype} {tuple(tensor.shape)} "
    return sha256_of(kind.encode() + b"".join(map(bytes, iter_blocks(tensor.detach(), _BLOCK_BYTES))))


def _check_values(name: str, values: Mapping[int, Mapping[str, str]]) -> None:
    """Reject group tensors that differ on another rank: their names contain only the groups' numbers."""
    known: dict[str, str] = {}
    for rank, digests in values.items():
        for tensor, digest in digests.items():
            if known.setdefault(tensor, digest) != digest:
                raise _refusal(name, f"has another tensor '{tensor}' on rank {rank}")


def _refusal(name: str, why: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"Cannot merge '{name}' of all ranks for the whole model: it {why}, and the ranks have different modules, like "
        "pipeline stages. Build it the same on all ranks, or leave it out of the state."
    )
