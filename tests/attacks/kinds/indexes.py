"""Attacks on the index: its JSON, its weight_map, its metadata, and shards that it does not fit."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from typing import Any

from tests.attacks.files import raw
from tests.attacks.registry import Expected, Place, attack, edit_stock, register

INDEX = Expected(raw.INDEX)
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


def _with(text: str | bytes, files: raw.Files) -> None:
    files[raw.INDEX] = text.encode() if isinstance(text, str) else text


for _name, _text in JSONS.items():
    register(f"index-json-{_name}", edit_stock(functools.partial(_with, _text), INDEX))

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
for _name, _value in MAPS.items():
    _changes = {"weight_map": _value}
    register(f"index-map-{_name}", edit_stock(lambda files, c=_changes: _with(raw.index(c), files), INDEX))  # type: ignore[misc]
for _name, _value in VALUES.items():
    _names = {"block.bias": _value}
    register(
        f"index-map-value-{_name}",
        edit_stock(lambda files, n=_names: _with(raw.index(names=n), files), INDEX),  # type: ignore[misc]
    )
METADATAS: dict[str, Any] = {
    "list": [1],
    "string": "total_size",
    "number": 268,
    "bool": False,
}
for _name, _value in METADATAS.items():
    _changes = {"metadata": _value}
    register(f"index-metadata-{_name}", edit_stock(lambda files, c=_changes: _with(raw.index(c), files), INDEX))  # type: ignore[misc]


@attack("index")
def many_names_and_the_last_twice(place: Place) -> Expected:
    """A search for the duplicate that is quadratic would take minutes."""
    names = [f'"t{i}":"{S}"' for i in range(100_000)]
    place.write(raw.stock_sharded() | {raw.INDEX: ('{"weight_map":{' + ",".join([*names, names[-1]]) + "}}").encode()})
    return INDEX


@attack("index")
def sparse_file_of_8_gigabytes(place: Place) -> Expected:
    """Larger than any index; costs its maker one block."""
    place.write(raw.stock_sharded())
    os.truncate(place.checkpoint / raw.INDEX, 8 * 1024**3)
    return INDEX


@attack("index")
def sparse_file_of_400_megabytes(place: Place) -> Expected:
    """Within the limit of size, and NULs from the first byte on."""
    place.write(raw.stock_sharded())
    path = place.checkpoint / raw.INDEX
    path.write_bytes(b"")
    os.truncate(path, 400 * 1024**2)
    return INDEX


@attack("index")
def sparse_file_that_begins_well(place: Place) -> Expected:
    """Within the limit of size, a whole index first, then NULs."""
    place.write(raw.stock_sharded())
    os.truncate(place.checkpoint / raw.INDEX, 400 * 1024**2)
    return INDEX


def _shard_edit(name: str, file: str, change: Callable[[raw.Files], None], match: str = "") -> None:
    register(f"keys-{name}", edit_stock(change, Expected(file, match)))


def _missing_shard(files: raw.Files) -> None:
    del files[S]


def _missing_key(files: raw.Files) -> None:
    blobs = raw.of_shard(S)
    del blobs["block.bias"]
    files[S] = raw.shard(blobs)


def _extra_key(files: raw.Files) -> None:
    files[S] = raw.shard({**raw.of_shard(S), "stranger": raw.floats((2, 2))})


def _key_in_two_shards(files: raw.Files) -> None:
    files[S] = raw.shard({**raw.of_shard(S), "embed.weight": raw.floats((8, 4))})


def _key_in_the_other_shard(files: raw.Files) -> None:
    files[raw.INDEX] = raw.index(names={"block.bias": raw.THIRD})


def _swapped(files: raw.Files) -> None:
    files[S], files[raw.THIRD] = files[raw.THIRD], files[S]


def _same_shard_twice(files: raw.Files) -> None:
    files[S] = files[raw.FIRST]


def _promised_key(files: raw.Files) -> None:
    files[raw.INDEX] = raw.index(names={"ghost": S})


def _promised_shard(files: raw.Files) -> None:
    files[raw.INDEX] = raw.index(names={"ghost": "model-00004-of-00003.safetensors"})


def _index_forgets_a_shard(files: raw.Files) -> None:
    value = json.loads(files[raw.INDEX])
    value["weight_map"] = {name: file for name, file in value["weight_map"].items() if file != raw.FIRST}
    files[raw.INDEX] = json.dumps(value).encode()


def _index_lists_itself(files: raw.Files) -> None:
    files[raw.INDEX] = raw.index(names={"block.bias": raw.INDEX})


_shard_edit("missing-shard", S, _missing_shard, "not there|missing|not found|does not exist")
_shard_edit("missing-key", S, _missing_key, "block.bias")
_shard_edit("extra-key", S, _extra_key, "stranger")
_shard_edit("in-two-shards", S, _key_in_two_shards, "embed.weight")
_shard_edit("in-another-shard", S, _key_in_the_other_shard, "block.bias")
_shard_edit("shards-swapped", S, _swapped)
_shard_edit("same-shard-twice", S, _same_shard_twice)
_shard_edit("promised-and-nowhere", S, _promised_key, "ghost")
_shard_edit("promised-shard-is-nowhere", "model-00004-of-00003.safetensors", _promised_shard)
_shard_edit("index-lists-itself", raw.INDEX, _index_lists_itself)
# What the index forgets, no file gives: the model's own keys must miss it. A state dict can't know.
register(
    "keys-index-forgets-a-shard",
    edit_stock(_index_forgets_a_shard, Expected("", "embed.weight|total_size")),
    entries=("module",),
)
