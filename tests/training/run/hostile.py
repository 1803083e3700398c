"""Checkpoints that a stranger made: every checksum is right, and what stands in the two JSON files is not."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hfshard.format.index import sha256_of
from hfshard.format.strict_json import dump_json

TRAINING_STATE, MANIFEST = "training_state.json", "checkpoint.json"

DEEP: list[Any] = []
for _ in range(60):
    DEEP = [DEEP]

VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 10**30, 1e308, "", "..", "/etc/passwd", "../../secret", "\u0000", [], {}, [None], [[], {}], DEEP,
    {"$type": "tensor", "name": "nobody"}, {"$type": "tensor", "name": ["a"]}, {"$type": "tensor"},
    {"$type": "tensor", "name": "counter/mean"}, {"$type": "tensors", "at": "x", "keys": "abc"},
    {"$type": "tensors", "at": 1, "keys": [[]]}, {"$type": "unheard-of"}, {"$type": ["list"]}, {"$type": None},
    {"$type": "int", "hex": "xyz"}, {"$type": "int", "hex": 5}, {"$type": "int", "hex": "0x" + "f" * 40},
    {"$type": "float", "value": "12"}, {"$type": "float", "value": "nan"}, {"$type": "bytes", "base64": "?"},
    {"$type": "complex", "items": ["a", {}]}, {"$type": "range", "items": [1, 2, 0]},
    {"$type": "range", "items": [0, 10**30]}, {"$type": "slice", "items": []}, {"$type": "set", "items": [[1]]},
    {"$type": "dict", "items": [1, 2]}, {"$type": "dict", "items": [[[], 1]]}, {"$type": "Counter", "items": 5},
    {"$type": "deque", "items": [1], "maxlen": -1}, {"$type": "defaultdict", "items": [], "factory": "eval"},
    {"$type": "Size", "items": ["a"]}, {"$type": "dtype", "value": "nn"}, {"$type": "dtype", "value": "float32"},
    {"$type": "device", "value": "toaster:1"}, {"$type": "device", "value": []}, {"$type": "not_stored"},
    {"$type": "object", "class_name": "os.system", "state": {}}, {"$type": "object", "class_name": 5, "state": []},
    {"$type": "ndarray", "dtype": "O", "shape": [1], "bytes": {"$type": "tensor", "name": "counter/mean"}},
    {"$type": "ndarray", "dtype": "<f4", "shape": [10**12], "bytes": {"$type": "tensor", "name": "counter/mean"}},
    {"$type": "ndarray", "dtype": "<f4", "shape": "x", "bytes": 3}, {"$type": "numpy", "dtype": "<f4", "base64": ""},
    {"$type": "numpy", "dtype": "(((", "base64": "AAAA"}, {"$type": "numpy", "dtype": "i4,i4", "base64": "AAAA"},
    {"$type": "numpy", "dtype": {"names": []}, "base64": "AAAA"}, {"$type": "numpy", "dtype": None, "base64": "A==="},
    {"$type": "numpy", "dtype": "<U1000000000", "base64": ""}, {"$type": "tuple", "items": [DEEP]},
)  # fmt: skip
"""What is put in the place of a value."""


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from _places(value[key], (*path, key))


def mutated(value: dict[str, Any], draw: random.Random) -> tuple[dict[str, Any], str]:
    """A copy with one change somewhere, and the change in words."""
    value = copy.deepcopy(value)
    path = draw.choice(list(_places(value)))
    holder: Any = value
    for key in path[:-1]:
        holder = holder[key]
    how = draw.choice(("put", "put", "put", "drop", "nest", "rename"))
    if how == "drop":
        del holder[path[-1]]
    elif how == "rename" and isinstance(holder, dict):
        holder[f"../{path[-1]}"] = holder.pop(path[-1])
    elif how == "nest":
        holder[path[-1]] = [holder[path[-1]]]
    else:
        how = draw.choice(VALUES)
        holder[path[-1]] = copy.deepcopy(how)
    return value, f"{path}: {how!r:.120}"


def training_state_of(checkpoint: Path) -> dict[str, Any]:
    """What stands in its training_state.json."""
    return dict(json.loads((checkpoint / TRAINING_STATE).read_text()))


def manifest_of(checkpoint: Path) -> dict[str, Any]:
    """What stands in its checkpoint.json, but for its checksum."""
    body = dict(json.loads((checkpoint / MANIFEST).read_text()))
    del body["checksum"]
    return body


def write_training_state(checkpoint: Path, saved: dict[str, Any]) -> None:
    """Put a training state in the place of the checkpoint's own, and its checksum into the manifest."""
    raw = json.dumps(saved).encode()
    (checkpoint / TRAINING_STATE).write_bytes(raw)
    body = manifest_of(checkpoint)
    body["files"][TRAINING_STATE] = record_of(raw)
    write_manifest(checkpoint, body)


def write_manifest(checkpoint: Path, body: dict[str, Any]) -> None:
    """Put a manifest in the place of the checkpoint's own, with its checksum."""
    (checkpoint / MANIFEST).write_text(json.dumps({**body, "checksum": sha256_of(dump_json(body))}))


def record_of(raw: bytes) -> dict[str, Any]:
    """What a manifest says of a small file."""
    return {"size": len(raw), "sha256": sha256_of(raw)}
