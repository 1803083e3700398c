"""Attacks on the header of a shard: its length, its JSON, and what it says of tensors."""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Callable
from typing import Any

from tests.attacks.files import raw
from tests.attacks.registry import Expected, Place, attack, edit_stock, register

S = raw.SECOND
SHARD = Expected(S)
HUGE = 2**63 - 1

LENGTHS: dict[str, int] = {
    "length-zero": 0,
    "length-one": 1,
    "length-2-to-40": 2**40,
    "length-2-to-63": 2**63,
    "length-2-to-64-less-1": 2**64 - 1,
    "length-over-the-format-limit": 100_000_001,
    "length-negative-as-signed": 2**64 - 200,
}


def _with_length(length: int, files: raw.Files) -> None:
    files[S] = struct.pack("<Q", length) + files[S][8:]


def _with_length_off_by(delta: int, files: raw.Files) -> None:
    _with_length(struct.unpack("<Q", files[S][:8])[0] + delta, files)


def _big_endian(files: raw.Files) -> None:
    files[S] = files[S][:8][::-1] + files[S][8:]


def _add_shard_edit(name: str, change: Callable[[raw.Files], None]) -> None:
    register(f"header-{name}", edit_stock(change, SHARD))


for _name, _length in LENGTHS.items():
    _add_shard_edit(_name, functools.partial(_with_length, _length))
for _name, _delta in {"1-short": -1, "1-long": 1, "into-the-data": 40, "past-the-file": 81}.items():
    _add_shard_edit(f"length-{_name}", functools.partial(_with_length_off_by, _delta))
_add_shard_edit("length-big-endian", _big_endian)

VALID = raw.dumps({"__metadata__": {"format": "pt"}, **raw.entries(raw.of_shard(S))})
DATA = raw.data(raw.of_shard(S))
ENTRY = '"block.bias":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}'

JSONS: dict[str, str | bytes] = {
    "blank": " " * 64,
    "not-json": "{these are not the tensors}",
    "list": "[" + VALID + "]",
    "null": "null",
    "number": "7",
    "string": '"block.weight"',
    "trailing-comma": VALID[:-1] + ",}",
    "comment": VALID + "/* */",
    "second-object": VALID + "{}",
    "leading-blank": " " + VALID,
    "bom": b"\xef\xbb\xbf" + VALID.encode(),
    "utf-16": VALID.encode("utf-16-le"),
    "utf-32": VALID.encode("utf-32-be"),
    "nul-at-the-end": VALID + "\0",
    "single-quotes": VALID.replace('"', "'"),
    "invalid-utf-8-in-a-name": VALID.encode().replace(b"block.bias", b"block.\xff\xfes"),
    "overlong-utf-8-in-a-name": VALID.encode().replace(b"block.bias", b"block.b\xc0\xae\xc0"),
    "raw-surrogate-in-a-name": VALID.replace("block.bias", "block.\ud800"),
    "escaped-lone-surrogate-in-a-name": VALID.replace("block.bias", "block.\\ud800"),
    "raw-newline-in-a-name": VALID.replace("block.bias", "block\nbias"),
    "escape-codes-in-a-name": VALID.replace("block.bias", "\\u001b[2J\\u001b[31mok"),
    "bidi-override-in-a-name": VALID.replace("block.bias", "\\u202egnp.saib"),
    "one-megabyte-name": VALID.replace("block.bias", "b" * 1_000_000),
    "nan": VALID.replace("[0,16]", "[NaN,16]"),
    "infinity": VALID.replace("[0,16]", "[0,Infinity]"),
    "duplicate-tensor": "{" + ENTRY + "," + VALID[1:],
    "duplicate-tensor-other-bytes": "{" + ENTRY.replace("F32", "I32") + "," + VALID[1:],
    "duplicate-dtype": VALID.replace('"dtype":"F32"', '"dtype":"I32","dtype":"F32"', 1),
    "duplicate-offsets": VALID.replace('"data_offsets":[0,16]', '"data_offsets":[0,16],"data_offsets":[0,16]'),
    "duplicate-metadata": VALID[:-1] + ',"__metadata__":{}}',
    "deep-lists": '{"__metadata__":{"a":' + "[" * 100_000 + "]" * 100_000 + "}}",
    "deep-objects": '{"a":' * 50_000 + "0" + "}" * 50_000,
    "deep-unclosed": "[" * 200_000,
    "number-of-a-million-digits": VALID.replace("[0,16]", "[0," + "9" * 1_000_000 + "]"),
    "exponent-bomb": VALID.replace("[0,16]", "[0,1e999999999]"),
}


def _with_json(text: str | bytes, files: raw.Files) -> None:
    files[S] = raw.framed(text, DATA)


for _name, _text in JSONS.items():
    _add_shard_edit(f"json-{_name}", functools.partial(_with_json, _text))


@attack("header")
def many_names_and_the_last_twice(place: Place) -> Expected:
    """A search for the duplicate that is quadratic would take minutes."""
    names = [f'"t{i}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for i in range(60_000)]
    files = raw.stock_sharded()
    files[S] = raw.framed("{" + ",".join([*names, names[-1]]) + "}")
    place.write(files)
    return SHARD


@attack("header")
def sparse_file_of_the_format_limit(place: Place) -> Expected:
    """A header of 100 MB of NULs costs its maker nothing."""
    place.write(raw.stock_sharded())
    path = place.checkpoint / S
    path.write_bytes(struct.pack("<Q", 100_000_000))
    os.truncate(path, 100_000_008)
    return SHARD


@attack("header")
def sparse_file_that_begins_well(place: Place) -> Expected:
    """The same behind a few bytes of a header."""
    place.write(raw.stock_sharded())
    path = place.checkpoint / S
    path.write_bytes(struct.pack("<Q", 100_000_000) + VALID.encode())
    os.truncate(path, 100_000_008)
    return SHARD


def _entry_edit(changes: dict[str, Any], name: str, files: raw.Files) -> None:
    header, body = raw.split(files[S])
    entry = header[name]
    for key, value in changes.items():
        entry[key] = value
        if value is Ellipsis:
            del entry[key]
    offsets = changes.get("data_offsets")
    if isinstance(offsets, list) and len(offsets) == 2 and 0 <= offsets[1] < len(body):
        body = body[: int(offsets[1])]
    files[S] = raw.framed(raw.dumps(header), body)


ENTRIES: dict[str, dict[str, Any]] = {
    "no-dtype": {"dtype": ...},
    "no-shape": {"shape": ...},
    "no-offsets": {"data_offsets": ...},
    "dtype-unknown": {"dtype": "F33"},
    "dtype-lower-case": {"dtype": "f32"},
    "dtype-null": {"dtype": None},
    "dtype-number": {"dtype": 32},
    "dtype-list": {"dtype": ["F32"]},
    "dtype-object": {"dtype": {"F32": 1}},
    "dtype-one-megabyte": {"dtype": "F" * 1_000_000},
    "dtype-too-wide": {"dtype": "F64"},
    "dtype-too-narrow": {"dtype": "BF16"},
    "dtype-half-a-byte": {"dtype": "F4", "shape": [3]},
    "shape-null": {"shape": None},
    "shape-number": {"shape": 16},
    "shape-string": {"shape": "44"},
    "shape-object": {"shape": {"0": 4, "1": 4}},
    "shape-nested": {"shape": [[4, 4]]},
    "shape-float": {"shape": [4.0, 4]},
    "shape-bool": {"shape": [True, 16]},
    "shape-null-inside": {"shape": [None, 4]},
    "shape-string-inside": {"shape": ["4", 4]},
    "shape-negative": {"shape": [-4, -4]},
    "shape-too-small": {"shape": [4, 3]},
    "shape-too-large": {"shape": [4, 5]},
    "shape-scalar": {"shape": []},
    "shape-2-to-64": {"shape": [2**64, 4]},
    "shape-product-wraps-to-16": {"shape": [2**32, 2**32, 16]},
    "shape-product-wraps-to-zero": {"shape": [2**62, 4], "data_offsets": [16, 16]},
    "shape-that-no-tensor-has": {"shape": [HUGE, HUGE, 0], "data_offsets": [16, 16]},
    "shape-of-100000-large-dims": {"shape": [HUGE] * 100_000},
    "shape-of-100000-dims": {"shape": [1] * 100_000 + [16]},
    "offsets-null": {"data_offsets": None},
    "offsets-string": {"data_offsets": "16,80"},
    "offsets-one": {"data_offsets": [16]},
    "offsets-three": {"data_offsets": [16, 80, 80]},
    "offsets-empty": {"data_offsets": []},
    "offsets-float": {"data_offsets": [16.0, 80.0]},
    "offsets-bool": {"data_offsets": [True, 80]},
    "offsets-negative": {"data_offsets": [-64, 0]},
    "offsets-2-to-64": {"data_offsets": [2**64, 2**64 + 64]},
    "offsets-near-2-to-64": {"data_offsets": [2**64 - 64, 2**64 - 1]},
    "offsets-near-2-to-63": {"data_offsets": [HUGE - 64, HUGE]},
    "offsets-backwards": {"data_offsets": [80, 16]},
    "offsets-out-of-range": {"data_offsets": [80, 144]},
    "offsets-overlap": {"data_offsets": [8, 72]},
    "offsets-gap": {"data_offsets": [20, 84]},
    "offsets-into-the-header": {"data_offsets": [-16, 48]},
}
for _name, _changes in ENTRIES.items():
    _add_shard_edit(f"entry-{_name}", functools.partial(_entry_edit, _changes, "block.weight"))


def _set(key: str, value: Any, files: raw.Files) -> None:
    header, body = raw.split(files[S])
    header[key] = value
    files[S] = raw.framed(raw.dumps(header), body)


VALUES: dict[str, tuple[str, Any]] = {
    "entry-null": ("block.weight", None),
    "entry-list": ("block.weight", ["F32", [4, 4], [16, 80]]),
    "entry-string": ("block.weight", "F32"),
    "entry-number": ("block.weight", 0),
    "metadata-list": ("__metadata__", ["format", "pt"]),
    "metadata-string": ("__metadata__", "pt"),
    "metadata-value-number": ("__metadata__", {"format": 1}),
    "metadata-value-null": ("__metadata__", {"format": None}),
    "metadata-value-object": ("__metadata__", {"format": {"pt": 1}}),
}
for _name, (_key, _value) in VALUES.items():
    _add_shard_edit(_name, functools.partial(_set, _key, _value))


@attack("header")
def two_tensors_in_the_same_bytes(place: Place) -> Expected:
    """Both entries are whole by themselves."""
    files = raw.stock_sharded()
    _entry_edit({"data_offsets": [0, 64]}, "block.weight", files)
    place.write(files)
    return SHARD


@attack("header")
def bytes_behind_the_last_tensor(place: Place) -> Expected:
    """A place to hide a payload."""
    files = raw.stock_sharded()
    files[S] += b"#!/bin/sh\n"
    place.write(files)
    return SHARD


@attack("header")
def bytes_before_the_first_tensor(place: Place) -> Expected:
    """Data that begin at byte 4."""
    files = raw.stock_sharded()
    header, body = raw.split(files[S])
    for name in ("block.bias", "block.weight"):
        header[name]["data_offsets"] = [at + 4 for at in header[name]["data_offsets"]]
    files[S] = raw.framed(raw.dumps(header), b"MZ\0\0" + body)
    place.write(files)
    return SHARD


@attack("header", entries=("state_dict", "module", "pretrained"))
def dtype_that_torch_lacks(place: Place) -> Expected:
    """The format has six-bit floats: the file is whole, and nothing can hold its tensor."""
    files = raw.stock_sharded()
    _entry_edit({"dtype": "F6_E2M3", "data_offsets": [16, 28]}, "block.weight", files)
    place.write(files)
    return SHARD


@attack("header")
def no_tensors_at_all(place: Place) -> Expected:
    """The header is valid, and every key is missing from it."""
    files = raw.stock_sharded()
    files[S] = raw.framed('{"__metadata__":{"format":"pt"}}')
    place.write(files)
    return SHARD
