"""Attacks on the index: its JSON, its weight_map, its metadata, and shards that it does not fit."""

from __future__ import annotations

import json
from typing import Any

from tests.attacks.files import raw
from tests.attacks.registry import Build, edited, register, register_all, register_contents, replaced

S = raw.SECOND
TEXT = raw.index().decode()

JSONS: dict[str, str | bytes] = {
    "blank": "  \n",
    "not-json": "weights: everywhere\n",
    "null": "null",
    "true": "true",
    "number": "1e5",
    "string": '"model.safetensors"',
    "list": "[]",
    "list-of-the-index": "[" + TEXT + "]",
    "empty-object": "{}",
    "nan": TEXT.replace("268", "NaN"),
    "minus-infinity": TEXT.replace("268", "-Infinity"),
    "trailing-comma": TEXT.replace("268", "268,,"),
    "two-objects": TEXT + TEXT,
    "bom": b"\xef\xbb\xbf" + TEXT.encode(),
    "utf-16": TEXT.encode("utf-16"),
    "latin-1": TEXT.replace("block.bias", "bl\xf6ck.bias").encode("latin-1"),
    "nul": TEXT + "\0",
    "lone-surrogate": TEXT.replace("block.bias", "block.\\udc80"),
    "duplicate-weight-map": TEXT.rstrip()[:-1] + ',"weight_map":{}}',
    "duplicate-metadata": TEXT.rstrip()[:-1] + ',"metadata":{}}',
    "duplicate-key": TEXT.replace('"block.bias"', '"block.bias": "' + raw.FIRST + '",\n "block.bias"'),
    "deep-lists": '{"metadata":{"a":' + "[" * 100_000 + "]" * 100_000 + "}," + TEXT[1:],
    "deep-objects": '{"a":' * 60_000 + "1" + "}" * 60_000,
    "deep-lists-unclosed": "[" * 500_000,
    "deep-after-a-long-start": '{"pad":"'
    + "x" * 5000
    + '","a":'
    + "[1," * 50_000
    + "1"
    + "]" * 50_000
    + ","
    + TEXT[1:],
    "number-of-a-million-digits": TEXT.replace("268", "9" * 1_000_000),
}

MAPS: dict[str, Any] = {
    "missing": None,
    "empty": {},
    "list": list(raw.weight_map().items()),
    "string": raw.FIRST,
    "number": 3,
    "reversed": {file: name for name, file in raw.weight_map().items()},
}
VALUES: dict[str, Any] = {
    "null": None,
    "number": 2,
    "bool": True,
    "list": [S],
    "object": {"file": S},
    "nested-empty-list": [[]],
}
METADATAS: dict[str, Any] = {
    "list": [1],
    "string": "total_size",
    "number": 268,
    "bool": False,
}
MANY = [f'"t{i}":"{S}"' for i in range(100_000)]

INDEXES: dict[str, str | bytes] = {
    **{f"json-{name}": text for name, text in JSONS.items()},
    **{f"map-{name}": raw.index({"weight_map": value}) for name, value in MAPS.items()},
    **{f"map-value-{name}": raw.index(names={"block.bias": value}) for name, value in VALUES.items()},
    **{f"metadata-{name}": raw.index({"metadata": value}) for name, value in METADATAS.items()},
    # A search for the duplicate that is quadratic would take minutes.
    "many-names-and-the-last-twice": '{"weight_map":{' + ",".join([*MANY, MANY[-1]]) + "}}",
}
register_contents("index", raw.stock_sharded, raw.INDEX, INDEXES)


def _sparse(start: bytes, size: int) -> Build:
    return lambda place: (
        place.write(raw.stock_sharded() | {raw.INDEX: start}).stretch(raw.INDEX, size).expects(raw.INDEX)
    )


SPARSE = {
    "8-gigabytes": _sparse(TEXT.encode(), 8 * 1024**3),  # larger than any index; costs its maker one block
    "400-megabytes": _sparse(b"", 400 * 1024**2),  # within the limit of size, and NULs from the first byte on
}
register_all("index-sparse-file-of", SPARSE)
# Within the limit of size, a whole index first, then NULs.
register("index-sparse-file-that-begins-well", _sparse(TEXT.encode(), 400 * 1024**2))


def _shard(blobs: dict[str, raw.Blob], match: str) -> Build:
    return replaced(raw.stock_sharded, S, raw.shard(blobs), match)


def _names(names: dict[str, str], file: str, match: str = "") -> Build:
    """An index that names other files, and the file that the error must name."""
    return edited(raw.stock_sharded, lambda files: files.update({raw.INDEX: raw.index(names=names)}), file, match)


FOURTH = "model-00004-of-00003.safetensors"
BLOCK = raw.of_shard(S)
GOOD = raw.stock_sharded()
KEYS: dict[str, Build] = {
    "missing-shard": edited(
        raw.stock_sharded, lambda files: files.pop(S), S, "not there|missing|not found|does not exist"
    ),
    "missing-key": _shard({"block.weight": BLOCK["block.weight"]}, "block.bias"),
    "extra-key": _shard({**BLOCK, "stranger": raw.floats((2, 2))}, "stranger"),
    "in-two-shards": _shard({**BLOCK, "embed.weight": raw.floats((8, 4))}, "embed.weight"),
    "in-another-shard": _names({"block.bias": raw.THIRD}, S, "block.bias"),
    "shards-swapped": edited(
        raw.stock_sharded, lambda files: files.update({S: GOOD[raw.THIRD], raw.THIRD: GOOD[S]}), S
    ),
    "same-shard-twice": replaced(raw.stock_sharded, S, GOOD[raw.FIRST]),
    "promised-and-nowhere": _names({"ghost": S}, S, "ghost"),
    "promised-shard-is-nowhere": _names({"ghost": FOURTH}, FOURTH),
    "index-lists-itself": _names({"block.bias": raw.INDEX}, raw.INDEX),
}
register_all("keys", KEYS)


def _forget_a_shard(files: raw.Files) -> None:
    value = json.loads(files[raw.INDEX])
    value["weight_map"] = {name: file for name, file in value["weight_map"].items() if file != raw.FIRST}
    files[raw.INDEX] = json.dumps(value).encode()


# What the index forgets, no file gives: the model's own keys must miss it. A state dict can't know.
register(
    "keys-index-forgets-a-shard",
    edited(raw.stock_sharded, _forget_a_shard, "", "embed.weight|total_size"),
    entries=("module",),
)
