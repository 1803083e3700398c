"""A checkpoint's contents and the differences between two, as plain data for pages, terminal and JSON."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

if TYPE_CHECKING:  # every command imports this module
    from hfshard.format.index import FileDigest
    from hfshard.viewing.model_summary import ModelSummary


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One stored tensor."""

    name: str
    dtype: str
    """The format's name: "F32", "BF16"."""
    shape: tuple[int, ...]
    nbytes: int
    file: str

    @property
    def parameters(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    def shape_text(self, sign: str = "×") -> str:
        """Describe its shape: "384×384", or "scalar"."""
        return sign.join(map(str, self.shape)) or "scalar"

    def as_json(self) -> dict[str, Any]:
        """Return its fields."""
        return {**asdict(self), "shape": list(self.shape)}


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of the checkpoint."""

    name: str
    nbytes: int
    tensors: int | None
    """The number of tensors in it; None for a config, which has none."""
    digest: FileDigest
    """The digest recorded when it was saved; empty if hfshard did not save it."""


@dataclass(frozen=True, slots=True)
class DtypeEntry:
    """All tensors of one dtype."""

    dtype: str
    tensors: int
    parameters: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """A checkpoint as described by its index and headers alone: no tensors are read."""

    place: str
    """An absolute path, a store address, or "org/name@revision"; for a run, that of its checkpoint."""
    directory: str
    """The directory of its files; the path as typed, if that is the directory."""
    entry: str
    """The file that readers open first: the index, or the single file."""
    files: tuple[FileEntry, ...]
    key: str | None
    """The key of the weights in a file of torch.save; None if the file has nothing else, or there is no such file."""
    tensors: tuple[TensorEntry, ...]
    """In the order of the files and of the bytes in them."""
    tied_names: dict[str, str]
    metadata: dict[str, Any]
    is_verifiable: bool
    """Whether every file with tensors has a checksum."""
    signature: str | None
    """The name of the signature file, which is not checked; None if there is none."""
    framework: str | None = None
    """The framework that saved the weights in parts, such as "DeepSpeed ZeRO-3, 4 ranks"; None for any other."""
    model: ModelSummary | None = None
    """What it is by its config; None if there is none."""

    @property
    def weights_files(self) -> tuple[FileEntry, ...]:
        """The files that contain tensors."""
        return tuple(file for file in self.files if file.tensors is not None)

    @property
    def largest_file_bytes(self) -> int:
        """The size of the largest file, of a config too; 0 if there is none."""
        return max((file.nbytes for file in self.files), default=0)

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def parameters(self) -> int:
        """The elements of all tensors."""
        return sum(tensor.parameters for tensor in self.tensors)

    @property
    def dtypes(self) -> tuple[DtypeEntry, ...]:
        """The totals of each dtype, the largest first."""
        counts = Counter(tensor.dtype for tensor in self.tensors)
        entries = [
            DtypeEntry(
                dtype,
                count,
                sum(tensor.parameters for tensor in self.tensors if tensor.dtype == dtype),
                sum(tensor.nbytes for tensor in self.tensors if tensor.dtype == dtype),
            )
            for dtype, count in counts.items()
        ]
        return tuple(sorted(entries, key=lambda entry: (-entry.nbytes, entry.dtype)))

    def largest(self, count: int) -> list[TensorEntry]:
        """Return the tensors with the most bytes, largest first; of equal ones, the earlier."""
        return sorted(self.tensors, key=lambda tensor: -tensor.nbytes)[:count]

    def as_json(self) -> dict[str, Any]:
        """Return everything, for `--format json`."""
        return {
            "directory": self.directory,
            "entry": self.entry,
            "key": self.key,
            "is_verifiable": self.is_verifiable,
            "signature": self.signature,
            "framework": self.framework,
            "model": None if self.model is None else self.model.as_json(),
            "total_size": self.nbytes,
            "total_parameters": self.parameters,
            "files": [
                {
                    "name": file.name,
                    "size": file.nbytes,
                    "tensors": file.tensors,
                    "sha256": file.digest.sha256,
                    "xxh3": file.digest.xxh3,
                }
                for file in self.files
            ],
            "tensors": [tensor.as_json() for tensor in self.tensors],
            "dtypes": [asdict(entry) for entry in self.dtypes],
            "tied_names": self.tied_names,
            "metadata": self.metadata,
        }


# Differences between two checkpoints.


DiffKind = Literal["same", "renamed", "cast", "reshaped", "changed", "only_in_a", "only_in_b"]
"""The relation of a tensor in two checkpoints. The same: equal dtype, shape and bytes. A cast has another dtype and
differs by rounding only; a reshape has another shape and the same bytes. Any other difference under one name is a
change, even the sign of a zero. Renamed: the same dtype, shape and bytes under another name, each name being in one
checkpoint only."""

KIND_WORDS: Final[dict[DiffKind, str]] = {
    **{kind: kind for kind in get_args(DiffKind)},
    "only_in_a": "only in A",
    "only_in_b": "only in B",
}
"""The kinds as they are shown."""

FROM_ZERO: Final = "from 0"
"""Shown in place of a relative norm that is infinite."""


@dataclass(frozen=True, slots=True)
class ValueDiff:
    """Difference between the values of two tensors, over the elements that are finite in both.

    Computed in float64; if both have numbers of 8 or 16 bits, in float32: then `max_abs` is correct to 7 digits, and
    the norms and the cosine to 6. Counts are exact.
    """

    elements: int
    changed: int
    """Elements that are not equal; two NaN are equal here."""
    max_abs: float
    """The largest |b - a|."""
    relative_norm: float
    """|b - a| / |a|, each the 2-norm; inf if only a is zero, 0.0 if both are."""
    cosine: float | None
    """The cosine of the angle between a and b; None if one of them is zero."""
    nan_a: int
    nan_b: int
    inf_a: int
    inf_b: int
    norms: tuple[float, float] | None = field(default=None, compare=False)
    """|a| and |b - a|, to add them up over several tensors; None if they were not measured. They are not in JSON."""

    @property
    def cosine_distance(self) -> float | None:
        """1 - cosine; None without a cosine. In float32, anything below 1e-6 is rounding."""
        return None if self.cosine is None else max(0.0, 1.0 - self.cosine)

    @property
    def was_zero(self) -> bool:
        """True if only a is zero, so that the change has no relative norm."""
        return math.isinf(self.relative_norm)

    def as_json(self) -> dict[str, Any]:
        """Return its fields but the norms; numbers that JSON lacks (infinity) are None."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
            if name != "norms"
        }


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """One tensor, or one name, of the two checkpoints."""

    kind: DiffKind
    a: TensorEntry | None
    """None if it is only in b."""
    b: TensorEntry | None
    """None if it is only in a."""
    values: ValueDiff | None = None
    """Set if values were requested, the tensor was changed, cast or reshaped, both have the same number of elements,
    and torch can read them as numbers (not F4, F6)."""

    @property
    def name(self) -> str:
        """The FQN in b, or in a if it is only there."""
        facts = self.b or self.a
        assert facts is not None
        return facts.name


@dataclass(frozen=True, slots=True)
class CheckpointDiff:
    """Result of `diff_checkpoints`."""

    a: str
    """The given place, made absolute."""
    b: str
    tensors: tuple[TensorDiff, ...]
    """In the order of b, then the ones that are only in a, in its order. Names that are tied to one of these in both a
    and b have no entry of their own."""
    ties_a: dict[str, str]
    """Names of a that are stored as another tensor."""
    ties_b: dict[str, str]
    read_bytes: int
    """Bytes of tensors that were read for the comparison, without those that are compared with fingerprints when a
    file is opened."""
    retied: tuple[str, ...] = ()
    """Names that share a tensor with different names in a and b, or are tied in one and not in the other. Names that a
    transformers config ties by itself are not included if the other checkpoint does not have them."""
    models: tuple[ModelSummary | None, ModelSummary | None] = (None, None)
    """What the configs of a and b say."""
    merged: CheckpointDiff | None = None
    """With values, if one of them is a LoRA adapter of the other: what the base and the adapter are together (as b),
    compared with the base alone (as a)."""
    read_tensors: int = 0
    """Tensors of which bytes were read, in one or in both."""

    @property
    def is_same(self) -> bool:
        """True if both have the same tensors under the same names, tied names included."""
        return not self.retied and not self.differing

    @property
    def differing(self) -> tuple[TensorDiff, ...]:
        """The tensors that are not the same."""
        return tuple(tensor for tensor in self.tensors if tensor.kind != "same")

    @property
    def has_values(self) -> bool:
        """True if the values of a tensor were compared."""
        return any(tensor.values is not None for tensor in self.tensors)

    @property
    def zero_in_a(self) -> tuple[str, ...]:
        """The names of tensors that are zero in a and not in b, so that their change has no relative norm."""
        return tuple(tensor.name for tensor in self.tensors if tensor.values is not None and tensor.values.was_zero)

    @property
    def relative_norm(self) -> float | None:
        """|b - a| / |a| over all tensors together; None unless each was measured, or if a is zero."""
        norms = []
        for tensor in self.tensors:
            if tensor.values is not None and tensor.values.norms is not None:
                norms.append(tensor.values.norms)
            elif tensor.a is None or tensor.b is None or tensor.a.parameters or tensor.b.parameters:
                return None
        norm_a, norm_of_change = (math.hypot(*one) for one in zip(*norms, strict=True)) if norms else (0.0, 0.0)
        return norm_of_change / norm_a if 0 < norm_a < math.inf else None

    @property
    def counts(self) -> dict[DiffKind, int]:
        """The number of tensors of each kind that occurs."""
        return dict(Counter(tensor.kind for tensor in self.tensors))

    def norm_scale(self, shown: Iterable[str]) -> NormScale:
        """Return the scale of the relative norms in a map, of which the largest counts if a name is in several pairs.

        Args:
            shown: The names in the map; no other tensor stretches the scale.
        """
        names = set(shown)
        norms: dict[str, float] = {}
        for tensor in self.tensors:
            if tensor.values is not None and tensor.name in names:
                norms[tensor.name] = max(tensor.values.relative_norm, norms.get(tensor.name, 0.0))
        return norm_scale(norms.values())

    def as_json(self) -> dict[str, Any]:
        """Return everything, for `--format json`."""
        counts = self.counts
        return {
            "a": self.a,
            "b": self.b,
            "is_same": self.is_same,
            "counts": {kind: counts.get(kind, 0) for kind in get_args(DiffKind)},
            "read_bytes": self.read_bytes,
            "retied": list(self.retied),
            "ties_a": self.ties_a,
            "ties_b": self.ties_b,
            "tensors": [
                {
                    "kind": tensor.kind,
                    "a": None if tensor.a is None else tensor.a.as_json(),
                    "b": None if tensor.b is None else tensor.b.as_json(),
                    "values": None if tensor.values is None else tensor.values.as_json(),
                }
                for tensor in self.tensors
            ],
            "merged": None if self.merged is None else self.merged.as_json(),
        }


# Shade levels for relative norms: from the smallest to the largest usual one, on a logarithmic scale.


_DECADES: Final = 6
"""Decades that the levels may span; smaller changes have the lowest level."""

_LEAST_REACH: Final = 1.0
"""Decades from a quartile within which no norm is an outlier, however alike the others are."""

_WHISKER: Final = 1.5
"""The same in distances between the quartiles, as in a box plot."""

LEAST: Final = sys.float_info.min
"""Represents a change that has no norm; it has the lowest level and does not affect the scale."""


@dataclass(frozen=True, slots=True)
class NormScale:
    """Mapping of relative norms to levels."""

    low: float
    """Norms up to this one have the lowest level."""
    high: float
    """Norms from this one on have the highest level, infinity included."""

    def level(self, norm: float, levels: int) -> int:
        """Return the level of a norm, from 1 to `levels`."""
        if norm >= self.high:
            return levels
        if norm <= self.low:
            return 1
        share = math.log(norm / self.low) / math.log(self.high / self.low)
        return 1 + round(share * (levels - 1))

    def side(self, norm: float) -> int:
        """Return -1 for a norm below the scale, 1 for one above it, and 0 for any other or a change without a norm."""
        return int(norm > self.high) - int(LEAST < norm < self.low)

    def norm_of(self, level: int, levels: int) -> float:
        """Return a norm in the middle of a level."""
        return self.low * math.pow(self.high / self.low, (level - 1) / (levels - 1))


def norm_scale(norms: Iterable[float]) -> NormScale:
    """Fit a scale to the usual norms, spanning at least a decade so that small differences look small.

    Outliers are beyond its ends: norms that are further from the quartiles than 1.5 times their distance, and than a
    decade.

    Args:
        norms: Any number of non-negative norms; zeros and infinities have no effect.

    Example:
        >>> norm_scale([1e-5, 1e-3]).level(1e-4, 9)
        5
    """
    positive = sorted(norm for norm in norms if LEAST < norm < math.inf)
    if not positive:
        return NormScale(0.1, 1.0)
    decades = [math.log10(norm) for norm in positive]
    first, third = _quantile(decades, 0.25), _quantile(decades, 0.75)
    reach = max(_WHISKER * (third - first), _LEAST_REACH)
    usual = [norm for norm, at in zip(positive, decades, strict=True) if first - reach <= at <= third + reach]
    high = usual[-1]
    return NormScale(min(max(usual[0], high / 10**_DECADES), high / 10), high)


def _quantile(ascending: Sequence[float], share: float) -> float:
    """Interpolate between the two values that have this share of the others below them."""
    position = share * (len(ascending) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ascending) - 1)
    return ascending[below] + (ascending[above] - ascending[below]) * (position - below)
