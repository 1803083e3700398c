"""Gives a data loader the position that another program counted in epochs, which knows no loader of ours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from hfshard.training.data.dataloader import ResumableDataLoader
from hfshard.training.data.external_loader import LoaderTracker
from hfshard.training.foreign.checkpoint import ForeignCheckpoint
from hfshard.training.state import TrainingState

_NEAR: Final = 1e-6
"""Of a batch: epochs are a float64, whose fraction is rounded."""


def with_positions(foreign: ForeignCheckpoint, state: TrainingState) -> ForeignCheckpoint:
    """Bring the positions of loaders into the form that ours have; a number of epochs will do.

    Args:
        foreign: It is not changed.
        state: That is restored; it is not changed either.
    """
    components = dict(foreign.components)
    lacking = list(foreign.lacking)
    for name, loader in state.of_kind("loader").items():
        if name in components and isinstance(loader, LoaderTracker):
            components[name] = loader.with_state(components[name])
        elif name not in components and foreign.epochs is not None and isinstance(loader, ResumableDataLoader):
            position, told = position_after(loader, foreign.epochs)
            components |= {name: position} if position is not None else {}
            lacking += [told] if told else []
    return replace(foreign, components=components, lacking=tuple(lacking))


def position_after(loader: ResumableDataLoader[Any], epochs: float) -> tuple[dict[str, Any] | None, str]:
    """Find the state in which a loader goes on after so many epochs, whole ones and a part of one.

        state, lacking = position_after(loader, 1.25)  # of 8 batches: the third one of the second epoch comes next

    Args:
        loader: It is not changed.
        epochs: How many the run has trained.

    Returns:
        The state for its `load_state_dict`, and what is lacking for its batches to be those of the run, in words; no
        state where the position is none of this loader's.
    """
    state = loader.state_dict()
    batches = state["batches"]
    epoch = int(epochs)
    exact = (epochs - epoch) * (batches or 0)
    batch = round(exact)
    if not batches or abs(exact - batch) > _NEAR * batches:
        return None, f"batches like this loader's, of which {epochs:.6g} epochs are no whole number"
    if batch == batches:
        epoch, batch = epoch + 1, 0
    lacking = (
        "" if state["sampler"] == "SequentialSampler" else "the order of shuffled data, which is this loader's own"
    )
    return {**state, "epoch": epoch, "batch": batch, "indexes_crc32": None}, lacking
