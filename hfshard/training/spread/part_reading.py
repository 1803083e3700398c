"""Reads the tensors of a checkpoint for a state that is spread over ranks: of each, this rank's part."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hfshard.checkpoint.load_options import read_tensors
from hfshard.checkpoint.open_checkpoint import OpenCheckpoint
from hfshard.distributed.read_parts import read_parts, stored_tensors
from hfshard.training.collecting import STATE_BASE, is_of_a_rank, rank_prefix
from hfshard.training.spread.layouts import StateLayouts


def read_part_of_rank(
    checkpoint: OpenCheckpoint,
    base: str,
    layouts: StateLayouts,
    own_rank: int,
    is_wanted: Callable[[str], bool] | None = None,
) -> dict[str, torch.Tensor]:
    """Read what this rank needs of one set of tensors into memory.

    Args:
        checkpoint: Open, of that set.
        base: The set.
        layouts: Of the state that is restored.
        own_rank: Whose own random numbers and positions are wanted.
        is_wanted: Which names are; None: all.

    Returns:
        Name -> a DTensor that has this rank's part, or the whole tensor where the state has it whole.
    """
    targets: dict[str, torch.Tensor] = {}
    whole: list[str] = []
    tied_names = checkpoint.index.tied_names
    described = stored_tensors(checkpoint)
    if is_wanted is not None:
        described = {name: one for name, one in described.items() if is_wanted(name)}
    for name, one in described.items():
        if base == STATE_BASE and is_of_a_rank(name) and not name.startswith(rank_prefix(own_rank)):
            continue
        target = layouts.empty(base, name, tuple(one.shape), one.dtype)
        if target is None:
            whole.append(name)
        elif tied_names.get(name, name) not in targets:
            targets[tied_names.get(name, name)] = target
    read_parts(checkpoint, targets.items())
    found = {name: targets[tied_names.get(name, name)] for name in described if tied_names.get(name, name) in targets}
    if whole:
        found |= read_tensors(checkpoint, frozenset(whole).__contains__, "cpu", "pread")
    return {name: found[name] for name in described if name in found}
