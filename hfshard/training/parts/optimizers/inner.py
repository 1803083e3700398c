"""Optimizers that step by another one which they hold: its state is saved, and what they share stays shared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.optim import Optimizer

from hfshard._util.text import list_some
from hfshard.errors import InvalidArgumentError
from hfshard.training.parts.pending_loads import PendingLoad

_SHOWN = 5
"""How many slots a message lists."""


def refuse_unsaved(optimizer: Optimizer, component: str, parts: Iterable[object]) -> None:
    """Refuse an optimizer that holds another one, whose state neither its state_dict has nor another part is.

    Args:
        optimizer: Any.
        component: Its name in the training state, for messages.
        parts: All of the training state.

    Raises:
        InvalidArgumentError: The state would be lost, or each rank has a part of it.
    """
    refuse_parted(optimizer, component)
    saved = {id(part) for part in parts}
    inner = {name: one for name, one in _inner_optimizers(optimizer) if one.state and id(one) not in saved}
    keys = set(_keys_in(optimizer.state_dict())) if inner else set()
    for name, one in inner.items():
        slots = {key: value for held in one.state.values() if isinstance(held, dict) for key, value in held.items()}
        lost = [key for key, value in slots.items() if value is not None and key not in keys]
        if lost:
            raise InvalidArgumentError(
                f"'{component}' ({type(optimizer).__qualname__}) steps by its {name} ({type(one).__qualname__}), whose "
                f"{list_some(lost, _SHOWN, quote=True)} its state_dict does not hold: a resume would go on without. "
                f"Pass that optimizer, too: TrainingState(..., inner=optimizer.{name})."
            )


def refuse_parted(optimizer: Optimizer, component: str) -> None:
    """Refuse an optimizer of which each rank has a part of the state, under no name.

    Raises:
        InvalidArgumentError: It is a ZeroRedundancyOptimizer.
    """
    if any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__):
        raise InvalidArgumentError(
            f"'{component}' is a ZeroRedundancyOptimizer: each rank has a part of its state, and the whole is known "
            "only as it was when it was last consolidated. Spread the model and a plain optimizer instead: "
            "torch.distributed.fsdp.fully_shard(model)."
        )


def with_inner(load: PendingLoad, optimizer: Optimizer, optimizers: Iterable[Optimizer]) -> PendingLoad:
    """Let the optimizers that an optimizer holds, or shares its groups with, follow its load and its undo.

    A load makes new groups: those that had the same list of them have the same again, so that a learning rate which a
    scheduler sets reaches both.

    Args:
        load: Of the optimizer.
        optimizer: Which is not changed before the load.
        optimizers: All of the training state.
    """
    groups = optimizer.param_groups
    sharing = [one for one in optimizers if one is not optimizer and one.param_groups is groups]
    partners = {id(one): one for one in [*sharing, *(one for _, one in _inner_optimizers(optimizer))]}
    if not partners:
        return load
    joined = [one for one in partners.values() if one.param_groups is groups]
    before = [(one, dict(vars(one))) for one in partners.values()]

    def load_all() -> None:
        load.load()
        lists = [one.param_groups for one in (optimizer, *joined)]
        loaded = next((held for held in lists if held is not groups), groups)  # one may hand its load on to another
        for one in (optimizer, *joined):
            if one.param_groups is not loaded:
                one.param_groups = loaded

    def undo() -> None:
        if load.undo is not None:
            load.undo()
        for one, attributes in before:
            vars(one).update(attributes)

    return PendingLoad(load.name, load_all, undo)


def _inner_optimizers(optimizer: Optimizer) -> Iterator[tuple[str, Optimizer]]:
    """The optimizers among the attributes of one, or in lists and dicts there, each with its place."""
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer):
            yield name, value
        elif isinstance(value, list | tuple):
            yield from ((f"{name}[{at}]", one) for at, one in enumerate(value) if isinstance(one, Optimizer))
        elif isinstance(value, dict):
            yield from ((f"{name}[{key!r:.50}]", one) for key, one in value.items() if isinstance(one, Optimizer))


def _keys_in(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value
        value = value.values()
    elif not isinstance(value, list | tuple):
        return
    for item in value:
        yield from _keys_in(item)
