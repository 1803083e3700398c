"""Compares the orders of groups and parameters with those of a checkpoint, for all that is matched by position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hfshard.errors import StateDictMismatchError
from hfshard.training.parts.optimizers.optimizer import group_names
from hfshard.training.parts.positions.holders import held_optimizers
from hfshard.training.parts.positions.ordered_state import find_in, one_per_parameter
from hfshard.training.parts.positions.reordering import PER_GROUP, Reordering, related_positions
from hfshard.training.state import TrainingState

_NONE: Final[frozenset[str]] = frozenset()


def find_reorderings(
    name: str, state: TrainingState, saved: Mapping[str, dict[str, Any]], path: str
) -> list[Reordering]:
    """Find the optimizers of a scheduler, or of another object, whose groups stand in another order than then.

    Args:
        name: The object's name in the training state.
        state: The training state.
        saved: The components of the checkpoint, as they were read.
        path: The checkpoint's, for messages.
    """
    part = state.components[name]
    names = state.parameter_names()
    components = {id(one): component for component, one in state.of_kind("optimizer").items()}
    held = held_optimizers(part)
    if not held and state.kinds[name] == "scheduler":  # it may hold one where it is not seen
        held = list(state.of_kind("optimizer").values())
    own = getattr(part, "optimizer", None)
    found: list[Reordering] = []
    for optimizer in held:
        component = components.get(id(optimizer), "")
        before = saved[component]["state"]["groups"] if saved.get(component, {}).get("kind") == "optimizer" else None
        if before is not None:
            now = group_names(optimizer, names, component)
            positions = related_positions(now, [group["params"] for group in before])
            is_same = positions == tuple(range(len(now)))
            counts = frozenset({len(now), len(before)})
        else:
            positions = None
            is_same = _is_same_order(name, state, saved)
            counts = frozenset({len(optimizer.param_groups)})
        if not is_same:
            known = PER_GROUP if len(held) == 1 or own is optimizer else _NONE
            owners = f"groups of '{component}'" if component else "groups of its optimizer"
            found.append(Reordering(name, owners, path, positions, counts, known))
    return found


def reordered_state(name: str, state: TrainingState, saved: Mapping[str, dict[str, Any]], path: str, value: Any) -> Any:
    """Return the state of a user's object in the order of now.

    Args:
        name: The object's name in the training state.
        state: The training state.
        saved: The components of the checkpoint, as they were read.
        path: The checkpoint's, for messages.
        value: The object's state, decoded.

    Raises:
        StateDictMismatchError: It has an entry for each of some parameters, or groups, and these stand in another
            order.
    """
    part = state.components[name]
    for reordering in find_reorderings(name, state, saved, path):
        value = reordering.apply(value, part.state_dict())
    if _is_same_order(name, state, saved):
        return value
    models = [list(module.parameters()) for module in state.of_kind("module").values()]
    tests = [one_per_parameter(parameters) for parameters in models]
    place = find_in(value, lambda one: any(is_one_each(one) for is_one_each in tests))
    if place is not None:
        raise StateDictMismatchError(
            f"'{place}' of '{name}' has entries for parameters by their position in the checkpoint '{path}', and these "
            "stand in another order now. Build the model (or the optimizer that it holds) with them in the order of "
            "that run, let its state_dict keep them by name, or pass strict=False to leave it as it was built.",
            path=path,
        )
    return value


def _is_same_order(name: str, state: TrainingState, saved: Mapping[str, dict[str, Any]]) -> bool:
    """Whether the orders that an object's positions may refer to are those of the checkpoint, as far as it has them."""
    before = saved[name].get("order")
    return before is None or before == state.order_digest(name)
