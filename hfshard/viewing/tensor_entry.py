"""One tensor of a checkpoint that is looked at or compared."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One stored tensor."""

    name: str
    dtype: str
    """The format's name: "F32", "BF16"."""
    shape: tuple[int, ...]
    nbytes: int
    file: str
