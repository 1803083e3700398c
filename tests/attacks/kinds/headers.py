"""Attacks on the header of a shard: its length, its JSON, and what it says of tensors."""

from __future__ import annotations

import struct
from typing import Any

from tests.attacks.files import raw
from tests.attacks.registry import Build, register, register_all, register_contents, replaced

S = raw.SECOND
HUGE = 2**63 - 1
GOOD = raw.stock_sharded()[S]
LENGTH = struct.unpack("<Q", GOOD[:8])[0]
VALID = GOOD[8 : 8 + LENGTH].decode()
DATA = GOOD[8 + LENGTH :]

LENGTHS: dict[str, int] = {
    "length-zero": 0,
    "length-one": 1,
    "length-2-to-40": 2**40,
    "length-2-to-63": 2**63,
    "length-2-to-64-less-1": 2**64 - 1,
    "length-over-the-format-limit": 100_000_001,
    "length-negative-as-signed": 2**64 - 200,
    "length-1-short": LENGTH - 1,
    "length-1-long": LENGTH + 1,
    "length-into-the-data": LENGTH + 40,
    "length-past-the-file": LENGTH + 81,
    "length-big-endian": int.from_bytes(GOOD[:8], "big"),
}

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
MANY = [f'"t{i}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for i in range(60_000)]

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


def _with(key: str, value: Any, body: bytes = DATA) -> bytes:
    header, _ = raw.split(GOOD)
    return raw.framed(raw.dumps({**header, key: value}), body)


def _with_entry(changes: dict[str, Any]) -> bytes:
    """Change, or with an ellipsis remove, what the header says of block.weight."""
    entry = {**raw.split(GOOD)[0]["block.weight"], **changes}
    offsets = changes.get("data_offsets")
    is_within = isinstance(offsets, list) and len(offsets) == 2 and 0 <= offsets[1] < len(DATA)
    body = DATA[: int(offsets[1])] if offsets and is_within else DATA
    return _with("block.weight", {key: value for key, value in entry.items() if value is not ...}, body)


def _four_bytes_on() -> bytes:
    header, body = raw.split(GOOD)
    for name in ("block.bias", "block.weight"):
        header[name]["data_offsets"] = [at + 4 for at in header[name]["data_offsets"]]
    return raw.framed(raw.dumps(header), b"MZ\0\0" + body)


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
SHARDS: dict[str, bytes] = {
    **{name: struct.pack("<Q", length) + GOOD[8:] for name, length in LENGTHS.items()},
    **{f"json-{name}": raw.framed(text, DATA) for name, text in JSONS.items()},
    **{f"entry-{name}": _with_entry(changes) for name, changes in ENTRIES.items()},
    **{name: _with(key, value) for name, (key, value) in VALUES.items()},
    # A search for the duplicate that is quadratic would take minutes.
    "many-names-and-the-last-twice": raw.framed("{" + ",".join([*MANY, MANY[-1]]) + "}"),
    # Both entries are whole by themselves.
    "two-tensors-in-the-same-bytes": _with_entry({"data_offsets": [0, 64]}),
    "bytes-behind-the-last-tensor": GOOD + b"#!/bin/sh\n",  # a place to hide a payload
    "bytes-before-the-first-tensor": _four_bytes_on(),
    # The header is valid, and every key is missing from it.
    "no-tensors-at-all": raw.framed('{"__metadata__":{"format":"pt"}}'),
}
register_contents("header", raw.stock_sharded, S, SHARDS)
# The format has six-bit floats: the file is whole, and nothing can hold its tensor.
register(
    "header-dtype-that-torch-lacks",
    replaced(raw.stock_sharded, S, _with_entry({"dtype": "F6_E2M3", "data_offsets": [16, 28]})),
    entries=("state_dict", "module", "pretrained"),
)
# A header of 100 MB of NULs costs its maker nothing.
FORMAT_LIMIT = struct.pack("<Q", 100_000_000)
SPARSE = {
    "sparse-file-of-the-format-limit": FORMAT_LIMIT,
    "sparse-file-that-begins-well": FORMAT_LIMIT + VALID.encode(),
}


def _sparse(start: bytes) -> Build:
    return lambda place: place.write(raw.stock_sharded() | {S: start}).stretch(S, 100_000_008).expects(S)


register_all("header", {name: _sparse(start) for name, start in SPARSE.items()})
