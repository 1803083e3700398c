"""What differs between two checkpoints, as plain data: the terminal, JSON and pages are made from it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from hfshard.viewing.tensor_entry import TensorEntry

DiffKind = Literal["same", "renamed", "cast", "reshaped", "changed", "only_in_a", "only_in_b"]
"""How a tensor of two checkpoints relates. The same: dtype, shape and bytes. A cast has another dtype and nothing but
rounding, a reshape another shape and the same bytes; whatever else differs under one name has changed, be it only the
sign of a zero. Renamed: the same dtype, shape and bytes under another name, where each name is in one checkpoint only.
"""


@dataclass(frozen=True, slots=True)
class ValueDiff:
    """How the values of a tensor differ, over the elements that are finite in both.

    Computed in float64; where both have numbers of 8 or 16 bits, in float32: then `max_abs` is right to 7 digits, the
    norms and the cosine are to 6. Counts are exact.
    """

    elements: int
    changed: int
    """Elements that are not equal; two NaN are equal here."""
    max_abs: float
    """The largest |b - a|."""
    relative_norm: float
    """|b - a| / |a|, each the 2-norm; inf where only a is zero, 0.0 where both are."""
    cosine: float | None
    """Of the angle between a and b; None where one of them is zero."""
    nan_a: int
    nan_b: int
    inf_a: int
    inf_b: int

    @property
    def was_zero(self) -> bool:
        """Whether only a is zero, so that the change has no relative norm."""
        return math.isinf(self.relative_norm)


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """One tensor, or one name, of the two checkpoints."""

    kind: DiffKind
    a: TensorEntry | None
    """None: it is only in b."""
    b: TensorEntry | None
    """None: it is only in a."""
    values: ValueDiff | None = None
    """Where values were asked for, and it changed or was cast or reshaped; both have the same number of elements, and
    torch knows how to read them as numbers (not F4, F6)."""

    @property
    def name(self) -> str:
        """The FQN in b, or in a where b has none."""
        facts = self.b or self.a
        assert facts is not None
        return facts.name


@dataclass(frozen=True, slots=True)
class CheckpointDiff:
    """What `diff_checkpoints` found."""

    a: str
    """As it was given, made absolute."""
    b: str
    tensors: tuple[TensorDiff, ...]
    """In the order of b, then those that are only in a, in its order. Names that are tied to one of these in a and in b
    have no entry of their own."""
    ties_a: dict[str, str]
    """Names of a that are stored as another tensor."""
    ties_b: dict[str, str]
    read_bytes: int
    """Bytes of tensors that were read to tell; not those that are compared with fingerprints when a file is opened."""
    retied: tuple[str, ...] = ()
    """Names that share a tensor with other names in one than in the other, or are tied in one and not in the other at
    all. Not those that the config of a model of transformers ties by itself, where the other does not name them."""

    @property
    def is_same(self) -> bool:
        """Whether both hold the same tensors under the same names, tied names included."""
        return not self.retied and all(tensor.kind == "same" for tensor in self.tensors)

    @property
    def counts(self) -> dict[DiffKind, int]:
        """How many tensors there are of each kind that occurs."""
        return dict(Counter(tensor.kind for tensor in self.tensors))
