"""Compares the parts of a training state with those that a checkpoint has: which are there, and of which kind."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from hfshard.errors import StateDictMismatchError
from hfshard.training.parts.gradients import Gradients
from hfshard.training.spread.states import stage_digest
from hfshard.training.state import TrainingState


def take_gradients(state: TrainingState, saved: dict[str, Any], saved_ranks: int, world_size: int) -> None:
    """Take gradients of one process for those of ranks that share a model, and the other way round."""
    for name, part in state.components.items():
        kinds = saved.get(name, {}).get("kind"), state.kinds[name]
        if isinstance(part, Gradients) and kinds in (("loader", "stateful"), ("stateful", "loader")):
            processes = world_size if state.kinds[name] == "loader" else saved_ranks
            if processes == 1:
                saved[name] = {**saved[name], "kind": state.kinds[name]}


def take_converted(state: TrainingState, saved: dict[str, Any]) -> None:
    """Take a dict of tensors for a module's, and the other way round: a conversion of an old file can't tell them."""
    alike = ("module", "stateful")
    for name, kind in state.kinds.items():
        if name != "model" and kind in alike and saved.get(name, {}).get("kind") in alike:
            saved[name] = {**saved[name], "kind": kind}


def parts_of_other_stages(state: TrainingState, own: Mapping[str, Any]) -> set[str]:
    """What each stage of a pipeline has saved for itself, where this rank has another stage, or the whole model."""
    alone = {name for name, entry in own["components"].items() if entry.get("kind") != "loader"}
    alone |= {name for name, part in state.components.items() if isinstance(part, Gradients)} & own["components"].keys()
    return alone if alone and own.get("stage") not in (None, stage_digest(state)) else set()


def check_components(
    state: TrainingState,
    saved: Mapping[str, Any],
    directory: str,
    differences: list[str],
    elsewhere: Collection[str],
    *,
    strict: bool,
    may_lack: Collection[str] = (),
) -> None:
    """Find parts that the checkpoint or the state lacks, or has of another kind.

    Args:
        state: That is restored.
        saved: The components of the checkpoint.
        directory: The checkpoint's, for messages.
        differences: Receives them, in words.
        elsewhere: Parts that other stages have saved for themselves.
        strict: Refuse any.
        may_lack: Parts that the checkpoint need not have.

    Raises:
        StateDictMismatchError: strict, and there is one.
    """
    wanted = [name for name in state.components if name in saved or name not in may_lack]
    for name in wanted:
        if name in elsewhere:
            differences.append(
                f"Each stage of a pipeline has saved a '{name}' of its own in '{directory}', and this rank has another "
                "stage, or the whole model. Restore on as many ranks with the same stages, or pass strict=False to "
                "leave it as it was built."
            )
        elif name not in saved:
            differences.append(
                f"The checkpoint '{directory}' has no '{name}'. Build the state without it, or pass strict=False to "
                "leave it as it was built."
            )
        elif saved[name].get("kind") != state.kinds[name]:
            differences.append(
                f"'{name}' has the kind {saved[name].get('kind')!r:.50} in '{directory}', and is a {state.kinds[name]} "
                "here. Pass the kind of object that was saved, or strict=False to leave it as it was built."
            )
    for name in saved:
        if name not in state.components:
            differences.append(
                f"The checkpoint '{directory}' has the state of '{name}', which the TrainingState lacks. "
                f"Pass {name}=..., or strict=False to leave it out."
            )
    if strict and differences:
        missing = tuple(name for name in wanted if name not in saved)
        unexpected = tuple(name for name in saved if name not in state.components)
        raise StateDictMismatchError(
            " ".join(differences) + " Nothing was restored.",
            path=directory,
            missing_keys=missing,
            unexpected_keys=unexpected,
        )


def never_held(state: TrainingState) -> frozenset[str]:
    """The parts of a state that other programs do not save: positions of loaders, gradients between micro-batches."""
    gradients = {name for name, part in state.components.items() if isinstance(part, Gradients)}
    return frozenset(gradients.union(state.of_kind("loader")))


def check_object(name: str, part: Any, value: Any, directory: str) -> None:
    """Ask an object whether it would take its state.

    Raises:
        StateDictMismatchError: It would not.
    """
    if isinstance(part, torch.amp.GradScaler) and part.is_enabled() != bool(value):
        raise StateDictMismatchError(
            f"'{name}' is a GradScaler that is {'on' if part.is_enabled() else 'off'}, and was not when the checkpoint "
            f"'{directory}' was saved. Build it with the enabled= of that run, or pass strict=False.",
            path=directory,
        )
    check = getattr(part, "check_state_dict", None)
    if not callable(check):
        return
    try:
        check(value)
    except StateDictMismatchError as error:
        raise StateDictMismatchError(
            f"'{name}' does not fit the checkpoint '{directory}', and nothing was restored: {error.message}",
            path=directory,
            expected=error.expected,
            actual=error.actual,
        ) from error
