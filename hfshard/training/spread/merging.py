"""One save of the stages of a pipeline: what the ranks say of their parts, made the parts of one whole model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import torch
from torch.optim import LBFGS

from hfshard.errors import InvalidArgumentError
from hfshard.format.digests import sha256_of
from hfshard.tensors.state_dict import is_dtensor
from hfshard.tensors.stored_tensor import iter_blocks
from hfshard.training.collecting import Components
from hfshard.training.parts.gradients import Gradients
from hfshard.training.parts.nested_decoding import encoded_entries, tensor_names
from hfshard.training.spread.stages import NAMES_OPTION, group_part
from hfshard.training.spread.states import refuse_other_parts
from hfshard.training.state import TrainingState

_BLOCK_BYTES: Final = 1024 * 1024

_SPREAD: Final = "spread"
"""Stands for the bytes of a tensor of which each rank has a part."""


@dataclass(frozen=True, slots=True)
class StageParts:
    """What one rank of a pipeline says of the parts of its state."""

    kinds: dict[str, str]
    """Of all of them."""
    by_name: dict[str, Any]
    """Encoded, of those that have an entry for each parameter: modules, optimizers, gradients that are spread."""
    values: dict[str, dict[str, str]]
    """Component -> digests of its tensors that belong to no parameter, by name; what has parts has "spread"."""
    others: dict[str, str]
    """Of all other parts: digests of what is no tensor."""

    @classmethod
    def of(cls, state: TrainingState, components: Components, *, is_first: bool) -> Self:
        """List the parts of this rank.

        Args:
            state: This rank's.
            components: The same, encoded.
            is_first: Whether it is the first rank with these modules, which speaks for them.

        Raises:
            InvalidArgumentError: An optimizer's state is of all parameters together.
        """
        parts = cls({name: entry["kind"] for name, entry in components.encoded.items()}, {}, {}, {})
        for name, entry in components.encoded.items():
            part = state.components[name]
            is_by_name = entry["kind"] in ("module", "optimizer") or isinstance(part, Gradients)
            if is_by_name and is_first:
                parts.by_name[name] = entry
            if not is_by_name:
                parts.others[name] = sha256_of(json.dumps([entry["kind"], entry["state"]], sort_keys=True).encode())
            if entry["kind"] == "optimizer":
                _refuse_whole_state(name, part)
                loose = {key: value for key, value in entry["state"].items() if key != "state"}
                tensors = components.optimizer_tensors if name == "optimizer" else components.tensors
                parts.values[name] = _digests(loose, tensors)
            elif name in parts.others:
                parts.values[name] = _digests(entry["state"], components.tensors)
        return parts

    def to_json(self) -> bytes:
        """Encode it."""
        return json.dumps([self.kinds, self.by_name, self.values, self.others]).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> Self:
        """Decode what another rank has told."""
        return cls(*json.loads(raw))


@dataclass(frozen=True, slots=True)
class MergedParts:
    """The parts of all stages."""

    encoded: dict[str, dict[str, Any]]
    """As `Components.encoded`."""
    of_a_rank: list[str]
    """Parts that are others on another rank: each rank saves its own."""


def merge_parts(own: Components, told: Mapping[int, StageParts]) -> MergedParts:
    """Make the parts of all stages those of one whole model.

    Of modules and optimizers, the entries of all ranks are brought together by name; of a name that several ranks have,
    the first one's counts. Groups of an optimizer with equal options become one. Everything else is stored once where
    it is the same on all ranks, and for each rank otherwise.

    Args:
        own: Of the first rank; not changed.
        told: Rank -> what it says, in the order of the ranks.

    Raises:
        InvalidArgumentError: Two ranks have optimizers that can't be those of one model, or a part that is another one
            on each, and has DTensors.
    """
    refuse_other_parts({rank: parts.kinds for rank, parts in told.items()})
    merged = MergedParts({}, [])
    keeps_groups = True
    for name, entry in own.encoded.items():
        states = [(rank, parts.by_name[name]["state"]) for rank, parts in told.items() if name in parts.by_name]
        if entry["kind"] == "optimizer":
            _check_values(name, {rank: parts.values[name] for rank, parts in told.items()})
            union = _OptimizerUnion(name, entry["state"])
            for rank, state in states:
                union.add(rank, state)
            keeps_groups = keeps_groups and union.keeps_groups
            merged.encoded[name] = {"kind": entry["kind"], "state": union.state}
        elif states:
            united = _first_of_each(encoded_entries(state) for _, state in states)
            merged.encoded[name] = {"kind": entry["kind"], "state": united}
    for name, entry in own.encoded.items():
        if name not in merged.encoded and _is_same(name, told) and (keeps_groups or entry["kind"] != "scheduler"):
            merged.encoded[name] = {"kind": entry["kind"], "state": entry["state"]}  # that is in no rank's order
        elif name not in merged.encoded:
            merged.of_a_rank.append(name)
    return merged


class _OptimizerUnion:
    """The optimizers of stages as one: `state` is what `encode_optimizer` would give for the whole model."""

    def __init__(self, name: str, first: Mapping[str, Any]) -> None:
        self._name = name
        self._homes: dict[str, int] = {}
        self._taken: list[list[int]] = []
        self.state: dict[str, Any] = {**first, "groups": [], "state": {}}

    @property
    def keeps_groups(self) -> bool:
        """Whether each rank's groups are those of all, in this order."""
        return all(taken == list(range(len(self.state["groups"]))) for taken in self._taken)

    def add(self, rank: int, state: Mapping[str, Any]) -> None:
        """Add the optimizer of a rank.

        Raises:
            InvalidArgumentError: It does not go together with those before.
        """
        for key in self.state.keys() - {"groups", "state"}:
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
        self.state["state"] = _first_of_each([self.state["state"], state["state"]])

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
    """Which of the groups so far a rank's group is a part of: of equal options, best of the same number."""
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


def _digests(nested: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: _SPREAD if is_dtensor(tensors[name]) else _digest(tensors[name]) for name in tensor_names(nested)}


def _digest(tensor: torch.Tensor) -> str:
    kind = f"{tensor.dtype} {tuple(tensor.shape)} "
    return sha256_of(kind.encode() + b"".join(map(bytes, iter_blocks(tensor.detach(), _BLOCK_BYTES))))


def _is_same(name: str, told: Mapping[int, StageParts]) -> bool:
    """Whether a part is the same on all ranks.

    Raises:
        InvalidArgumentError: It is not, or may not be, as it has DTensors, which ranks can't store alone.
    """
    if any(_SPREAD in parts.values.get(name, {}).values() for parts in told.values()):
        raise _refusal(name, "has DTensors of its own")
    first = told[min(told)]
    return all(
        parts.others.get(name) == first.others[name] and parts.values.get(name) == first.values[name]
        for parts in told.values()
    )


def _check_values(name: str, values: Mapping[int, Mapping[str, str]]) -> None:
    """Refuse tensors of groups that are others on another rank: their names tell the groups' numbers only."""
    known: dict[str, str] = {}
    for rank, digests in values.items():
        for tensor, digest in digests.items():
            if known.setdefault(tensor, digest) != digest:
                raise _refusal(name, f"has another tensor '{tensor}' on rank {rank}")


def _refuse_whole_state(name: str, optimizer: Any) -> None:
    if isinstance(optimizer, LBFGS):
        raise _refusal(name, "(LBFGS) has a state of all parameters together")


def _refusal(name: str, why: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"'{name}' {why}, and the ranks have different modules, as with the stages of a pipeline: it can't be made one "
        "for the whole model. Build it alike on all ranks, or leave it out of the state."
    )
