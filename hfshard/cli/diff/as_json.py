"""A diff as one JSON document."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any, get_args

from hfshard.viewing.diff.headline import headline
from hfshard.viewing.diff.report import CheckpointDiff, DiffKind, ValueDiff
from hfshard.viewing.tensor_entry import TensorEntry


def diff_as_json(found: CheckpointDiff) -> dict[str, Any]:
    """Everything, for `--format json`; numbers that JSON lacks (infinity) are null."""
    counts = found.counts
    return {
        "a": found.a,
        "b": found.b,
        "is_same": found.is_same,
        "headline": headline(found),
        "counts": {kind: counts.get(kind, 0) for kind in get_args(DiffKind)},
        "read_bytes": found.read_bytes,
        "retied": list(found.retied),
        "ties_a": found.ties_a,
        "ties_b": found.ties_b,
        "tensors": [
            {
                "kind": tensor.kind,
                "a": _facts_as_json(tensor.a),
                "b": _facts_as_json(tensor.b),
                "values": _values_as_json(tensor.values),
            }
            for tensor in found.tensors
        ],
    }


def _facts_as_json(facts: TensorEntry | None) -> dict[str, Any] | None:
    return None if facts is None else {**asdict(facts), "shape": list(facts.shape)}


def _values_as_json(values: ValueDiff | None) -> dict[str, Any] | None:
    if values is None:
        return None
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(values).items()
    }
