"""Diffs made by hand."""

from __future__ import annotations

from collections.abc import Iterable

from hfshard.viewing.results import CheckpointDiff, DiffKind, TensorDiff, TensorEntry, ValueDiff


def facts(name: str, dtype: str = "F32", file: str = "model.safetensors") -> TensorEntry:
    """A tensor of two elements."""
    return TensorEntry(name, dtype, (2,), 8, file)


def tensor_diff(kind: DiffKind, name: str, values: ValueDiff | None = None) -> TensorDiff:
    """One tensor, under one name."""
    in_a = None if kind == "only_in_b" else facts(name)
    in_b = None if kind == "only_in_a" else facts(name, "BF16" if kind == "cast" else "F32")
    return TensorDiff(kind, in_a, in_b, values)


def renamed(old: str, new: str) -> TensorDiff:
    """The same tensor under two names."""
    return TensorDiff("renamed", facts(old), facts(new))


def values_of(relative_norm: float, changed: int = 2, max_abs: float = 0.25) -> ValueDiff:
    """Of a tensor of two elements."""
    return ValueDiff(2, changed, max_abs, relative_norm, 1.0, 0, 0, 0, 0)


def report_of(tensors: Iterable[TensorDiff], retied: tuple[str, ...] = (), read_bytes: int = 0) -> CheckpointDiff:
    """A report of these tensors."""
    return CheckpointDiff("/a", "/b", tuple(tensors), {}, {}, read_bytes, retied)


def marked(names: Iterable[str], **kinds: Iterable[str]) -> list[TensorDiff]:
    """Tensors that are the same, but for those that have a part of their name listed under another kind."""
    found = []
    for name in names:
        found_kinds = [kind for kind, parts in kinds.items() if any(part in name for part in parts)]
        found.append(tensor_diff(found_kinds[0] if found_kinds else "same", name))  # type: ignore[arg-type]
    return found


BERT = [
    "bert.embeddings.word.weight",
    *(
        f"bert.encoder.layer.{layer}.{part}.{tensor}"
        for layer in range(12)
        for part in ("self.query", "self.key", "self.value", "output.dense")
        for tensor in ("weight", "bias")
    ),
    "bert.pooler.dense.weight",
    "classifier.weight",
    "classifier.bias",
]
"""100 names: 96 in layers, and four."""
