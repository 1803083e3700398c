"""Which tensors of a checkpoint are read, and by which names."""

from __future__ import annotations

import torch

from hfshard.format.index import CheckpointIndex
from hfshard.shards.read_tensors import ReadMode
from hfshard.storage.checkpoint.checkpoint import OpenCheckpoint
from hfshard.tensors.parameter_names import KeySelection, select_keys


def files_holding(index: CheckpointIndex, keys: KeySelection) -> set[str]:
    """Find the files that hold the tensors of these names, tied names included.

    Raises:
        StateDictMismatchError: A name or glob that matches nothing.
    """
    return {index.weight_map[name] for name in stored_names(index, keys)}


def stored_names(index: CheckpointIndex, keys: KeySelection | None) -> set[str]:
    """Find the stored names of these tensors: their own, or those that they are tied to."""
    selected = select_keys([*index.weight_map, *index.tied_names], keys)
    return {index.tied_names.get(name, name) for name in selected}


def read_tensors(
    checkpoint: OpenCheckpoint, keys: KeySelection | None, device: str | torch.device, read: ReadMode
) -> dict[str, torch.Tensor]:
    """Read tensors of a checkpoint by name, tied names included.

    Args:
        checkpoint: Open.
        keys: Which; None: all.
        device: Where they go.
        read: How the bytes come into memory.
    """
    tied_names = checkpoint.index.tied_names
    selected = select_keys([*checkpoint.keys, *tied_names], keys)
    stored = {tied_names.get(name, name) for name in selected}
    tensors = checkpoint.read([name for name in checkpoint.keys if name in stored], read, device)
    return {name: tensors[tied_names.get(name, name)] for name in selected}
