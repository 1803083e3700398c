"""Checkpoint files written byte by byte with `struct` and `json`: no code that is under test, and none of its peers."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHARDS = 3
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
BIN = "pytorch_model.bin"
BIN_INDEX = "pytorch_model.bin.index.json"
CONFIG = "config.json"

Files = dict[str, bytes]
"""A checkpoint in memory: file name -> bytes."""


@dataclass(frozen=True, slots=True)
class Blob:
    """One tensor as a file holds it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


LAYOUT: dict[str, dict[str, tuple[int, ...]]] = {
    "model-00001-of-00003.safetensors": {"embed.weight": (8, 4)},
    "model-00002-of-00003.safetensors": {"block.bias": (4,), "block.weight": (4, 4)},
    "model-00003-of-00003.safetensors": {"head.bias": (3,), "head.weight": (3, 4)},
}
"""Of the model in `target.py`: shard -> name -> shape, all F32."""

FIRST, SECOND, THIRD = LAYOUT
TOTAL_BYTES = 4 * (8 * 4 + 4 + 4 * 4 + 3 + 3 * 4)


def tensors(seed: int = 1) -> dict[str, Blob]:
    """The weights that `seed` stands for, by name: small exact numbers, different for every seed and element."""
    result: dict[str, Blob] = {}
    for shapes in LAYOUT.values():
        for name, shape in shapes.items():
            result[name] = floats(shape, first=seed * 1000 + len(result) * 100)
    return result


def floats(shape: tuple[int, ...], first: int = 0) -> Blob:
    """An F32 tensor that counts up from `first`."""
    count = math.prod(shape)
    return Blob("F32", shape, struct.pack(f"<{count}f", *range(first, first + count)))


def entries(blobs: Mapping[str, Blob]) -> dict[str, Any]:
    """The header's entries of tensors whose data lie one after another."""
    result: dict[str, Any] = {}
    at = 0
    for name, blob in blobs.items():
        end = at + len(blob.data)
        result[name] = {"dtype": blob.dtype, "shape": list(blob.shape), "data_offsets": [at, end]}
        at = end
    return result


def data(blobs: Mapping[str, Blob]) -> bytes:
    """The data of tensors, one after another."""
    return b"".join(blob.data for blob in blobs.values())


def framed(header: bytes | str, body: bytes = b"", *, length: int | None = None) -> bytes:
    """A safetensors file: the header's length (or the lie in `length`), the header, the data."""
    raw = header.encode("utf-8", "surrogatepass") if isinstance(header, str) else header
    return struct.pack("<Q", len(raw) if length is None else length) + raw + body


def dumps(value: Any) -> str:
    """JSON as the format wants it; NaN and lone surrogates pass."""
    return json.dumps(value, separators=(",", ":"))


def shard(blobs: Mapping[str, Blob], metadata: Mapping[str, Any] | None = None) -> bytes:
    """A valid safetensors file."""
    head = {"__metadata__": dict(metadata or {"format": "pt"}), **entries(blobs)}
    return framed(dumps(head), data(blobs))


def config() -> bytes:
    """The config.json of the model in `target.py`."""
    return dumps({"architectures": ["TinyPretrained"], "model_type": "hfshard_attack"}).encode()


def of_shard(name: str, seed: int = 1) -> dict[str, Blob]:
    """The tensors that the stock layout puts in shard `name`."""
    weights = tensors(seed)
    return {key: weights[key] for key in LAYOUT[name]}


def weight_map() -> dict[str, str]:
    """Name -> shard in the stock layout."""
    return {key: name for name, shapes in LAYOUT.items() for key in shapes}


def index(changes: Mapping[str, Any] | None = None, names: Mapping[str, Any] | None = None) -> bytes:
    """A stock index, with top-level `changes` (None removes) and `names` of the weight_map replaced."""
    value: dict[str, Any] = {"metadata": {"total_size": TOTAL_BYTES}, "weight_map": {**weight_map(), **(names or {})}}
    for key, item in (changes or {}).items():
        value[key] = item
        if item is None:
            del value[key]
    return (json.dumps(value, indent=2) + "\n").encode()


def stock_sharded(seed: int = 1) -> Files:
    """What stock transformers saves in three shards: no hashes anywhere."""
    files = {name: shard(of_shard(name, seed)) for name in LAYOUT}
    return {CONFIG: config(), INDEX: index(), **files}


def stock_single(seed: int = 1) -> Files:
    """What stock transformers saves in one file."""
    return {CONFIG: config(), SINGLE: shard(tensors(seed))}


def flip(raw: bytes, position: int, bit: int = 0) -> bytes:
    """The bytes with one bit turned over."""
    changed = bytearray(raw)
    changed[position] ^= 1 << bit
    return bytes(changed)


def split(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and data of a valid safetensors file, for editing."""
    length = struct.unpack("<Q", raw[:8])[0]
    header: dict[str, Any] = json.loads(raw[8 : 8 + length])
    return header, raw[8 + length :]


def write(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Write files into a folder."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def files_in(folder: Path) -> Files:
    """All files below a folder."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
